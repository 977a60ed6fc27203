"""Ingest health as HTML: how fresh, what waits, what was refused or left out, how much of the traffic is covered."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from html import escape

from vllm_slo.analytics.counts import Counts
from vllm_slo.analytics.coverage import Coverage
from vllm_slo.analytics.health import Freshness, ReceiverState
from vllm_slo.analytics.instances import PARTS, Instance
from vllm_slo.dashboards import names
from vllm_slo.dashboards.units import age_text, bytes_text, count_text, percent_text

Row = tuple[str, str]


def health_table(
    fresh: Freshness | None,
    receiver: ReceiverState,
    counts: Counts,
    covered: Sequence[Coverage],
    servers: Sequence[Instance],
    now: datetime,
) -> str:
    """HTML of four small tables."""
    return (
        "<div class='slo-health'>"
        + _table("Freshness and receiver", _receiver(fresh, receiver, now))
        + _table("What each server runs", _levels(servers))
        + _table("Left out of statistics", _left_out(counts))
        + _table("Coverage: spans received of requests finished", _coverage(covered))
        + "</div>"
    )


def _receiver(fresh: Freshness | None, receiver: ReceiverState, now: datetime) -> list[Row]:
    rows = [("newest request", "no data" if fresh is None else _when(fresh.last_start, now))]
    if fresh is not None:
        rows.append(("received", _when(fresh.last_received, now)))
    if receiver.counted_at is None:
        return [*rows, ("receiver", "unknown: no spool of one here")]
    counted_at = _when(receiver.counted_at, now)
    waits = "nothing waits"
    if receiver.waiting_bytes:
        since = f", {age_text(now - receiver.waiting_since)}" if receiver.waiting_since else ""
        waits = f"{bytes_text(receiver.waiting_bytes)}{since}"
    rows += [("spool, not yet in the lake", waits), ("counted since its first start, until", counted_at)]
    rows += [("spans accepted", count_text(receiver.accepted))]
    rows += [("duplicates removed", count_text(receiver.duplicates))]
    rows += [(f"refused: {names.reason(r)}", count_text(n)) for r, n in sorted(receiver.refused.items())]
    if not receiver.refused:
        rows.append(("refused", "0"))
    if receiver.quarantined_segments:
        rows.append(("segments in quarantine", count_text(receiver.quarantined_segments)))
    return rows


def _left_out(counts: Counts) -> list[Row]:
    rows = [
        (names.reason(r), f"{count_text(n)} ({percent_text(n / counts.total)})") for r, n in counts.left_out.items()
    ]
    return rows or [("no row of this selection", "0")]


def _levels(servers: Sequence[Instance]) -> list[Row]:
    rows = [(each.name or "no instance named", level_text(each)) for each in servers]
    return rows or [("no server in this selection", "unknown")]


def level_text(server: Instance) -> str:
    """`stock`, or the probe with the parts of it that were seen, and since when it says nothing any more."""
    if server.level == "stock":
        return "stock vLLM"
    missing = [names.PARTS[part] for part in PARTS if part not in server.running]
    seen = ", ".join(names.PARTS[part] for part in server.running) or "no part seen"
    version = f" {server.version}" if server.version else ""
    silent = f"; silent since {server.silent_since:%-d %b %H:%M:%S} UTC" if server.silent_since else ""
    return f"probe{version}: {seen}" + (f"; no {', no '.join(missing)}" if missing else "") + silent


def _coverage(covered: Sequence[Coverage]) -> list[Row]:
    if not covered:
        return [("no instance in this selection", "unknown")]
    return [(c.instance, coverage_text(c)) for c in covered]


def coverage_text(covered: Coverage) -> str:
    """Covered of finished, in words; unknown where nothing was scraped."""
    if covered.covered is None or covered.finished is None:
        return "unknown"
    return f"{count_text(covered.covered)} of {count_text(covered.finished)}"


def _when(moment: datetime, now: datetime) -> str:
    return f"{moment:%-d %b %H:%M:%S} UTC, {age_text(now - moment)} ago"


def _table(caption: str, rows: Sequence[Row]) -> str:
    body = "".join(f"<tr><th scope='row'>{escape(label)}</th><td>{escape(value)}</td></tr>" for label, value in rows)
    return f"<div class='scroll'><table><caption>{escape(caption)}</caption><tbody>{body}</tbody></table></div>"
