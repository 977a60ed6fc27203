"""Latency over time: quantiles a step, None where nothing was measured."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import duckdb

from vllm_slo.analytics.counts import Basis
from vllm_slo.analytics.histogram import quantiles
from vllm_slo.analytics.levels import rollups
from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection

SERIES_QUANTILES: tuple[float, ...] = (0.5, 0.95, 0.99)

STEPS: tuple[timedelta, ...] = tuple(
    timedelta(seconds=s)
    for s in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 604800)
)
MOST_POINTS = 150
REQUESTS_A_STEP = 50
"""Steps hold so many requests on average, where the range has them: with fewer, P99 is the slowest of a handful."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Series:
    """Steps from ``times`` on, ``step`` wide; ``values`` per quantile in seconds, None for a step without requests."""

    metric: str
    basis: Basis
    step: timedelta
    times: tuple[datetime, ...]
    rows: tuple[int, ...]
    values: dict[float, tuple[float | None, ...]]


def step_for(selection: Selection, rows: int, basis: Basis, finest: timedelta = timedelta(minutes=1)) -> timedelta:
    """The finest of STEPS with at most MOST_POINTS points and REQUESTS_A_STEP on average.

    From rollups, ``finest`` is the shortest.
    """
    length = selection.end - selection.start
    wanted = max(length / MOST_POINTS, length * REQUESTS_A_STEP / max(rows, 1) if rows else timedelta())
    wanted = min(wanted, length / 4)
    allowed = [step for step in STEPS if basis == "rows" or step >= finest]
    return next((step for step in allowed if step >= wanted), allowed[-1])


def steps(selection: Selection, step: timedelta) -> tuple[datetime, ...]:
    """Starts of the steps that cover a selection, aligned to multiples of the step since 1970 (weeks: a Thursday)."""
    first = selection.start - (selection.start - _EPOCH) % step
    return tuple(first + step * i for i in range(-((first - selection.end) // step)))


def series(
    connection: duckdb.DuckDBPyConnection, selection: Selection, basis: Basis, metric: str, step: timedelta
) -> Series:
    """Quantiles of a metric a step: from rows exact; from rollups, of the coarsest level that fits, within 1.09 %."""
    found = (_from_rows if basis == "rows" else _from_rollups)(connection, selection, metric, step)
    times = steps(selection, step)
    empty: tuple[float | None, ...] = (None,) * len(SERIES_QUANTILES)
    rows = [found.get(time, (0, empty)) for time in times]
    return Series(
        metric=metric,
        basis=basis,
        step=step,
        times=times,
        rows=tuple(n for n, _ in rows),
        values={q: tuple(values[i] for _, values in rows) for i, q in enumerate(SERIES_QUANTILES)},
    )


_Steps = dict[datetime, tuple[int, tuple[float | None, ...]]]


def start_of_step(column: str, step: timedelta) -> str:
    """SQL: epoch microseconds of the step that a time lies in."""
    width = step // timedelta(microseconds=1)
    return f"epoch_us({column}) // {width} * {width}"


def moment(epoch_microseconds: int) -> datetime:
    """A time from epoch microseconds, exactly."""
    return _EPOCH + timedelta(microseconds=epoch_microseconds)


def _from_rows(connection: duckdb.DuckDBPyConnection, selection: Selection, metric: str, step: timedelta) -> _Steps:
    value = f"{metric}_seconds::double"
    return {
        moment(time): (n, tuple(values))
        for time, n, values in records(
            connection,
            f"select {start_of_step('start_time', step)} as step, count({value}), "
            f"quantile_cont({value}, {list(SERIES_QUANTILES)}) from requests "
            f"where quality is null and {selection.requests()} group by step having count({value}) > 0",
        )
    }


def _from_rollups(connection: duckdb.DuckDBPyConnection, selection: Selection, metric: str, step: timedelta) -> _Steps:
    stored = rollups(selection, [metric], "time, bin, count, quality", coarsest=step)
    return {
        moment(time): (sum(counts), quantiles(bins, counts, SERIES_QUANTILES))
        for time, bins, counts in records(
            connection,
            f"with binned as (select {start_of_step('time', step)} as step, bin, sum(count)::bigint as n "
            f"from ({stored}) where quality is null and bin is not null group by all) "
            "select step, list(bin order by bin), list(n order by bin) from binned group by step",
        )
    }
