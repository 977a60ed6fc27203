"""How many requests a selection holds, and which of its rows answer: the rows themselves or their rollups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

import duckdb

from vllm_slo.analytics.levels import kept, rollups
from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection, literal
from vllm_slo.exporters.schema import UNFINISHED

EXACT_ROWS = 200_000
"""Up to so many requests, statistics are computed from the rows themselves. Exact percentiles of four metrics over
every shard and bucket, with their totals, take some 150 ms of two cores then; rollups answer within 1.09 % in less."""

ERRORS = f"(status = 'error' or finish_reason in ({', '.join(literal(reason) for reason in UNFINISHED)}))"
"""SQL: requests that were given up, failed or refused, as the rollup metric `errors` counts them."""

Basis = Literal["rows", "rollups"]

NO_REQUESTS_OF_THEIR_OWN: tuple[str, ...] = ("shared_request_id", "superseded", "late_record")
"""Marks of rows that are a further piece of a request that another row stands for."""


@dataclass(frozen=True)
class Counts:
    """Requests of a selection.

    ``counted`` enter the statistics, ``left_out`` gives the others by reason; ``errors`` are among those counted and
    those ``unfinished``.
    ``untold`` of those counted do not say whether they failed: a stock vLLM writes neither status nor finish reason.
    ``basis`` says what the selection's statistics should be computed from.
    ``older_rows_gone`` is true when rollups know of requests whose rows retention has already removed; ``finest`` is
    the length of the finest rollups that are there for the whole selection.
    """

    counted: int
    errors: int
    untold: int
    left_out: dict[str, int]
    basis: Basis
    older_rows_gone: bool = False
    finest: timedelta = timedelta(minutes=1)

    @property
    def total(self) -> int:
        """Every row, counted or not."""
        return self.counted + sum(self.left_out.values())

    @property
    def requests_left_out(self) -> dict[str, int]:
        """Requests that are not counted, by reason: of the rows left out, those that stand for one of their own."""
        return {mark: n for mark, n in self.left_out.items() if mark not in NO_REQUESTS_OF_THEIR_OWN}

    @property
    def requests(self) -> int:
        """Every request, counted or not."""
        return self.counted + sum(self.requests_left_out.values())

    @property
    def unfinished(self) -> int:
        """Requests that were given up, failed or refused; only servers with the probe tell of them."""
        return self.left_out.get("unfinished", 0)


def counts(connection: duckdb.DuckDBPyConnection, selection: Selection, exact_rows: int = EXACT_ROWS) -> Counts:
    """The counts of a selection; from its rows when these are few and all there, else from rollups."""
    summed = _from_rollups(connection, selection)
    if summed.total > exact_rows:
        return summed
    counted = _from_rows(connection, selection)
    if counted.total >= summed.total:
        return counted
    return replace(summed, older_rows_gone=True)


@dataclass(frozen=True)
class Answerable:
    """A selection as it can be answered, and its counts."""

    selection: Selection
    counts: Counts


def answerable(connection: duckdb.DuckDBPyConnection, selection: Selection, exact_rows: int = EXACT_ROWS) -> Answerable:
    """The selection as asked, unless retention took the rollups of its ends and its rows cannot stand in for them.

    Then it is widened to whole hours or days: what lies in part of an hour is not known any more.
    """
    left = kept(connection)
    wide = left.widened(selection)
    if wide == selection:
        found = counts(connection, selection, exact_rows)
    elif selection.start.date() >= left.rows and (rows := _from_rows(connection, selection)).total <= exact_rows:
        return Answerable(selection, rows)
    else:
        found = _from_rollups(connection, wide)
    if found.basis == "rows":
        return Answerable(selection, found)
    gone = found.older_rows_gone or wide.start.date() < left.rows
    return Answerable(wide, replace(found, older_rows_gone=gone, finest=left.width(wide.start)))


def _from_rollups(connection: duckdb.DuckDBPyConnection, selection: Selection) -> Counts:
    found = records(
        connection,
        "select metric, quality, sum(count)::bigint, (sum(count) filter (where source = 'stock'))::bigint from "
        f"({rollups(selection, ('requests', 'errors'), 'metric, quality, source, count')}) group by metric, quality "
        "order by all",
    )
    counted = [(n, stock or 0) for metric, quality, n, stock in found if metric == "requests" and quality is None]
    errors = [(n, stock or 0) for metric, _, n, stock in found if metric == "errors"]
    return Counts(
        counted=sum(n for n, _ in counted),
        errors=sum(n for n, _ in errors),
        untold=sum(stock for _, stock in counted) - sum(stock for _, stock in errors),
        left_out={quality: n for metric, quality, n, _ in found if metric == "requests" and quality is not None},
        basis="rollups",
    )


def _from_rows(connection: duckdb.DuckDBPyConnection, selection: Selection) -> Counts:
    found = records(
        connection,
        f"select quality, count(*), count(*) filter (where {ERRORS}), "
        f"count(*) filter (where source = 'stock' and {ERRORS} is not true) from requests "
        f"where {selection.requests()} group by quality order by quality",
    )
    return Counts(
        counted=sum(n for quality, n, _, _ in found if quality is None),
        errors=sum(errors for quality, _, errors, _ in found if quality in (None, "unfinished")),
        untold=sum(untold for quality, _, _, untold in found if quality is None),
        left_out={quality: n for quality, n, _, _ in found if quality is not None},
        basis="rows",
    )
