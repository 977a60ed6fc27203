"""Sums of a request's parts over groups of requests, exact, from rows or from rollups.

A part is known of rows that the probe's engine record is in; of all others the whole phase is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from decimal import Decimal
from typing import Any

import duckdb

from vllm_slo.analytics.counts import Basis
from vllm_slo.analytics.levels import rollups
from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection
from vllm_slo.analytics.series import start_of_step
from vllm_slo.exporters.schema import ROLLUP_METRICS

PREFIX = "part_"
"""A rollup metric of this name and a part's stem holds the part's sum."""


@dataclass(frozen=True)
class Tail:
    """Requests whose ``measure`` (`time_to_first_token`, `request_duration`) is at or over so many seconds."""

    measure: str
    seconds: float


@dataclass(frozen=True)
class Sums:
    """One group: requests that have the phase, those of them whose parts are known, and sums in integer nanoseconds.

    ``phase`` is of all of them, ``parts`` of the known ones.
    """

    rows: int
    known: int
    phase: int
    parts: tuple[int, ...]


def summed(
    connection: duckdb.DuckDBPyConnection,
    selection: Selection,
    basis: Basis,
    phase: str,
    stems: Sequence[str],
    by: Sequence[str] = (),
    *,
    step: timedelta | None = None,
    tail: Tail | None = None,
) -> dict[tuple[Any, ...], Sums]:
    """Sums of ``stems`` and of the phase they split, by columns and then by the epoch microsecond of a step.

    Requests that count and have the phase; with ``tail`` those of the tail alone, always from rows.
    Groups without requests are absent. Without ``by`` and ``step`` the only key is ``()``.
    """
    if basis == "rows" or tail is not None or not in_rollups(stems):
        return _from_rows(connection, selection, phase, stems, by, step, tail)
    return _from_rollups(connection, selection, phase, stems, by, step)


def known_by_step(
    connection: duckdb.DuckDBPyConnection, selection: Selection, basis: Basis, stem: str, step: timedelta
) -> dict[int, int]:
    """Requests of which a part is known, by the epoch microsecond of their step; steps without any are absent.

    Quicker than ``summed``: the histogram of the phase is not read.
    """
    if basis == "rows" or not in_rollups([stem]):
        counted = (
            f"select {start_of_step('start_time', step)}, count(*) from requests "
            f"where quality is null and {stem}_seconds is not null and {selection.requests()} group by 1"
        )
    else:
        stored = rollups(selection, [PREFIX + stem], "time, count, quality", coarsest=step)
        counted = (
            f"select {start_of_step('time', step)}, sum(count)::bigint from ({stored}) where quality is null group by 1"
        )
    return dict(records(connection, counted))


def in_rollups(stems: Sequence[str]) -> bool:
    """Whether rollups hold these parts."""
    return all(PREFIX + stem in ROLLUP_METRICS for stem in stems)


def _from_rows(
    connection: duckdb.DuckDBPyConnection,
    selection: Selection,
    phase: str,
    stems: Sequence[str],
    by: Sequence[str],
    step: timedelta | None,
    tail: Tail | None,
) -> dict[tuple[Any, ...], Sums]:
    keys = [*by, *([start_of_step("start_time", step)] if step else [])]
    slow = f" and {tail.measure}_seconds >= {tail.seconds:.9f}" if tail else ""
    found = records(
        connection,
        f"select {''.join(f'{key}, ' for key in keys)}count(*), count({stems[0]}_seconds), sum({phase}_seconds), "
        f"{', '.join(f'sum({stem}_seconds)' for stem in stems)} from requests "
        f"where quality is null and {phase}_seconds is not null{slow} and {selection.requests()} "
        f"{_group(len(keys))} having count(*) > 0",
    )
    size = len(keys)
    return {
        tuple(row[:size]): Sums(row[size], row[size + 1], nanoseconds(row[size + 2]), _all(row[size + 3 :]))
        for row in found
    }


def _from_rollups(
    connection: duckdb.DuckDBPyConnection,
    selection: Selection,
    phase: str,
    stems: Sequence[str],
    by: Sequence[str],
    step: timedelta | None,
) -> dict[tuple[Any, ...], Sums]:
    metrics = [phase, *(PREFIX + stem for stem in stems)]
    stored = rollups(
        selection,
        metrics,
        ", ".join(dict.fromkeys(("time", "metric", "count", "value_sum", "quality", *by))),
        **({"coarsest": step} if step else {}),
    )
    keys = [*by, *([start_of_step("time", step)] if step else [])]
    found = records(
        connection,
        f"select {''.join(f'{key}, ' for key in keys)}metric, sum(count)::bigint, sum(value_sum) "
        f"from ({stored}) where quality is null group by all",
    )
    groups: dict[tuple[Any, ...], dict[str, tuple[int, int]]] = {}
    for *key, metric, count, total in found:
        groups.setdefault(tuple(key), {})[metric] = (count, nanoseconds(total))
    return {
        key: Sums(
            of[phase][0],
            of.get(metrics[1], (0, 0))[0],
            of[phase][1],
            tuple(of.get(metric, (0, 0))[1] for metric in metrics[1:]),
        )
        for key, of in groups.items()
        if phase in of
    }


def _group(keys: int) -> str:
    return f"group by {', '.join(str(place) for place in range(1, keys + 1))}" if keys else ""


def _all(values: Sequence[Decimal | None]) -> tuple[int, ...]:
    return tuple(nanoseconds(value) for value in values)


def nanoseconds(seconds: Decimal | None) -> int:
    """Decimal seconds as integer nanoseconds; 0 for the sum of nothing."""
    return 0 if seconds is None else int(Decimal(seconds).scaleb(9))
