"""The events of a range as an HTML table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from vllm_slo.analytics.marks import Mark


def event_table(marks: Sequence[Mark]) -> str:
    """One row an event: when, what kind, what, and which shard or instance it concerns."""
    rows = "".join(
        f"<tr><td>{_when(mark)}</td><td>{escape(mark.kind)}</td><td>{escape(mark.title)}</td>"
        f"<td>{escape(mark.where or 'all')}</td></tr>"
        for mark in marks
    )
    head = "".join(f"<th scope='col'>{name}</th>" for name in ("time (UTC)", "kind", "event", "concerns"))
    return f"<div class='slo-events'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"


def _when(mark: Mark) -> str:
    until = f" – {mark.end:%-d %b %H:%M:%S}" if mark.end and mark.end != mark.time else ""
    return f"{mark.time:%-d %b %Y %H:%M:%S}{until}"
