"""One percentile by context bucket and shard as an HTML table: the figure in each cell, its intensity by lightness."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from vllm_slo.analytics.histogram import RELATIVE_ERROR
from vllm_slo.analytics.percentiles import QUANTILES, Cell, PercentileTable
from vllm_slo.dashboards import names
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.units import count_text, percent_text, quantile_text, seconds_text

ALL = "all"
MOST_SHARDS = 20
"""With more shards than this the table shows the ones with most requests, and says so."""


def heat_table(
    table: PercentileTable, quantile: float, counted: int, left_out: int, order: Sequence[str], palette: Palette
) -> str:
    """HTML of the table. ``order`` is that of the buckets; ``counted`` and ``left_out`` are those of the selection.

    A combination without requests says "no data"; one with too few for the quantile gives number and maximum.
    The worst cell is marked in words. Totals are not shaded.
    """
    shards, hidden = _shards(table)
    buckets = _buckets(table, order)
    cells = {(cell.shard, cell.bucket): cell for cell in table.cells if cell.shard in set(shards)}
    shown = [cell for cell in cells.values() if cell.enough(quantile)]
    worst = max(shown, key=lambda cell: cell.value(quantile)) if len(shown) > 1 else None
    scale = _Scale([cell.value(quantile) for cell in shown])

    head = "".join(f"<th scope='col'>{escape(names.bucket(b))}</th>" for b in buckets)
    rows = []
    for shard in shards:
        drawn = [
            _cell(cells.get((shard, b)), quantile, scale, palette, worst, f"{names.shard(shard)}|{names.bucket(b)}")
            for b in buckets
        ]
        total = next((cell for cell in table.by_shard if cell.shard == shard), None)
        drawn.append(_cell(total, quantile, None, palette, None, f"{names.shard(shard)}|{ALL}"))
        rows.append(f"<tr><th scope='row'>{escape(names.shard(shard))}</th>{''.join(drawn)}</tr>")
    totals = {cell.bucket: cell for cell in table.by_bucket}
    drawn = [_cell(totals.get(b), quantile, None, palette, None, f"{ALL}|{names.bucket(b)}") for b in buckets]
    drawn.append(_cell(table.overall, quantile, None, palette, None, f"{ALL}|{ALL}"))
    rows.append(f"<tr class='total'><th scope='row'>all shards</th>{''.join(drawn)}</tr>")

    title = f"{names.METRICS[table.metric]}, {quantile_text(quantile)}"
    return (
        f"<div class='slo-heat' data-metric='{table.metric}' data-quantile='{quantile:g}'>"
        f"<h4>{escape(title)}</h4><div class='scroll'><table><thead><tr><th scope='col'>shard</th>{head}"
        f"<th scope='col'>all</th></tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
        f"<p class='note'>{escape(_note(table, counted, left_out, hidden))}</p></div>"
    )


class _Scale:
    """Intensity of a value between the smallest and the largest one, by ratio; one half when there is no spread."""

    def __init__(self, values: Sequence[float]) -> None:
        positive = [value for value in values if value > 0]
        self._low = math.log(min(positive)) if positive else 0.0
        self._spread = math.log(max(positive)) - self._low if positive else 0.0

    def intensity(self, value: float) -> float:
        if value <= 0:
            return 0.0
        return 0.5 if self._spread == 0 else (math.log(value) - self._low) / self._spread


def _cell(
    cell: Cell | None, quantile: float, scale: _Scale | None, palette: Palette, worst: Cell | None, place: str
) -> str:
    where = f"data-cell='{escape(place, quote=True)}'"
    if cell is None:
        return f"<td class='none' {where}>no data</td>"
    n = f"n={count_text(cell.rows)}"
    known = [f"{quantile_text(q)} {seconds_text(cell.value(q))}" for q in QUANTILES if cell.enough(q)]
    tip = f"title='{' · '.join([n, *known, f'max {seconds_text(cell.maximum)}'])}'"
    if not cell.enough(quantile):
        return (
            f"<td class='few' {where} {tip}><span class='value'>max {seconds_text(cell.maximum)}</span>"
            f"<span class='n'>{n}, too few for {quantile_text(quantile)}</span></td>"
        )
    style = ""
    if scale is not None:
        background, text = palette.shade(scale.intensity(cell.value(quantile)))
        style = f" style='background:{background};color:{text}'"
    mark = "<span class='worst'>▲ worst</span>" if cell is worst else ""
    return (
        f"<td{style} {where} {tip}><span class='value'>{seconds_text(cell.value(quantile))}</span>"
        f"<span class='n'>{n}{mark}</span></td>"
    )


def _shards(table: PercentileTable) -> tuple[list[str | None], int]:
    busiest = sorted(table.by_shard, key=lambda cell: -cell.rows)[:MOST_SHARDS]
    kept = sorted((cell.shard for cell in busiest), key=lambda name: (name is None, name or ""))
    return kept, len(table.by_shard) - len(kept)


def _buckets(table: PercentileTable, order: Sequence[str]) -> list[str | None]:
    """The configured buckets in their order, then others that rollups still know, then unknown lengths."""
    found = {cell.bucket for cell in table.by_bucket}
    others = sorted(name for name in found if name is not None and name not in order)
    return [*order, *others, *([None] if None in found else [])]


def _note(table: PercentileTable, counted: int, left_out: int, hidden: int) -> str:
    exact = "exact" if table.basis == "rows" else f"from rollups, ±{percent_text(RELATIVE_ERROR)}"
    parts = [f"{count_text(table.rows_used)} requests used, {count_text(left_out)} left out", exact]
    if counted > table.rows_used and table.metric == "time_per_output_token":
        parts.insert(1, f"{count_text(counted - table.rows_used)} with fewer than two tokens have none")
    if hidden:
        parts.append(f"the {MOST_SHARDS} busiest shards, {count_text(hidden)} more in the totals")
    return " · ".join(parts)
