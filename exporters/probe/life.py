"""What is known of one request while it lives in the engine core, and its parts once it has ended. Pure.

Times are nanoseconds of the monotonic clock, except ``arrival_ns``; ``offset_ns`` takes them to the epoch. A life is
always in one phase, and each phase books its time when it is left, so that the parts sum to the whole:

    queued -> prefill -> decode -> ended         and  prefill | decode -> preempted -> recompute -> prefill | decode

A session with streaming input goes from decode to queued again for each further input.
"""

from __future__ import annotations

from typing import Any

from vllm_slo.exporters.probe.blocked import Run
from vllm_slo.exporters.probe.clocks import DecodeReading, QueueReading

QUEUED, PREFILL, DECODE, PREEMPTED, RECOMPUTE, ENDED = range(6)

Cell = tuple[str, int]


class Life:
    """One request. Only `accounting` and `phases` write the times, only `engine` the rest."""

    __slots__ = (
        "accepted_tokens",
        "arrival_ns",
        "cached_external",
        "cached_local",
        "cell",
        "completion_tokens",
        "decode_interference",
        "decode_open",
        "decode_slowdown",
        "decode_work",
        "deferred",
        "deferred_reason",
        "draft_tokens",
        "earlier_tokens",
        "end_ns",
        "engine_request_id",
        "finish_reason",
        "first_token_ns",
        "gap_since_ns",
        "head_ns",
        "kv_blocks_blockers",
        "kv_blocks_peak",
        "lora",
        "lost_tokens",
        "max_tokens",
        "offset_ns",
        "output_mark",
        "phase",
        "preempted",
        "preempted_before",
        "preemptions",
        "prefill_interference",
        "prefill_other",
        "prefill_own",
        "priority",
        "prompt_tokens",
        "queue_kv_blocks",
        "queue_open",
        "queue_sequence_cap",
        "queue_step",
        "queue_token_budget",
        "queued_ns",
        "recompute",
        "recompute_before",
        "recompute_target",
        "recomputed_tokens",
        "reference_ns",
        "request",
        "resume_cached",
        "sampling",
        "scheduled_ns",
        "session_closed",
        "share_open",
        "since_ns",
        "token_budget_blockers",
        "trace_headers",
        "turn_has_token",
        "windows",
        "worst_gap_ns",
    )

    def __init__(
        self,
        engine_request_id: str,
        queued_ns: int,
        *,
        arrival_ns: int = 0,
        offset_ns: int = 0,
        cell: Cell = ("", 0),
        prompt_tokens: int = 0,
        priority: int = 0,
        request: Any = None,
    ) -> None:
        self.engine_request_id = engine_request_id
        self.arrival_ns = arrival_ns
        self.offset_ns = offset_ns
        self.cell = cell
        self.priority = priority
        self.prompt_tokens = prompt_tokens
        self.request = request
        """vLLM's own object, None once ended: it holds the prompt."""

        self.queued_ns = self.since_ns = queued_ns
        self.scheduled_ns = 0
        self.first_token_ns = 0
        self.end_ns = 0
        self.finish_reason = ""
        self.phase = QUEUED
        """`since_ns` is when it began, or was last booked."""
        self.turn_has_token = False
        """Whether the present turn has its first token; a request that is no session has one turn."""

        self.queue_step = self.queue_sequence_cap = self.queue_token_budget = self.queue_kv_blocks = 0
        self.queue_open: QueueReading | None = None
        self.deferred: dict[str, int] | None = None
        self.deferred_reason: str | None = None
        self.head_ns = 0
        self.windows: list[tuple[int, int]] = []
        self.token_budget_blockers: list[Run] | None = None
        self.kv_blocks_blockers: list[Run] | None = None

        self.prefill_own = self.prefill_interference = self.prefill_other = 0
        self.share_open = 0
        """Reading of the prefill clock when the phase began, later plus what was booked as its own."""
        self.decode_work = self.decode_interference = self.decode_slowdown = 0
        self.decode_open: DecodeReading = (0, 0, 0)
        self.preempted = self.recompute = self.preempted_before = self.recompute_before = 0
        self.preemptions = self.lost_tokens = self.recomputed_tokens = 0
        self.recompute_target = self.resume_cached = 0
        self.worst_gap_ns = self.gap_since_ns = 0
        self.reference_ns = 0

        self.output_mark = self.earlier_tokens = self.completion_tokens = 0
        self.session_closed = False
        self.cached_local: int | None = None
        self.cached_external: int | None = None
        self.draft_tokens = self.accepted_tokens = self.kv_blocks_peak = 0
        self.max_tokens: int | None = None
        self.sampling: tuple[float | None, float | None] = (None, None)
        self.lora: str | None = None
        self.trace_headers: Any = None

    @property
    def queue_deferred(self) -> int:
        """Time for every reason of its own."""
        return sum(self.deferred.values()) if self.deferred else 0

    @property
    def queue(self) -> int:
        """Time in the queue, preemption not among it."""
        return (
            self.queue_step
            + self.queue_sequence_cap
            + self.queue_token_budget
            + self.queue_kv_blocks
            + self.queue_deferred
        )

    @property
    def prefill(self) -> int:
        """First scheduled to first token."""
        return (
            self.prefill_own
            + self.prefill_interference
            + self.prefill_other
            + self.preempted_before
            + self.recompute_before
        )

    @property
    def decode(self) -> int:
        """First token to the end."""
        return (
            self.decode_work
            + self.decode_interference
            + self.decode_slowdown
            + self.preempted
            - self.preempted_before
            + self.recompute
            - self.recompute_before
        )

    @property
    def queue_behind(self) -> int:
        """Of the time in the queue, what another request stood at the head."""
        return max(0, self.queue - self.queue_step - self.queue_deferred - self.head_ns)
