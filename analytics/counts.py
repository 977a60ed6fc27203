"""How many requests a selection holds, and which of its rows answer: the rows themselves or their rollups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import duckdb

from vllm_slo.analytics.levels import rollups
from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection

EXACT_ROWS = 500_000
"""Up to so many requests, statistics are computed from the rows themselves. Exact percentiles of four metrics over
every shard and bucket, with their totals, take some 200 ms of two cores then; rollups answer within 1.09 % in less."""

ERRORS = "(status = 'error' or finish_reason in ('error', 'abort'))"

Basis = Literal["rows", "rollups"]


@dataclass(frozen=True)
class Counts:
    """Requests of a selection.

    ``counted`` enter the statistics, ``errors`` are among them, ``left_out`` gives the others by reason.
    ``basis`` says what the selection's statistics should be computed from.
    ``older_rows_gone`` is true when rollups know of requests whose rows retention has already removed.
    """

    counted: int
    errors: int
    left_out: dict[str, int]
    basis: Basis
    older_rows_gone: bool = False

    @property
    def total(self) -> int:
        """Every row, counted or not."""
        return self.counted + sum(self.left_out.values())


def counts(connection: duckdb.DuckDBPyConnection, selection: Selection, exact_rows: int = EXACT_ROWS) -> Counts:
    """The counts of a selection; from its rows when these are few and all there, else from rollups."""
    summed = _from_rollups(connection, selection)
    if summed.total > exact_rows:
        return summed
    counted = _from_rows(connection, selection)
    if counted.total >= summed.total:
        return counted
    return replace(summed, older_rows_gone=True)


def _from_rollups(connection: duckdb.DuckDBPyConnection, selection: Selection) -> Counts:
    found = records(
        connection,
        "select metric, quality, sum(count)::bigint from "
        f"({rollups(selection, ('requests', 'errors'), 'metric, quality, count')}) group by all order by all",
    )
    return Counts(
        counted=sum(n for metric, quality, n in found if metric == "requests" and quality is None),
        errors=sum(n for metric, _, n in found if metric == "errors"),
        left_out={quality: n for metric, quality, n in found if metric == "requests" and quality is not None},
        basis="rollups",
    )


def _from_rows(connection: duckdb.DuckDBPyConnection, selection: Selection) -> Counts:
    found = records(
        connection,
        f"select quality, count(*), count(*) filter (where quality is null and {ERRORS}) from requests "
        f"where {selection.requests()} group by quality order by quality",
    )
    return Counts(
        counted=sum(n for quality, n, _ in found if quality is None),
        errors=sum(errors for _, _, errors in found),
        left_out={quality: n for quality, n, _ in found if quality is not None},
        basis="rows",
    )
