"""Requests in flight that an objective has lost already, before any histogram has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

from vllm_slo.exporters.probe import meters
from vllm_slo.exporters.probe.life import DECODE
from vllm_slo.exporters.probe.meters import Cell
from vllm_slo.exporters.probe.objectives import Objective


class InFlight(Protocol):
    """What is looked at of a `life.Life`. Monotonic nanoseconds but for ``arrival_ns`` (epoch); 0: not yet."""

    cell: Cell
    arrival_ns: int
    queued_ns: int
    scheduled_ns: int
    first_token_ns: int
    phase: int
    gap_since_ns: int
    earlier_tokens: int

    @property
    def request(self) -> object: ...


class Now(NamedTuple):
    """The time by both clocks, and when the last step ended."""

    monotonic_ns: int
    epoch_ns: int
    last_step_ns: int


def past(
    objective: Objective, cells: Sequence[Cell], lives: Iterable[InFlight], now: Now, classes: Callable[[int], int]
) -> dict[Cell, int]:
    """Cell -> how many; each of ``cells`` that the objective's filters choose has a number.

    * ``queue``: not yet scheduled. ``time_to_first_token``: no token yet. ``request_duration``: not ended.
    * ``inter_token_latency``: the next token is late. A request that decodes had its last one when the last step ended.
    * ``time_per_output_token``: the mean so far is above; it may still recover.
    """
    wanted = None if objective.priority is None else classes(objective.priority)
    counts = {cell: 0 for cell in cells if objective.bucket in (None, cell[0]) and wanted in (None, cell[1])}
    limit = round(objective.threshold_seconds * 1e9)
    since = _SINCE[objective.sli]
    for life in lives:
        if life.cell in counts and since(life, now) > limit:
            counts[life.cell] += 1
    return counts


def _queue(life: InFlight, now: Now) -> int:
    return 0 if life.scheduled_ns else now.monotonic_ns - life.queued_ns


def _first_token(life: InFlight, now: Now) -> int:
    return 0 if life.first_token_ns else now.epoch_ns - life.arrival_ns


def _duration(life: InFlight, now: Now) -> int:
    return now.epoch_ns - life.arrival_ns


def _gap(life: InFlight, now: Now) -> int:
    if not life.first_token_ns:
        return 0
    return now.monotonic_ns - max(life.gap_since_ns, now.last_step_ns if life.phase == DECODE else 0)


def _mean(life: InFlight, now: Now) -> int:
    tokens = life.earlier_tokens + int(getattr(life.request, "num_output_tokens", 0))
    return (now.monotonic_ns - life.first_token_ns) // (tokens - 1) if life.first_token_ns and tokens > 1 else 0


_SINCE: dict[str, Callable[[InFlight, Now], int]] = {
    meters.QUEUE: _queue,
    meters.TIME_TO_FIRST_TOKEN: _first_token,
    meters.INTER_TOKEN_LATENCY: _gap,
    meters.TIME_PER_OUTPUT_TOKEN: _mean,
    meters.REQUEST_DURATION: _duration,
}
