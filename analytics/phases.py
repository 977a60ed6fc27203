"""Where the time of a typical and of a slow request goes: mean phases of the median and of the tail."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

import duckdb

from vllm_slo.analytics.counts import Basis
from vllm_slo.analytics.percentiles import REQUESTS_BEYOND, threshold
from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection

NANOSECONDS = 1_000_000_000
MEDIAN_BAND = (0.45, 0.55)
TAIL_QUANTILES = (0.95, 0.99)

Measure = Literal["time_to_first_token", "request_duration"]

PARTS: dict[Measure, tuple[str, ...]] = {
    "time_to_first_token": ("frontend", "queue", "prefill"),
    "request_duration": ("frontend", "queue", "prefill", "decode", "residual"),
}
"""Parts whose sum is the measured time, exactly, in the order in which they happen."""


@dataclass(frozen=True)
class Group:
    """Requests taken together: how many, and their parts and measured time summed, in integer nanoseconds."""

    rows: int
    parts_nanoseconds: tuple[tuple[str, int], ...]
    measured_nanoseconds: int

    def mean(self, part: str) -> float:
        """Mean seconds of a part."""
        return dict(self.parts_nanoseconds)[part] / self.rows / NANOSECONDS

    @property
    def measured(self) -> float:
        """Mean seconds of the measured time."""
        return self.measured_nanoseconds / self.rows / NANOSECONDS


@dataclass(frozen=True)
class Phases:
    """Phases of the requests in MEDIAN_BAND and of those at or over the tail's quantile; bounds in seconds, inclusive.

    The bounds are exact with basis `rows` and within 1.09 % with `rollups`; the sums are of rows, always exact.
    A group is None when no request falls into it.
    """

    measure: Measure
    tail_quantile: float
    basis: Basis
    median_from: float
    median_to: float
    tail_from: float
    median: Group | None
    tail: Group | None

    @property
    def tail_is_enough(self) -> bool:
        """Whether the tail holds as many requests as a percentile needs beyond it to be shown plainly."""
        return self.tail is not None and self.tail.rows >= REQUESTS_BEYOND


def phases(
    connection: duckdb.DuckDBPyConnection,
    selection: Selection,
    basis: Basis,
    measure: Measure = "request_duration",
    tail_quantile: float = 0.99,
) -> Phases | None:
    """The phases of a selection; None without requests. Bounds are rounded to the nanosecond, as rows are stored."""
    bounds = threshold(connection, selection, basis, measure, (*MEDIAN_BAND, tail_quantile))
    if bounds is None:
        return None
    low, high, tail = (round(bound, 9) for bound in bounds)
    column = f"{measure}_seconds"
    sums = ", ".join(f"sum({stored}_seconds)" for stored in _STORED[measure])
    complete = " and ".join(f"{stored}_seconds is not null" for stored in _STORED[measure])
    found = records(
        connection,
        f"select {column} <= {high:.9f} as typical, {column} >= {tail:.9f} as slow, count(*), {sums} from requests "
        f"where quality is null and {column} >= {low:.9f} and ({column} <= {high:.9f} or {column} >= {tail:.9f}) "
        f"and {complete} and {selection.requests()} group by all",
    )
    typical, slow = ([row[2:] for row in found if row[place]] for place in (0, 1))
    return Phases(measure, tail_quantile, basis, low, high, tail, _group(measure, typical), _group(measure, slow))


_STORED: dict[Measure, tuple[str, ...]] = {
    "time_to_first_token": ("queue", "prefill", "time_to_first_token"),
    "request_duration": ("queue", "prefill", "time_to_first_token", "decode", "request_duration"),
}
"""Columns that are summed. The other parts are differences of the sums: exact in integers, and DuckDB sums stored
columns at twice the speed of computed ones. Rows without one of them (a client sees no phases) are in no group."""


def _group(measure: Measure, parts: list[tuple[Any, ...]]) -> Group | None:
    """The group of the requests in several parts, each a number of rows and the sums of the stored columns."""
    if not parts:
        return None
    rows, *totals = (sum(values) for values in zip(*parts, strict=True))
    sums = {name: int(Decimal(total).scaleb(9)) for name, total in zip(_STORED[measure], totals, strict=True)}
    sums["frontend"] = sums["time_to_first_token"] - sums["queue"] - sums["prefill"]
    if measure == "request_duration":
        sums["residual"] = sums["request_duration"] - sums["time_to_first_token"] - sums["decode"]
    return Group(rows, tuple((part, sums[part]) for part in PARTS[measure]), sums[measure])
