"""The probe in an engine core: from the calls of vLLM's scheduler to the accounting. One object a scheduler.

Everything here runs on the thread of the engine core between two steps, so it asks for no lock and walks over no queue:
it touches what the scan looked at, what was scheduled for the first time, and what is being prefilled.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.probe.accounting import Accounting
from vllm_slo.exporters.probe.blocked import KV_BLOCKS, NOTHING, REASONS, TOKEN_BUDGET
from vllm_slo.exporters.probe.engine_record import EngineRecord
from vllm_slo.exporters.probe.guard import guarded
from vllm_slo.exporters.probe.life import QUEUED, Life
from vllm_slo.exporters.probe.meters import Meters
from vllm_slo.exporters.probe.process import Process
from vllm_slo.exporters.probe.scan import Scan
from vllm_slo.exporters.probe.steplog import StepLog
from vllm_slo.exporters.probe.steps import Chunk

if TYPE_CHECKING:
    from vllm_slo.exporters.probe.watch import Watch

EVICTED = "_vllm_slo_evicted"
"""Attribute of a block pool: whom to tell of cached blocks thrown out."""
MOST_IN_FLIGHT = 256
"""Steps scheduled and not yet processed; vLLM has as many as pipeline stages, and one."""
HOLDER_EVERY_NS = 100_000_000
"""How often the largest holder of KV blocks is looked up while somebody waits for blocks."""


class UnseenStep(SloError):
    """A scheduler class that overrides `schedule` or `update_from_output` without calling vLLM's.

    Raised in a hook, so enough of them in a row switch the probe off: half the events make wrong numbers.
    """


class Engine:
    """See the module. Methods are called by `hooks`, each in a guard."""

    def __init__(self, scheduler: Any, process: Process, meters: Meters) -> None:
        self.process = process
        self.name = str(scheduler.vllm_config.parallel_config.data_parallel_index)
        self.meters = meters
        self.accounting = Accounting(self.meters, self._done)
        self.scan = Scan(scheduler, process.row)
        self.waiting = 0
        self.off = False
        self.watch: Watch | None = None
        self.sample: Callable[..., Any] = guarded("engine.sample", self._sample)
        self.step_log: StepLog | None = None
        self._random_ids = process.settings.random_ids
        self._put = process.outbox.put
        self._tables = [m.req_to_blocks for m in scheduler.kv_cache_manager.coordinator.single_type_managers]
        self._pool = pool = scheduler.kv_cache_manager.block_pool
        if pool.enable_caching and len(pool.cached_block_hash_to_block) >= 0:
            setattr(pool, EVICTED, self.meters.evicted)
        self._holder: str | None = None
        self._holder_ns = 0
        self._update_ns = 0
        self._arrived: list[Life] = []
        """Those with a first token in this update that a session's next input has taken from the request since."""

    def _done(self, life: Life) -> None:
        life.request = None
        if self.step_log is not None:
            self.step_log.write("ended", id=life.engine_request_id, reason=life.finish_reason, at_ns=life.end_ns)
        self._put(EngineRecord(life, self.name, self._random_ids))

    def switch_off(self) -> None:
        """No more samples, and nobody is in flight any more as far as the series know."""
        self.off = True
        self.accounting.in_flight.clear()
        self._pool.__dict__.pop(EVICTED, None)

    # Between steps

    def added(self, request: Any) -> None:
        """A request is about to be queued; or further input of a session."""
        now_ns = monotonic_ns()
        life = self.accounting.in_flight.get(request.request_id)
        if life is not None:  # the same id comes again for further input only
            if request.resumable:
                self.accounting.session_goes_on(life, now_ns)
            else:
                life.session_closed = True
            return
        prompt_tokens = request.num_prompt_tokens
        priority = request.priority
        if self.step_log is not None:
            arrival_ns = int(request.arrival_time * 1e9)
            self.step_log.write(
                "added", id=request.request_id, at_ns=now_ns, prompt_tokens=prompt_tokens, arrival_ns=arrival_ns
            )
        self.accounting.added(
            Life(
                request.request_id,
                now_ns,
                arrival_ns=int(request.arrival_time * 1e9),
                offset_ns=time.time_ns() - now_ns,
                cell=self.meters.cell(prompt_tokens, priority),
                prompt_tokens=prompt_tokens,
                priority=priority,
                request=request,
            )
        )

    def preempting(self, request: Any) -> None:
        """A running request is about to lose its blocks."""
        accounting = self.accounting
        self.scan.preempted = True
        life = accounting.in_flight.get(request.request_id)
        if life is None:
            return
        self._held(life)
        cause = "kv_blocks" if accounting.in_schedule else "reset"
        now_ns = accounting.now_ns if accounting.in_schedule else monotonic_ns()
        lost_tokens = request.num_computed_tokens
        if self.step_log is not None:
            self.step_log.write("preempted", id=life.engine_request_id, at_ns=now_ns, lost_tokens=lost_tokens)
        accounting.preempted(life, now_ns, lost_tokens, cause)

    def ending(self, request: Any) -> None:
        """A request has ended and is about to be freed."""
        now_ns = monotonic_ns()
        life = self.accounting.in_flight.get(request.request_id)
        if life is None:
            return
        self._held(life)
        finished = request.get_finished_reason()
        reason = "abort" if finished is None else str(finished)
        if reason == "abort" and life.session_closed:
            reason = "stop"
        life.arrival_ns = int(request.arrival_time * 1e9)
        life.prompt_tokens = request.num_prompt_tokens
        life.completion_tokens = life.earlier_tokens
        if life.phase != QUEUED:  # a session that waits still has the tokens of its last turn, and they are counted
            life.completion_tokens += len(request._output_token_ids)
        life.max_tokens = request.max_tokens
        life.trace_headers = request.trace_headers
        sampling = request.sampling_params
        if sampling is not None:
            life.sampling = (sampling.temperature, sampling.top_p)
        if request.lora_request is not None:
            life.lora = request.lora_request.lora_name
        self.accounting.ended(life, now_ns, reason, request.num_computed_tokens)

    def turn_ended(self, request: Any, tokens: int, finished: bool) -> None:
        """A session stopped after so many tokens; unless it is finished it goes on, now or with its next input."""
        life = self.accounting.in_flight.get(request.request_id)
        if life is None or finished:
            return
        if life in self.accounting.awaiting and tokens > life.output_mark:
            self._arrived.append(life)
        self.accounting.paused_session(life, tokens, request.status.name == "WAITING_FOR_STREAMING_REQ")

    def paused(self, scheduler: Any) -> None:
        """The engine's pause state has changed."""
        self.accounting.paused(monotonic_ns(), self.scan.is_paused(scheduler))

    # A step

    def schedule_begins(self, scheduler: Any, throttled: bool) -> None:
        """The scheduler is about to choose a step; see `Scan.begin`."""
        self.scan.begin(scheduler, throttled)
        self.accounting.schedule_begins(monotonic_ns())

    def schedule_ends(self, scheduler: Any, output: Any) -> None:
        """It has chosen."""
        accounting, scan = self.accounting, self.scan
        scan.looking = False
        in_flight = accounting.in_flight
        scheduled: dict[str, int] = output.num_scheduled_tokens
        skipped = 0
        stopped = None
        passed: list[tuple[Any, str | None]] = []
        if scan.looked:
            passed, stopped = scan.passed_over(scheduler, scheduled)
            for request, why in passed:
                skipped += why is not None
                if (life := in_flight.get(request.request_id)) is not None:
                    accounting.looked_at(life, why)
        for new in output.scheduled_new_reqs:
            self._admitted(new.req_id, scheduled)
        for request_id in output.scheduled_cached_reqs.resumed_req_ids:
            self._admitted(request_id, scheduled)
        chunks: list[Chunk] = []
        most = 0
        blocker = None
        for life in accounting.prefilling:
            tokens = scheduled.get(life.engine_request_id, 0)
            if tokens:
                request = life.request
                chunks.append(Chunk(life, tokens, request.num_computed_tokens, not request.is_prefill_chunk))
                if tokens > most:
                    most, blocker = tokens, life.engine_request_id
        total = output.total_num_scheduled_tokens
        waiting = self.waiting = scan.waiting(scheduler)
        reason, head = NOTHING, None
        if waiting:
            reason = scan.stopped_by(scheduler, total, len(scheduled), waiting, skipped, stopped)
            if reason != NOTHING:
                head = scan.head(scheduler, stopped, in_flight)
            if reason == KV_BLOCKS:
                blocker = self._largest_holder(scheduler)
            elif reason != TOKEN_BUDGET:
                blocker = None
        accounting.schedule_ends(output, total, len(scheduled), chunks, reason, head, blocker)
        if len(accounting.pipeline) > MOST_IN_FLIGHT:
            raise UnseenStep(f"more than {MOST_IN_FLIGHT} steps whose output the probe has not seen")
        if self.step_log is not None:
            self.step_log.scheduled(output, accounting.now_ns, chunks, REASONS[reason], head, waiting, passed)

    def update_begins(self, output: Any, result: Any) -> None:
        """The scheduler is about to take in what the model made of a step."""
        self._update_ns = monotonic_ns()
        self.accounting.in_update = True
        drafts = output.scheduled_spec_decode_tokens
        if drafts:
            self._count_drafts(drafts, output.num_invalid_spec_tokens, result)

    def update_ends(self, scheduler: Any, output: Any, outputs: Any) -> None:
        """It has taken it in. The time is that of vLLM's own milestones, made a little earlier, where there is one."""
        now_ns = monotonic_ns()
        for first in outputs.values():
            if self._update_ns <= (made_ns := round(first.timestamp * 1e9)) < now_ns:
                now_ns = made_ns
            break
        accounting = self.accounting
        arrived = [life for life in accounting.awaiting if len(life.request._output_token_ids) > life.output_mark]
        if self._arrived:
            arrived += [life for life in self._arrived if life not in arrived]
            self._arrived.clear()
        known = accounting.update_ends(output, now_ns, arrived)
        if self.step_log is not None:
            self.step_log.updated(output, now_ns, arrived)
        if self.watch is not None and now_ns >= self.watch.due_ns:
            self.sample(scheduler, now_ns)
        if not known:
            raise UnseenStep("the output of a step that the probe did not see scheduled")

    def _sample(self, scheduler: Any, now_ns: int) -> None:
        if self.watch is not None:
            self.watch.step(scheduler, now_ns)

    def _admitted(self, request_id: str, scheduled: dict[str, int]) -> None:
        life = self.accounting.in_flight.get(request_id)
        if life is None:
            return
        request = life.request
        life.output_mark = len(request._output_token_ids)
        stats = request.prefill_stats
        if life.cached_local is None and stats is not None:
            life.cached_local = stats.num_local_cached_tokens
            life.cached_external = stats.num_external_cached_tokens
        self.accounting.admitted(life, request.num_computed_tokens - scheduled.get(request_id, 0))

    def _count_drafts(self, drafts: dict[str, list[int]], invalid: dict[str, int] | None, result: Any) -> None:
        """As vLLM counts them: a draft that the grammar refused was none."""
        sampled, index = result.sampled_token_ids, result.req_id_to_index
        for request_id, tokens in drafts.items():
            life = self.accounting.in_flight.get(request_id)
            if life is None or not sampled or not (new := sampled[index[request_id]]):
                continue
            life.draft_tokens += len(tokens) - (invalid.get(request_id, 0) if invalid else 0)
            life.accepted_tokens += max(len(new) - 1, 0)

    def _held(self, life: Life) -> None:
        """Blocks only grow until a request is preempted or ends, so then is their peak; those that left a sliding
        window are counted on, as vLLM keeps their places."""
        request_id = life.engine_request_id
        held = sum([len(table.get(request_id, ())) for table in self._tables])
        life.kv_blocks_peak = max(life.kv_blocks_peak, held)

    def _largest_holder(self, scheduler: Any) -> str | None:
        now_ns = self.accounting.now_ns
        if now_ns - self._holder_ns >= HOLDER_EVERY_NS:
            self._holder_ns = now_ns
            held = {r.request_id: sum([len(t.get(r.request_id, ())) for t in self._tables]) for r in scheduler.running}
            self._holder = max(held, key=held.__getitem__, default=None)
        return self._holder
