"""The queue of one engine: what blocks its head, who stands there, who just came. Pure."""

from __future__ import annotations

from vllm_slo.exporters.probe.blocked import KV_BLOCKS, TOKEN_BUDGET, BlockerLog
from vllm_slo.exporters.probe.clocks import QueueClock
from vllm_slo.exporters.probe.life import QUEUED, Life


class Waiting:
    """Ticks at each schedule. Of those who wait it touches the head and the newcomers only."""

    __slots__ = ("blocker", "blocks_log", "budget_log", "clock", "head", "newcomers")

    def __init__(self) -> None:
        self.clock = QueueClock()
        self.budget_log = BlockerLog()
        self.blocks_log = BlockerLog()
        self.head: Life | None = None
        """At whom the last scan stopped; the clock's reason says why, and ``blocker`` has what that one wants."""
        self.blocker: str | None = None
        self.newcomers: list[Life] = []

    def tick(self, now_ns: int) -> None:
        """Charges the time since the last schedule to what was found then; newcomers begin to wait for a reason."""
        clock = self.clock
        if clock.reason == TOKEN_BUDGET:
            self.budget_log.extend(clock.at_ns, now_ns, self.blocker)
        elif clock.reason == KV_BLOCKS:
            self.blocks_log.extend(clock.at_ns, now_ns, self.blocker)
        length = clock.tick(now_ns)
        if self.head is not None:
            self.head.head_ns += length
            self.head = None
        if self.newcomers:
            reading = clock.read()
            for life in self.newcomers:
                if life.phase == QUEUED and life.queue_open is None and life.deferred_reason is None:
                    life.queue_step += now_ns - life.since_ns
                    life.since_ns = now_ns
                    life.queue_open = reading
            self.newcomers.clear()

    def left(self, life: Life, now_ns: int) -> None:
        """Somebody ends, maybe at the head and in the middle of a step."""
        if life is self.head:
            life.head_ns += now_ns - self.clock.at_ns
            self.head = None

    def remember_blockers(self, life: Life) -> None:
        """Keeps what was logged of the time that it waited, for whoever sums it later."""
        if life.queue_token_budget:
            life.token_budget_blockers = self.budget_log.runs
        if life.queue_kv_blocks:
            life.kv_blocks_blockers = self.blocks_log.runs
