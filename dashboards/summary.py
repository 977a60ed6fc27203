"""The strip of headline figures at the top of the page, as HTML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from vllm_slo.analytics.counts import Counts
from vllm_slo.analytics.percentiles import PercentileTable
from vllm_slo.dashboards import names
from vllm_slo.dashboards.units import count_text, percent_text, quantile_text, seconds_text


@dataclass(frozen=True)
class Tile:
    """One figure: what it is, the figure, a line under it, and which statistic it is."""

    key: str
    label: str
    value: str
    note: str
    statistic: str = ""


def tiles(counts: Counts, tables: Mapping[str, PercentileTable]) -> list[Tile]:
    """Requests, errors, rows left out, then the median and the tail of each metric over the whole selection."""
    ratio = percent_text(counts.errors / counts.counted) if counts.counted else "no data"
    reasons = ", ".join(f"{count_text(n)} {names.reason(r)}" for r, n in counts.left_out.items())
    found = [
        Tile("requests", "Requests", count_text(counts.total), f"{count_text(counts.counted)} in the statistics"),
        Tile("errors", "Errors", count_text(counts.errors), f"{ratio} of those"),
        Tile("left_out", "Left out", count_text(sum(counts.left_out.values())), reasons or "no row was unusable"),
    ]
    return found + [_latency(table) for table in tables.values()]


def _latency(table: PercentileTable) -> Tile:
    label, cell = names.METRICS[table.metric], table.overall
    if cell is None:
        return Tile(table.metric, label, "no data", "no request has it")
    best = max((q for q in (0.5, 0.9, 0.95, 0.99) if cell.enough(q)), default=None)
    if best is None:
        return Tile(table.metric, label, seconds_text(cell.maximum), f"n={cell.rows}, too few for P50", "max")
    note = f"P50 {seconds_text(cell.value(0.5))}, max {seconds_text(cell.maximum)}"
    return Tile(table.metric, label, seconds_text(cell.value(best)), note, quantile_text(best))


def summary(shown: list[Tile]) -> str:
    """HTML of the strip."""
    cells = "".join(
        f"<div class='tile' data-tile='{tile.key}'><span class='label'>{escape(tile.label)}</span>"
        f"<span class='figure'>{escape(tile.value)}<small>{escape(tile.statistic)}</small></span>"
        f"<span class='under'>{escape(tile.note)}</span></div>"
        for tile in shown
    )
    return f"<div class='slo-tiles'>{cells}</div>"
