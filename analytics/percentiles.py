"""Latency percentiles by context bucket and shard, with their totals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import duckdb

from vllm_slo.analytics.counts import Basis
from vllm_slo.analytics.histogram import quantiles
from vllm_slo.analytics.levels import rollups
from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection

QUANTILES: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99)

METRICS: tuple[str, ...] = ("time_to_first_token", "time_per_output_token", "request_duration", "queue")
"""Metrics of the rollups; with `_seconds` behind it each is a column of the view `requests`."""

REQUESTS_BEYOND = 10
"""A quantile q is shown plainly from REQUESTS_BEYOND / (1 - q) requests on: about ten of them then lie beyond it."""


def needed(quantile: float) -> int:
    """Requests that a quantile needs: 20 for P50, 100 for P90, 1000 for P99."""
    return round(REQUESTS_BEYOND / (1 - quantile))


@dataclass(frozen=True)
class Cell:
    """One bucket on one shard; seconds. ``values`` belong to QUANTILES, ``maximum`` is the largest value.

    Bucket and shard are None for requests without one.
    """

    bucket: str | None
    shard: str | None
    rows: int
    values: tuple[float, ...]
    maximum: float

    def value(self, quantile: float) -> float:
        """One of QUANTILES, however few the requests."""
        return self.values[QUANTILES.index(quantile)]

    def enough(self, quantile: float) -> bool:
        """Whether there are enough requests for a quantile to say something."""
        return self.rows >= needed(quantile)


@dataclass(frozen=True)
class PercentileTable:
    """Percentiles of one metric. A combination that no request belongs to has no cell; ``overall`` is None without any.

    ``rows_used`` entered; the other counted requests of the selection do not have the metric.
    """

    metric: str
    basis: Basis
    cells: tuple[Cell, ...]
    by_bucket: tuple[Cell, ...]
    by_shard: tuple[Cell, ...]
    overall: Cell | None

    @property
    def rows_used(self) -> int:
        """Requests with a value."""
        return self.overall.rows if self.overall else 0


def percentiles(
    connection: duckdb.DuckDBPyConnection, selection: Selection, basis: Basis, metrics: Sequence[str] = METRICS
) -> dict[str, PercentileTable]:
    """A table for each metric: from rows exact (`quantile_cont`: linear between ranks), from rollups within 1.09 %."""
    read = _from_rows if basis == "rows" else _from_rollups
    found = list(read(connection, selection, metrics))
    return {metric: _table(metric, basis, [row for row in found if row[0] == metric]) for metric in metrics}


_Row = tuple[str, bool, bool, Cell]
"""Metric, over all shards, over all buckets, cell."""


def _table(metric: str, basis: Basis, rows: list[_Row]) -> PercentileTable:
    def kept(over_shards: bool, over_buckets: bool) -> tuple[Cell, ...]:
        return tuple(cell for _, shards, buckets, cell in rows if (shards, buckets) == (over_shards, over_buckets))

    return PercentileTable(
        metric=metric,
        basis=basis,
        cells=kept(False, False),
        by_bucket=kept(True, False),
        by_shard=kept(False, True),
        overall=next(iter(kept(True, True)), None),
    )


_SETS = "grouping sets ((shard, bucket), (shard), (bucket), ())"


def _from_rows(connection: duckdb.DuckDBPyConnection, selection: Selection, metrics: Sequence[str]) -> Iterable[_Row]:
    values = [f"{metric}_seconds::double" for metric in metrics]
    columns = ", ".join(f"count({v}), quantile_cont({v}, {list(QUANTILES)}), max({v})" for v in values)
    for shards, buckets, shard, bucket, *rest in records(
        connection,
        f"select grouping(shard), grouping(bucket), shard, bucket, {columns} from requests "
        f"where quality is null and {selection.requests()} group by {_SETS} order by shard, bucket",
    ):
        for metric, n, found, maximum in zip(metrics, rest[0::3], rest[1::3], rest[2::3], strict=True):
            if n:
                yield metric, bool(shards), bool(buckets), Cell(bucket, shard, n, tuple(found), maximum)


def _from_rollups(
    connection: duckdb.DuckDBPyConnection, selection: Selection, metrics: Sequence[str]
) -> Iterable[_Row]:
    stored = rollups(selection, metrics, "metric, shard, bucket, bin, count, quality")
    for metric, shards, buckets, shard, bucket, bins, counts in records(
        connection,
        f"with binned as (select metric, shard, bucket, bin, sum(count)::bigint as n from ({stored}) "
        "where quality is null and bin is not null group by all), "
        "summed as (select metric, grouping(shard) as s, grouping(bucket) as b, shard, bucket, bin, sum(n)::bigint n "
        f"from binned group by metric, bin, {_SETS}) "
        "select metric, s, b, shard, bucket, list(bin order by bin), list(n order by bin) from summed "
        "group by metric, s, b, shard, bucket order by shard, bucket",
    ):
        yield metric, bool(shards), bool(buckets), _cell(bucket, shard, bins, counts)


def _cell(bucket: str | None, shard: str | None, bins: list[Any], counts: list[Any]) -> Cell:
    *values, maximum = quantiles(bins, counts, (*QUANTILES, 1.0))
    return Cell(bucket, shard, sum(counts), tuple(values), maximum)


def threshold(
    connection: duckdb.DuckDBPyConnection, selection: Selection, basis: Basis, metric: str, wanted: Sequence[float]
) -> tuple[float, ...] | None:
    """The wanted quantiles of one metric over a whole selection, in seconds; None without requests."""
    if basis == "rows":
        value = f"{metric}_seconds::double"
        ((found,),) = records(
            connection,
            f"select quantile_cont({value}, {list(wanted)}) from requests "
            f"where quality is null and {selection.requests()}",
        )
        return None if found is None else tuple(found)
    ((bins, counts),) = records(
        connection,
        "select list(bin order by bin), list(n order by bin) from (select bin, sum(count)::bigint as n "
        f"from ({rollups(selection, [metric], 'bin, count, quality')}) "
        "where quality is null and bin is not null group by bin)",
    )
    return quantiles(bins, counts, wanted) if bins else None
