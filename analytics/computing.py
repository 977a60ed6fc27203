"""Why prefill and decode took as long as they did: own work, others' prefill, the batch, preemption; exact sums."""

from __future__ import annotations

from dataclasses import dataclass

import duckdb

from vllm_slo.analytics.counts import Basis
from vllm_slo.analytics.parts import Sums, Tail, summed
from vllm_slo.analytics.phases import NANOSECONDS, Measure
from vllm_slo.analytics.selection import Selection
from vllm_slo.exporters.records import DECODE_PARTS, PREFILL_PARTS

UNKNOWN = "unknown"
_BEFORE = PREFILL_PARTS[:3]

PARTS: dict[Measure, tuple[str, ...]] = {
    "time_to_first_token": (*_BEFORE, "preempted", "recompute", UNKNOWN),
    "request_duration": (*_BEFORE, *DECODE_PARTS, "preempted", "recompute", UNKNOWN),
}
"""Parts that sum to prefill, or to prefill and decode. The last is the time of requests without an engine record."""


@dataclass(frozen=True)
class Computing:
    """Requests taken together: integer nanoseconds of PARTS of the measure, which sum to the whole.

    ``known`` of the ``rows`` have parts; the time of the others is in UNKNOWN, never 0 elsewhere.
    """

    measure: Measure
    rows: int
    known: int
    nanoseconds: tuple[int, ...]

    @property
    def whole_nanoseconds(self) -> int:
        """Prefill, or prefill and decode."""
        return sum(self.nanoseconds)

    def of(self, part: str) -> int:
        """Nanoseconds of one part."""
        return self.nanoseconds[PARTS[self.measure].index(part)]

    def mean(self, part: str) -> float:
        """Mean seconds of a part over all rows."""
        return self.of(part) / self.rows / NANOSECONDS

    @property
    def mean_whole(self) -> float:
        """Mean seconds of the whole."""
        return self.whole_nanoseconds / self.rows / NANOSECONDS

    def share(self, part: str) -> float:
        """Share of the whole, the unknown part included; 0 where nothing was computed."""
        whole = self.whole_nanoseconds
        return self.of(part) / whole if whole else 0.0

    @property
    def leading(self) -> str | None:
        """The known part with the most time; None where no time has a known part."""
        worst = max((part for part in PARTS[self.measure] if part != UNKNOWN), key=self.of)
        return worst if self.of(worst) > 0 else None


def computing(
    connection: duckdb.DuckDBPyConnection,
    selection: Selection,
    basis: Basis,
    measure: Measure = "request_duration",
    tail: Tail | None = None,
) -> Computing | None:
    """The parts of all requests that count, or of the tail; None without requests."""
    if measure == "time_to_first_token":
        sums = summed(connection, selection, basis, "prefill", PREFILL_PARTS, tail=tail).get(())
        return None if sums is None else _computing(measure, sums, sums.phase, sums.parts)
    # The columns of preemption hold what came before the first token, too: they are taken once, whole.
    after = (*DECODE_PARTS, "preempted", "recompute")
    if basis == "rows" or tail is not None:  # one pass over the rows
        sums = summed(connection, selection, basis, "prefill", (*_BEFORE, *after, "decode"), tail=tail).get(())
        return None if sums is None else _computing(measure, sums, sums.phase + sums.parts[-1], sums.parts[:-1])
    sums = summed(connection, selection, basis, "prefill", _BEFORE).get(())
    decode = summed(connection, selection, basis, "decode", after).get(())
    if sums is None or decode is None:
        return None
    return _computing(measure, sums, sums.phase + decode.phase, (*sums.parts, *decode.parts))


def _computing(measure: Measure, sums: Sums, whole: int, parts: tuple[int, ...]) -> Computing:
    return Computing(measure, sums.rows, sums.known, (*parts, whole - sum(parts)))
