"""Reads from a scheduler, after its scan, what stopped the scan, at whom, and whom it passed over and why."""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Any

from vllm_slo.exporters.probe.blocked import ENCODER, KV_BLOCKS, NOTHING, PAUSED, TOKEN_BUDGET, reason
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
        self.looked: list[Looked] = []
        self.preempted = False
        self.throttled = False

    def waiting(self, scheduler: Any) -> int:
        """How many wait."""
        first, second = self._queues
        return len(getattr(scheduler, first)) + len(getattr(scheduler, second))

    def selected(self, scheduler: Any, queue: Any) -> None:
        """vLLM up to 0.30: the scan is about to look at the first request of that queue."""
        if queue is not None:
            self.looked.append((queue.peek_request(), True, queue is getattr(scheduler, self._skipped)))

    def handled(self, scheduler: Any, request: Any, ready: bool) -> None:
        """vLLM since 0.31: the scan looks at that request."""
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
            if why is None and (index < last or self._passed_now(scheduler, request, before)):
                why = _unseen_reason(scheduler, request)
            elif why == "lora" and index == last and not self._loras_full(scheduler, request, scheduled):
                why = None
            if why is None:
                stopped = request
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

    def _passed_now(self, scheduler: Any, request: Any, before: bool) -> bool:
        """Whether a request that was not among the passed over is now."""
        if before:
            return False
        if self._old:
            waiting = scheduler.waiting
            return not waiting or waiting.peek_request() is not request
        return request in getattr(scheduler, self._skipped)

    @staticmethod
    def _loras_full(scheduler: Any, request: Any, scheduled: dict[str, int]) -> bool:
        loaded = {r.lora_request.lora_int_id for r in scheduler.running if r.lora_request and r.request_id in scheduled}
        return len(loaded) >= scheduler.lora_config.max_loras and request.lora_request.lora_int_id not in loaded

    def stopped_by(self, scheduler: Any, tokens: int, sequences: int, waiting: int, stopped: Any) -> int:
        """The reason (of `blocked`) why those wait whom the scan did not pass over; ``waiting`` of them."""
        if waiting <= 0:
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
        if self.throttled and not getattr(scheduler, "prefill_capacity_bound", False):
            return PAUSED
        left = request.num_tokens - request.num_computed_tokens
        if not self._chunked and left > tokens_left:
            return TOKEN_BUDGET
        if scheduler.num_spec_tokens and tokens_left <= scheduler.num_spec_tokens:
            return TOKEN_BUDGET
        fits = scheduler.kv_cache_manager.block_pool.get_num_free_blocks() * scheduler.block_size >= left
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
    """Of two reasons that leave no trace: an encoder input in transit, a KV connector that does not know yet."""
    if scheduler.ec_connector is not None and request.has_encoder_inputs:
        return "encoder"
    return "kv_transfer"
