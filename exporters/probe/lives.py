"""The requests in flight of one engine, where each stands, and the clocks by which their time is booked. Pure."""

from __future__ import annotations

from vllm_slo.exporters.probe.clocks import Gaps, StepClock
from vllm_slo.exporters.probe.life import DECODE, ENDED, PREFILL, QUEUED, RECOMPUTE, Cell, Life
from vllm_slo.exporters.probe.phases import book
from vllm_slo.exporters.probe.steps import Observer
from vllm_slo.exporters.probe.waiting import Waiting


class Lives:
    """See the module; `accounting` moves them."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.in_flight: dict[str, Life] = {}
        """By engine request id, in the order in which they were queued."""
        self.cells: dict[Cell, int] = {}
        """How many of each cell are in flight."""
        self.prefilling: dict[Life, None] = {}
        """Those that still have prompt or lost tokens to be scheduled."""
        self.awaiting: dict[Life, None] = {}
        """Those whose next token ends their prefill or recomputation, everything before it being scheduled."""
        self.decoding: dict[Cell, int] = {}
        """How many of each cell decode."""
        self.running = 0
        self.waiting = Waiting()
        self.steps = StepClock()
        self.gaps = Gaps()
        self.recomputed_tokens = 0

    def enter(self, life: Life) -> None:
        """It is queued."""
        self.in_flight[life.engine_request_id] = life
        self.cells[life.cell] = self.cells.get(life.cell, 0) + 1
        self.waiting.newcomers.append(life)

    def lost(self, life: Life) -> None:
        """A request is gone and nobody knows how: no record is made."""
        if life.phase != ENDED:
            self.leave_running(life, max(life.since_ns, self.steps.at_ns, self.waiting.clock.at_ns))
            life.phase = ENDED
            self.forget(life)

    def forget(self, life: Life) -> None:
        """It has ended."""
        self.in_flight.pop(life.engine_request_id, None)
        self.prefilling.pop(life, None)
        self.awaiting.pop(life, None)
        left = self.cells.get(life.cell, 0) - 1
        if left > 0:
            self.cells[life.cell] = left
        else:
            self.cells.pop(life.cell, None)

    def leave_running(self, life: Life, now_ns: int) -> None:
        """Books its phase, whichever it is, before it changes."""
        phase = life.phase
        self.book(life, now_ns)
        if phase == DECODE:
            left = self.decoding[life.cell] - 1
            if left:
                self.decoding[life.cell] = left
            else:
                del self.decoding[life.cell]
        if phase in (PREFILL, DECODE, RECOMPUTE):
            self.running -= 1

    def queue_anew(self, life: Life, deferred: str | None) -> None:
        """It begins a turn, unless something defers it yet."""
        life.phase = QUEUED
        life.deferred_reason = deferred
        life.turn_has_token = False
        life.queue_open = None
        if deferred is None:
            self.waiting.newcomers.append(life)

    def book(self, life: Life, now_ns: int) -> None:
        """Books the time up to now into the parts of its phase."""
        book(life, now_ns, self.waiting.clock, self.steps, self.gaps)

    def count_recomputed(self, life: Life, computed: int) -> None:
        """It has computed so many tokens again, those that the cache gave back among them."""
        tokens = computed - life.resume_cached
        if tokens > 0:
            life.recomputed_tokens += tokens
            self.recomputed_tokens += tokens
            self.observer.recomputed(tokens)
