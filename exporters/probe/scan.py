"""Reads from a scheduler, after its scan, what stopped the scan, at whom, and whom it passed over and why."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

from vllm_slo.exporters.probe.blocked import ENCODER, KV_BLOCKS, NOTHING, PREFILL_INTERVAL, TOKEN_BUDGET, reason
from vllm_slo.exporters.probe.life import QUEUED, Life
from vllm_slo.exporters.probe.versions import Version

LOOK_BEHIND = 4
"""Deferred requests in front that are passed over in search of the head."""

Looked = tuple[Any, bool, bool]
"""A waiting request that the scan looked at; whether its status lets it run; whether it was passed over before."""

_BY_STATUS = {
    "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR": "grammar",
    "WAITING_FOR_REMOTE_KVS": "kv_transfer",
    "WAITING_FOR_STREAMING_REQ": "streaming",
}


class Scan:
    """The scans of one scheduler."""

    def __init__(self, scheduler: Any, row: Version) -> None:
        self._queues = row.queues
        self._skipped = row.skipped
        self._old = row.skipped in row.queues
        config = scheduler.scheduler_config
        speculative = scheduler.vllm_config.speculative_config
        self._draft_slots = int(getattr(speculative, "max_num_new_slots_for_drafting", 0) or 0)
        self.token_budget = int(scheduler.max_num_scheduled_tokens)
        self._input_budget = int(config.max_num_batched_tokens)
        self.sequence_cap = int(getattr(scheduler, row.cap))
        self._chunked = bool(config.enable_chunked_prefill)
        self._aligned = bool(getattr(scheduler, "need_mamba_block_aligned_split", False))
        self._unpaused = type(scheduler._pause_state).UNPAUSED
        self._idle_loras = row.idle_loras
        self._passes_unfit = row.passes_unfit
        self._interval = int(getattr(scheduler, "local_prefill_interval", 1))
        self.looking = False
        """Only while the scheduler scans: others may ask about a request, too."""
        self.looked: list[Looked] = []
        self.preempted = False
        self._holds_prefills = False
        self._stopped_before = False

    def begin(self, scheduler: Any, throttled: bool) -> None:
        """The scheduler is about to scan; ``throttled``: its data-parallel engine asks it to hold prefills back.

        Whether it will is vLLM's own condition, which holds before the scan and no longer after it.
        """
        self.looked.clear()
        self.looking = True
        self.preempted = False
        if self._interval > 1:
            since = scheduler.num_executed_steps + 1 - scheduler.last_prefill_step
            throttled = throttled or since < self._interval
        self._holds_prefills = (
            throttled
            and not getattr(scheduler, "prefill_capacity_bound", False)
            and any(not request.is_prefill_chunk for request in scheduler.running)
        )

    def is_paused(self, scheduler: Any) -> bool:
        """Whether no new request is admitted."""
        return scheduler._pause_state is not self._unpaused

    def waiting(self, scheduler: Any) -> int:
        """How many wait."""
        first, second = self._queues
        return len(getattr(scheduler, first)) + len(getattr(scheduler, second))

    def selected(self, scheduler: Any, queue: Any) -> None:
        """vLLM up to 0.30: the scan is about to look at the first request of that queue."""
        if queue is not None and self.looking:
            self.looked.append((queue.peek_request(), True, queue is getattr(scheduler, self._skipped)))

    def handled(self, scheduler: Any, request: Any, ready: bool) -> None:
        """vLLM since 0.31: the scan looks at that request."""
        if self.looking:
            self.looked.append((request, ready, request in getattr(scheduler, self._skipped)))

    def passed_over(self, scheduler: Any, scheduled: dict[str, int]) -> tuple[list[tuple[Any, str | None]], Any]:
        """Requests looked at but not scheduled, each with why it was passed over; and the one that stopped the scan."""
        found: list[tuple[Any, str | None]] = []
        stopped = None
        last = len(self.looked) - 1
        for index, (request, ready, before) in enumerate(self.looked):
            if request.request_id in scheduled:
                continue
            why = self._why(scheduler, request, ready)
            passed = self._passed_again if before else self._passed_now
            if why is None and (index < last or passed(scheduler, request)):
                why = _unseen_reason(scheduler, request)
            elif why == "lora" and index == last and not self._loras_full(scheduler, request, scheduled):
                why = None
            if why is None:
                stopped = request
                self._stopped_before = before
            found.append((request, why))
        return found, stopped

    @staticmethod
    def _why(scheduler: Any, request: Any, ready: bool) -> str | None:
        if (by_status := _BY_STATUS.get(request.status.name)) is not None or not ready:
            return by_status or "grammar"
        if request.num_stale_output_tokens and not request.drop_stale_output:
            return "stale_output"
        if scheduler.lora_config and request.lora_request:
            return "lora"
        return None

    def _passed_now(self, scheduler: Any, request: Any) -> bool:
        """Whether a request that was not among the passed over is now."""
        if self._old:
            waiting = scheduler.waiting
            return not waiting or waiting.peek_request() is not request
        return request in getattr(scheduler, self._skipped)

    def _passed_again(self, scheduler: Any, request: Any) -> bool:
        """The last one that the scan looked at was passed over before, and nothing is in its way that stops a scan.

        A connector that does not know yet (and since 0.33 an encoder input that does not fit) leaves no other trace.
        """
        return (
            self._has_unseen_reason(scheduler, request)
            and not self._holds_prefills
            and self._blocks_suffice(scheduler, request)
        )

    def _has_unseen_reason(self, scheduler: Any, request: Any) -> bool:
        if scheduler.connector is not None:
            return True
        if request.has_encoder_inputs and (self._passes_unfit or scheduler.ec_connector is not None):
            return True
        return self._passes_unfit and getattr(scheduler, "num_prefill_lookahead", 0) > 0

    @staticmethod
    def _blocks_suffice(scheduler: Any, request: Any) -> bool:
        left = request.num_tokens - request.num_computed_tokens
        free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return bool(free * scheduler.block_size >= left)

    def _loras_full(self, scheduler: Any, request: Any, scheduled: dict[str, int]) -> bool:
        loaded = {
            one.lora_request.lora_int_id
            for one in scheduler.running
            if one.lora_request and (self._idle_loras or one.request_id in scheduled)
        }
        return len(loaded) >= scheduler.lora_config.max_loras and request.lora_request.lora_int_id not in loaded

    def stopped_by(self, scheduler: Any, tokens: int, sequences: int, waiting: int, passed: int, stopped: Any) -> int:
        """The reason (of `blocked`) why those wait who are not deferred; ``passed`` were passed over in this scan.

        Those passed over before wait for their own reason, also where this scan did not come to them.
        """
        if deferred := len(getattr(scheduler, self._skipped)):
            if stopped is not None and self._stopped_before:
                deferred -= 1  # it is no longer, though vLLM still has it there
            passed = max(passed, deferred)
        if waiting <= passed:
            return NOTHING
        tokens_left = self.token_budget - tokens
        found = reason(
            scheduler._pause_state is not self._unpaused,
            self.preempted,
            tokens_left,
            self._input_budget - tokens - self._draft_slots * (sequences + 1),
            self.sequence_cap - len(scheduler.running) - scheduler.num_waiting_for_streaming_input,
        )
        if found != KV_BLOCKS or self.preempted or stopped is None:
            return found
        return self._refused(scheduler, stopped, tokens_left)

    def _refused(self, scheduler: Any, request: Any, tokens_left: int) -> int:
        """Every limit leaves room, yet the scan stopped at this request: mostly for want of blocks."""
        if self._holds_prefills:
            return PREFILL_INTERVAL
        left = request.num_tokens - request.num_computed_tokens
        if not self._chunked and left > tokens_left:
            return TOKEN_BUDGET
        if scheduler.num_spec_tokens and tokens_left <= scheduler.num_spec_tokens:
            return TOKEN_BUDGET
        fits = self._blocks_suffice(scheduler, request)
        if fits and self._aligned:
            return TOKEN_BUDGET
        return ENCODER if fits and request.has_encoder_inputs else KV_BLOCKS

    def head(self, scheduler: Any, stopped: Any, in_flight: dict[str, Life]) -> Life | None:
        """Who is to be scheduled next: the request that stopped the scan, else the first that is not deferred."""
        if stopped is not None:
            return _queued(in_flight, stopped)
        for name in self._queues:
            queue = getattr(scheduler, name)
            if not queue:
                continue
            first = islice(queue, LOOK_BEHIND) if isinstance(queue, deque) else (queue.peek_request(),)
            for request in first:
                life = _queued(in_flight, request)
                if life is not None and life.deferred_reason is None:
                    return life
        return None


def _queued(in_flight: dict[str, Life], request: Any) -> Life | None:
    life = in_flight.get(request.request_id)
    return life if life is not None and life.phase == QUEUED else None


def _unseen_reason(scheduler: Any, request: Any) -> str:
    """Of the reasons that leave no trace: an encoder input that is in transit or does not fit, a KV connector that does
    not know yet, a chunk too short for what the drafter reads ahead."""
    if request.has_encoder_inputs and (scheduler.ec_connector is not None or scheduler.connector is None):
        return "encoder"
    return "kv_transfer" if scheduler.connector is not None else "prefill_lookahead"
