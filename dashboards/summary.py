"""The strip of headline figures at the top of the page, as HTML."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from vllm_slo.analytics.counts import Counts
from vllm_slo.analytics.coverage import Coverage
from vllm_slo.analytics.histogram import RELATIVE_ERROR
from vllm_slo.analytics.percentiles import PercentileTable
from vllm_slo.dashboards import names
from vllm_slo.dashboards.units import count_text, percent_text, quantile_text, seconds_text

_NUMBER = re.compile(r"(?<=\d) (?=(s|ms|min|h|%)\b)")
NO_BREAK = "\u00a0"
"""Between a number and its unit: a narrow tile does not part them."""


@dataclass(frozen=True)
class Tile:
    """One figure: what it is, the figure, a line under it, and which statistic it is."""

    key: str
    label: str
    value: str
    note: str
    statistic: str = ""


def tiles(counts: Counts, tables: Mapping[str, PercentileTable], covered: Sequence[Coverage] = ()) -> list[Tile]:
    """Requests, errors, requests left out, then the median and the tail of each metric over the whole selection."""
    reasons = ", ".join(f"{count_text(n)} {names.reason(r)}" for r, n in counts.requests_left_out.items())
    found = [
        Tile("requests", "Requests", count_text(counts.requests), f"{count_text(counts.counted)} in the statistics"),
        _errors(counts, covered),
        Tile(
            "left_out", "Left out", count_text(counts.requests - counts.counted), reasons or "no request was unusable"
        ),
    ]
    return found + [_latency(table) for table in tables.values()]


def _errors(counts: Counts, covered: Sequence[Coverage]) -> Tile:
    """From the rows where these tell, else from vLLM's own counters, else unknown: never 0 for want of knowledge.

    Requests that did not finish are left out of latency, and are errors all the same.
    """
    key, label = "errors", "Errors and aborts"
    telling = counts.counted - counts.untold + counts.unfinished
    if telling:
        bad = count_text(counts.errors)
        if counts.untold:
            return Tile(key, label, bad, f"{count_text(counts.untold)} requests do not tell", "or more")
        return Tile(key, label, bad, f"{percent_text(counts.errors / telling)} of {count_text(telling)}")
    counters = [(c.failed, c.finished) for c in covered if c.failed is not None and c.finished]
    if not counters:
        return Tile(key, label, "unknown" if counts.counted else "no data", "spans of vLLM do not tell; scrape it")
    failed, finished = (sum(pair[i] for pair in counters) for i in (0, 1))
    return Tile(key, label, count_text(failed), f"of {count_text(finished)} finished, by vLLM's counters")


def _latency(table: PercentileTable) -> Tile:
    label, cell = names.METRICS[table.metric], table.overall
    if cell is None:
        return Tile(table.metric, label, "no data", "no request has it")
    best = max((q for q in (0.5, 0.9, 0.95, 0.99) if cell.enough(q)), default=None)
    if best is None:
        return Tile(table.metric, label, seconds_text(cell.maximum), f"n={cell.rows}, too few for P50", "max")
    note = f"P50 {seconds_text(cell.value(0.5))}, max {seconds_text(cell.maximum)}"
    error = f", ±{percent_text(RELATIVE_ERROR)}" if table.basis == "rollups" else ""
    return Tile(table.metric, label, seconds_text(cell.value(best)), note + error, quantile_text(best))


def summary(shown: list[Tile]) -> str:
    """HTML of the strip."""
    cells = "".join(
        f"<div class='tile' data-tile='{tile.key}'><span class='label'>{escape(tile.label)}</span>"
        f"<span class='figure'>{escape(tile.value)}<small>{escape(tile.statistic)}</small></span>"
        f"<span class='under'>{_NUMBER.sub(NO_BREAK, escape(tile.note))}</span></div>"
        for tile in shown
    )
    return f"<div class='slo-tiles'>{cells}</div>"
