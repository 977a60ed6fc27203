"""What blocked the queue by shard and bucket, as an HTML table: the leading reason in words, its share by lightness."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from vllm_slo.analytics.blocked import REASONS, UNKNOWN, Blocked, BlockedTable
from vllm_slo.dashboards import names
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.units import count_text, percent_text, seconds_text

ALL = "all"
MOST_SHARDS = 20
HARDLY = 0.001
"""Seconds: a mean queue time below it is called no wait, whatever its parts."""


def blocked_table(title: str, group: str, table: BlockedTable, order: Sequence[str], palette: Palette) -> str:
    """HTML of the table. ``order`` is that of the buckets; ``group`` marks it for those who look for it.

    A cell gives the mean queue time, the leading reason with its share of it, and the requests; the whole split is
    under the pointer. Nobody there: "no data". Stock servers: "unknown".
    """
    by_shard, by_bucket = table.by_shard(), table.by_bucket()
    busiest = sorted(by_shard, key=lambda shard: -by_shard[shard].rows)[:MOST_SHARDS]
    shards = sorted(busiest, key=lambda shard: (shard is None, shard or ""))
    buckets = [*order, *(b for b in by_bucket if b is not None and b not in order), *([None] * (None in by_bucket))]
    worst = max((b.mean_queue for b in table.cells.values()), default=0.0)
    head = "".join(f"<th scope='col'>{escape(names.bucket(b))}</th>" for b in buckets)
    rows = []
    for shard in shards:
        drawn = [
            _cell(table.cells.get((shard, b)), worst, palette, f"{names.shard(shard)}|{names.bucket(b)}")
            for b in buckets
        ]
        drawn.append(_cell(by_shard[shard], None, palette, f"{names.shard(shard)}|{ALL}"))
        rows.append(f"<tr><th scope='row'>{escape(names.shard(shard))}</th>{''.join(drawn)}</tr>")
    drawn = [_cell(by_bucket.get(b), None, palette, f"{ALL}|{names.bucket(b)}") for b in buckets]
    drawn.append(_cell(table.overall, None, palette, f"{ALL}|{ALL}"))
    rows.append(f"<tr class='total'><th scope='row'>all shards</th>{''.join(drawn)}</tr>")
    hidden = len(by_shard) - len(shards)
    note = f"<p class='note'>The {MOST_SHARDS} busiest shards, {hidden} more in the totals.</p>" if hidden else ""
    return (
        f"<div class='slo-heat' data-blocked='{group}'><h4>{escape(title)}</h4><div class='scroll'><table><thead><tr>"
        f"<th scope='col'>shard</th>{head}<th scope='col'>all</th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
        f"</div>{note}</div>"
    )


def reasons_table(table: BlockedTable) -> str:
    """HTML of every figure: shard, bucket, requests, those known, and the seconds of each reason."""
    head = "".join(
        f"<th scope='col'>{escape(text)}</th>"
        for text in ("shard", "bucket", "requests", "known", "queue", *(names.QUEUE[reason] for reason in REASONS))
    )
    rows = [_figures(names.shard(shard), names.bucket(bucket), cell) for (shard, bucket), cell in table.cells.items()]
    rows += [_figures("all shards", ALL, table.overall)] if table.overall else []
    return f"<div class='slo-figures'><table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"


def split_text(cell: Blocked) -> str:
    """Every reason that has time, the most first."""
    known = sorted((reason for reason in REASONS if cell.of(reason)), key=lambda reason: -cell.of(reason))
    return " · ".join(
        f"{names.QUEUE[reason]} {seconds_text(cell.mean(reason))} ({percent_text(cell.share(reason))})"
        for reason in known
    )


def _cell(cell: Blocked | None, worst: float | None, palette: Palette, place: str) -> str:
    where = f"data-cell='{escape(place, quote=True)}'"
    if cell is None:
        return f"<td class='none' {where}>no data</td>"
    n = f"n={count_text(cell.rows)}" + (f", {count_text(cell.known)} known" if cell.known < cell.rows else "")
    tip = f"title='{escape(' · '.join(filter(None, [n, split_text(cell)])), quote=True)}'"
    style = ""
    if worst:
        background, text = palette.shade(min(cell.mean_queue / worst, 1.0) ** 0.5)
        style = f" style='background:{background};color:{text}'"
    if cell.known == 0:
        why = "reason unknown"
    elif cell.mean_queue < HARDLY or cell.leading is None:
        why = "hardly a wait"
    elif cell.of(UNKNOWN) > cell.of(cell.leading):
        why = f"unknown {percent_text(cell.share(UNKNOWN))}"
    else:
        why = f"{names.QUEUE[cell.leading]} {percent_text(cell.share(cell.leading))}"
    return (
        f"<td{style} {where} {tip}><span class='value'>{seconds_text(cell.mean_queue)}</span>"
        f"<span class='why'>{escape(why)}</span><span class='n'>{n}</span></td>"
    )


def _figures(shard: str, bucket: str, cell: Blocked) -> str:
    seconds = [cell.queue_nanoseconds, *cell.nanoseconds]
    values = "".join(f"<td>{nanoseconds / 1e9:,.3f} s</td>" for nanoseconds in seconds)
    return (
        f"<tr><th scope='row'>{escape(shard)}</th><th scope='row'>{escape(bucket)}</th>"
        f"<td>{count_text(cell.rows)}</td><td>{count_text(cell.known)}</td>{values}</tr>"
    )
