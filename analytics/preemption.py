"""What preemption cost: times, tokens, seconds, and its share of decode; exact, of requests that count."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import duckdb

from vllm_slo.analytics.counts import Basis
from vllm_slo.analytics.parts import Sums, known_by_step, nanoseconds, summed
from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection
from vllm_slo.analytics.series import moment, start_of_step, steps
from vllm_slo.exporters.records import DECODE_PARTS

_STEMS = (
    "preempted",
    "recompute",
    "preempted_before_first_token",
    "recompute_before_first_token",
    *DECODE_PARTS,
)
NO_ROWS = Sums(0, 0, 0, (0,) * len(_STEMS))


@dataclass(frozen=True)
class Preempted:
    """Preempted requests taken together; times in integer nanoseconds, those before the first token among them."""

    requests: int
    preemptions: int
    lost_tokens: int
    recomputed_tokens: int
    preempted_nanoseconds: int
    recompute_nanoseconds: int

    @property
    def cost_nanoseconds(self) -> int:
        """Time in which the requests did not get on."""
        return self.preempted_nanoseconds + self.recompute_nanoseconds


NOTHING = Preempted(0, 0, 0, 0, 0, 0)


@dataclass(frozen=True)
class PreemptionCost:
    """``known`` of the ``rows`` come from an engine with the probe; all figures are of those.

    ``decode_nanoseconds`` is their whole decode time, ``in_decode_nanoseconds`` the part of it spent preempted or
    computing again. ``unfinished`` are preemptions of requests that did not finish: they are in no other figure.
    ``series``: by arrival, in steps from ``times`` on; a step without a preempted request holds zeros, None where no
    request of a known engine arrived.
    """

    rows: int
    known: int
    overall: Preempted
    decode_nanoseconds: int
    in_decode_nanoseconds: int
    unfinished: int
    step: timedelta
    times: tuple[datetime, ...]
    series: tuple[Preempted | None, ...]

    @property
    def decode_share(self) -> float | None:
        """Share of decode time spent preempted or computing again; None without known decode time."""
        return self.in_decode_nanoseconds / self.decode_nanoseconds if self.decode_nanoseconds else None


def preemption_cost(
    connection: duckdb.DuckDBPyConnection, selection: Selection, basis: Basis, step: timedelta
) -> PreemptionCost:
    """What preemption cost a selection."""
    whole = summed(connection, selection, basis, "decode", _STEMS).get((), NO_ROWS)
    by_step = known_by_step(connection, selection, basis, _STEMS[0], step)
    in_decode = whole.parts[0] + whole.parts[1] - whole.parts[2] - whole.parts[3]
    preempted: dict[datetime, Preempted] = {}
    unfinished = 0
    for at, counts, *figures in records(
        connection,
        f"select {start_of_step('start_time', step)}, quality is null, count(*), sum(preemptions)::bigint, "
        "sum(lost_tokens)::bigint, sum(recomputed_tokens)::bigint, sum(preempted_seconds), sum(recompute_seconds) "
        "from requests where preemptions > 0 and (quality is null or quality = 'unfinished') and source <> 'stock' "
        f"and {selection.requests()} group by 1, 2",
    ):
        counted = [figure or 0 for figure in figures[:4]]
        if counts:
            preempted[moment(at)] = Preempted(*counted, *(nanoseconds(time) for time in figures[4:]))
        else:
            unfinished += counted[1]
    known_at = {moment(at) for at in by_step} | set(preempted)
    times = steps(selection, step)
    return PreemptionCost(
        rows=whole.rows,
        known=whole.known,
        overall=_total(list(preempted.values())),
        decode_nanoseconds=in_decode + sum(whole.parts[4:]),
        in_decode_nanoseconds=in_decode,
        unfinished=unfinished,
        step=step,
        times=times,
        series=tuple(preempted.get(time, NOTHING) if time in known_at else None for time in times),
    )


def _total(parts: list[Preempted]) -> Preempted:
    names = list(Preempted.__dataclass_fields__)
    return Preempted(*(sum(getattr(part, name) for part in parts) for name in names))
