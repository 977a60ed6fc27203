"""The life of every request of one engine, from the events of its scheduler. Pure: integers in, integers out.

Events come in the order in which the engine core makes them: any number of `added`, `ended`, `preempted`; then
`schedule_begins`, the `preempted` of that scan, `schedule_ends`; then, for the oldest step not yet processed,
`in_update` set, the `ended` and `paused_session` of its output, `update_ends`. With asynchronous scheduling or
pipeline parallelism several steps are scheduled before the first is processed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from vllm_slo.exporters.probe.blocked import NOTHING, PAUSED
from vllm_slo.exporters.probe.life import DECODE, ENDED, PREEMPTED, PREFILL, QUEUED, RECOMPUTE, Life
from vllm_slo.exporters.probe.lives import Lives
from vllm_slo.exporters.probe.phases import own_share
from vllm_slo.exporters.probe.steps import Chunk, Observer, Step


class Accounting(Lives):
    """See the module; ``done`` gets each life that has ended."""

    def __init__(self, observer: Observer, done: Callable[[Life], None]) -> None:
        super().__init__(observer)
        self.pipeline: deque[Step] = deque()
        self.now_ns = 0
        self.in_schedule = False
        self.in_update = False
        """Set while the output of a step is taken in: who ends then does so when that ends."""
        self.step_count = self.step_sum_ns = self.step_longest_ns = 0
        self.prefill_tokens = self.decode_tokens = self.lost_tokens = 0
        self.preemptions = self.finished = self.failed = self.aborted = 0
        self._done = done
        self._idle = True
        self._paused = False
        self._gap_from_ns = 0
        self._ended: list[tuple[Life, str, int]] = []
        self._sessions: list[tuple[Life, int, bool]] = []

    # Between steps

    def added(self, life: Life) -> None:
        """A request has been queued at its ``queued_ns``."""
        self.enter(life)
        if self._paused:  # there may be no schedule for long, and it is known what is waited for
            self.waiting.tick(life.queued_ns)

    def session_goes_on(self, life: Life, now_ns: int) -> None:
        """A session that waited for input got some; without effect while it is still busy with the last one."""
        if life.phase == QUEUED and life.deferred_reason == "streaming":
            self.book(life, now_ns)
            self.queue_anew(life, None)

    def paused(self, now_ns: int, is_paused: bool) -> None:
        """The engine admits nobody from now on, or does again.

        It may schedule nothing at all meanwhile: the time until it does is part of no step, and whoever waits does so
        for that alone.
        """
        self._idle = True
        self._paused = is_paused
        self.waiting.tick(now_ns)
        self.waiting.clock.reason = PAUSED if is_paused else NOTHING

    def preempted(self, life: Life, now_ns: int, lost_tokens: int, cause: str) -> None:
        """A running request lost its blocks, in a scan as of its begin; ``lost_tokens`` were computed."""
        if self.in_schedule:
            now_ns = self.now_ns
        phase = life.phase
        if phase not in (PREFILL, DECODE, RECOMPUTE):
            return
        self.leave_running(life, now_ns)
        target = lost_tokens
        if phase == RECOMPUTE:
            self.count_recomputed(life, min(lost_tokens, life.recompute_target))
            target = max(target, life.recompute_target)
        life.recompute_target = target
        life.preemptions += 1
        life.lost_tokens += lost_tokens
        self.preemptions += 1
        self.lost_tokens += lost_tokens
        life.phase = PREEMPTED
        self.prefilling.pop(life, None)
        self.observer.preempted(life.cell, cause, lost_tokens)

    def ended(self, life: Life, now_ns: int, reason: str, computed: int = 0) -> None:
        """A request ended; within an update that is when the update ends."""
        if life.phase == ENDED:
            return
        if self.in_update:
            self._ended.append((life, reason, computed))
        else:
            self._end(life, now_ns, reason, computed)

    # A scan of the scheduler

    def schedule_begins(self, now_ns: int) -> None:
        """The scheduler starts to choose a step."""
        if self.in_update:  # whose end was missed
            self.in_update = False
            self._sessions.clear()
            for life, _, _ in self._ended:
                self.lost(life)
            self._ended.clear()
        self.waiting.tick(now_ns)
        if self._idle and not self.pipeline:
            self.steps.skip(now_ns)
            self._idle = False
        self.now_ns = now_ns
        self.in_schedule = True

    def looked_at(self, life: Life, deferred: str | None) -> None:
        """The scan looked at this waiting request; ``deferred`` says why it passed over it, if so."""
        if life.phase != QUEUED or life.deferred_reason == deferred:
            return
        self.book(life, self.now_ns)
        life.deferred_reason = deferred
        if deferred is None:
            life.queue_open = self.waiting.clock.read()

    def admitted(self, life: Life, computed: int) -> None:
        """The scan chose this waiting request, of whose tokens ``computed`` need no computing."""
        now_ns = self.now_ns
        phase = life.phase
        if phase == QUEUED:
            self.book(life, now_ns)
            life.deferred_reason = None
            life.phase = PREFILL
            running = self.pipeline[0] if self.pipeline else None
            life.share_open = (
                self.steps.prefill_at(now_ns, running.start_ns, running.tokens, running.prefill_tokens)
                if running is not None
                else self.steps.prefill_ns
            )
            if not life.scheduled_ns:
                life.scheduled_ns = now_ns
                self.observer.scheduled(life.cell, life.queue)
            self.waiting.remember_blockers(life)
        elif phase == PREEMPTED:
            self.book(life, now_ns)
            life.phase = RECOMPUTE
            life.resume_cached = computed
        else:
            return
        self.running += 1
        self.awaiting.pop(life, None)
        self.prefilling[life] = None

    def schedule_ends(
        self,
        key: object,
        tokens: int,
        sequences: int,
        chunks: Sequence[Chunk],
        reason: int,
        head: Life | None = None,
        blocker: str | None = None,
    ) -> Step:
        """The step is chosen: ``tokens`` of ``sequences`` requests, ``chunks`` of those in `prefilling`.

        ``reason`` (of `blocked`) stopped the scan at ``head``, if anybody still waits; ``blocker`` has what it wants.
        """
        self.in_schedule = False
        kept = []
        for chunk in chunks:
            kept.append((chunk, chunk.life.preemptions))
            if chunk.last:
                del self.prefilling[chunk.life]
                self.awaiting[chunk.life] = None
        step = Step(key, self.now_ns, tokens, sequences - len(kept), kept)
        self.pipeline.append(step)
        waiting = self.waiting
        waiting.clock.reason = reason
        waiting.head = head
        waiting.blocker = blocker
        self.prefill_tokens += step.prefill_tokens
        self.decode_tokens += tokens - step.prefill_tokens
        return step

    # Its output

    def paused_session(self, life: Life, tokens: int, waits: bool) -> None:
        """A turn of a session ended with ``tokens`` of output; ``waits``: there is no further input yet."""
        self._sessions.append((life, tokens, waits))

    def update_ends(self, key: object, now_ns: int, arrived: Iterable[Life]) -> bool:
        """The output of the step ``key`` is taken in; the lives of `awaiting` that got a token have ``arrived``.

        Whether that step was seen scheduled; those before it whose output was never seen (it raised) are forgotten.
        """
        self.in_update = False
        pipeline = self.pipeline
        known = bool(pipeline) and (pipeline[0].key is key or any(step.key is key for step in pipeline))
        if known:
            while (step := pipeline.popleft()).key is not key:
                pass
            self._step_ended(step, now_ns)
        for life in arrived:
            del self.awaiting[life]
            self._got_token(life, now_ns)
        if self._sessions:
            for life, tokens, waits in self._sessions:
                life.earlier_tokens += tokens
                self.leave_running(life, now_ns)
                self.queue_anew(life, "streaming" if waits else None)
            self._sessions.clear()
        if self._ended:
            for life, why, computed in self._ended:
                self._end(life, now_ns, why, computed)
            self._ended.clear()
        if not self.running and not pipeline:
            self._idle = True
        return known

    def _step_ended(self, step: Step, now_ns: int) -> None:
        clock = self.steps
        began = clock.at_ns
        if step.start_ns > began:
            began = step.start_ns
        length = clock.tick(now_ns, began, step.tokens, step.prefill_tokens, step.decoding)
        if step.tokens:
            self.step_count += 1
            self.step_sum_ns += length
            if length > self.step_longest_ns:
                self.step_longest_ns = length
            self.observer.step(length, now_ns)
        else:
            # vLLM goes round with nothing to run while it waits for blocks from elsewhere, or has ends to tell workers.
            self.observer.empty_step(now_ns)
        if step.decoding:
            gap = now_ns - self._gap_from_ns
            self._gap_from_ns = now_ns
            self.gaps.add(now_ns, gap)
            if self.decoding:
                self.observer.output_gap(gap, self.decoding)
        elif not self.decoding:
            self._gap_from_ns = now_ns
        executed = now_ns - began
        for chunk, preemptions in step.chunks:
            life = chunk.life
            if life.preemptions != preemptions:
                continue
            if life.phase == PREFILL:
                own_share(life, executed * chunk.tokens // step.tokens)
            elif life.phase == RECOMPUTE and not life.turn_has_token and chunk.computed >= life.recompute_target:
                self.book(life, now_ns)
                self.count_recomputed(life, life.recompute_target)
                life.phase = PREFILL
                life.share_open = clock.prefill_ns

    def _got_token(self, life: Life, now_ns: int) -> None:
        """The first token of the turn, or the first after a preemption in the middle of it."""
        phase = life.phase
        if phase in (QUEUED, DECODE, ENDED):
            return
        self.book(life, now_ns)
        first = not life.turn_has_token
        life.turn_has_token = True
        if first and not life.first_token_ns:
            life.first_token_ns = now_ns
            waited = now_ns + life.offset_ns - life.arrival_ns
            self.observer.first_token(life.cell, waited, life.prefill)
        if phase == RECOMPUTE:
            self.count_recomputed(life, life.recompute_target)
        if not first:
            gap = now_ns - life.gap_since_ns
            life.worst_gap_ns = max(life.worst_gap_ns, gap)
            self.observer.one_gap(life.cell, gap)
        life.gap_since_ns = now_ns
        if phase != PREEMPTED:
            life.phase = DECODE
            life.decode_open = self.steps.read()
            self.decoding[life.cell] = self.decoding.get(life.cell, 0) + 1

    def _end(self, life: Life, now_ns: int, reason: str, computed: int) -> None:
        if life.phase == PREFILL and now_ns == self.steps.at_ns and reason in ("stop", "length", "repetition"):
            # A pooling request: its only output is no token.
            self._got_token(life, now_ns)
        if life.phase == RECOMPUTE:
            self.count_recomputed(life, min(computed, life.recompute_target))
        self.waiting.left(life, now_ns)
        self.leave_running(life, now_ns)
        self.forget(life)
        if not life.scheduled_ns:
            self.waiting.remember_blockers(life)
        life.phase = ENDED
        life.end_ns = now_ns
        life.finish_reason = reason
        life.reference_ns = self.steps.reference.smallest_ns
        self.finished += 1
        if reason in ("abort", "error"):
            self.failed += 1
            self.aborted += reason == "abort"
        tokens = life.completion_tokens - 1
        per_token = life.decode // tokens if tokens > 0 and life.first_token_ns else None
        self.observer.finished(life.cell, reason, now_ns + life.offset_ns - life.arrival_ns, per_token)
        self._done(life)
