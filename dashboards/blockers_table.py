"""The requests that were in the way, as an HTML table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from vllm_slo.analytics.blockers import Blocker
from vllm_slo.dashboards import names
from vllm_slo.dashboards.units import count_text, seconds_text


def blockers_table(found: Sequence[Blocker]) -> str:
    """One line a request, the one that cost the tail most first; a column of tenants where any is known."""
    tenants = any(each.tenant is not None for each in found)
    head = ["request", "bucket", "prompt tokens", *(["tenant"] if tenants else []), "took", "requests behind", "for"]
    rows = "".join(_line(each, tenants) for each in found)
    columns = "".join(f"<th scope='col'>{escape(text)}</th>" for text in head)
    return (
        "<div class='slo-figures' data-blockers><table><thead><tr>"
        f"{columns}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _line(each: Blocker, tenants: bool) -> str:
    size = "unknown" if each.prompt_tokens is None else count_text(each.prompt_tokens)
    tenant = ["none named" if each.tenant is None else each.tenant] if tenants else []
    cells = [
        "unknown" if each.prompt_tokens is None else names.bucket(each.bucket),
        size,
        *tenant,
        names.QUEUE[each.reason],
        count_text(each.waited),
        seconds_text(each.nanoseconds / 1e9),
    ]
    values = "".join(f"<td>{escape(text)}</td>" for text in cells)
    return f"<tr><th scope='row'>{escape(each.id)}</th>{values}</tr>"
