"""The state of an engine once a second, as columns of `engine_samples`. Walks over no queue."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from vllm_slo.exporters import records
from vllm_slo.exporters.probe import guard, worker
from vllm_slo.exporters.probe.blocked import KV_BLOCKS, REASONS, SEQUENCE_CAP, TOKEN_BUDGET
from vllm_slo.exporters.probe.engine import Engine
from vllm_slo.exporters.probe.kv import KvReader
from vllm_slo.exporters.probe.life import QUEUED
from vllm_slo.exporters.probe.spans import SpanData

NANOSECONDS = 1e9
BLOCKED = {reason: REASONS[reason] for reason in (SEQUENCE_CAP, TOKEN_BUDGET, KV_BLOCKS)}

Columns = dict[str, Any]


class SampleRecord:
    """One row of `engine_samples`; times in epoch ns."""

    __slots__ = ("columns", "end_ns", "start_ns")

    def __init__(self, columns: Columns, start_ns: int, end_ns: int) -> None:
        self.columns = columns
        self.start_ns = start_ns
        self.end_ns = end_ns

    def span(self) -> SpanData:
        """The record, without what is null."""
        attributes = {records.key(name): value for name, value in self.columns.items() if value is not None}
        return SpanData(records.ENGINE_SAMPLE, self.start_ns, self.end_ns, attributes)


class Sampler:
    """Takes samples of one engine; sums are over the time since the one before."""

    def __init__(
        self, engine: Engine, scheduler: Any, kv: KvReader, workers: Callable[[], Any], skipped: str, now_ns: int
    ) -> None:
        self._engine = engine
        self._kv = kv
        self._workers = workers
        self._skipped = skipped
        self._prompt = self._generated = 0
        self.last_ns = now_ns
        self._before = self._totals(now_ns)

    def take(self, scheduler: Any, now_ns: int) -> Columns:
        """A sample at that monotonic time."""
        engine, accounting = self._engine, self._engine.accounting
        before, totals = self._before, self._totals(now_ns)
        interval = now_ns - self.last_ns
        longest = accounting.step_longest_ns
        # A reading by another thread in the middle of a tick may be ahead: no sum ever goes down.
        spent = {name: max(0, totals[name] - before[name]) for name in totals}
        waiting = engine.scan.waiting(scheduler)
        deferred = len(getattr(scheduler, self._skipped))
        outbox = engine.process.outbox
        columns = {
            "engine": engine.name,
            "vllm_version": engine.process.vllm_version,
            "interval_seconds": interval / NANOSECONDS,
            "blocked_by": BLOCKED.get(accounting.waiting.clock.reason) if waiting else None,
            "oldest_waiting_seconds": self._oldest(now_ns),
            "requests_running": float(len(scheduler.running)),
            "requests_waiting": float(waiting),
            "requests_waiting_capacity": float(waiting - deferred),
            "requests_waiting_deferred": float(deferred),
            **self._by_bucket(scheduler),
            "steps": float(spent["steps"]),
            "step_seconds": spent["step_ns"] / NANOSECONDS,
            "step_max_seconds": longest / NANOSECONDS if spent["steps"] else None,
            "scheduled_prefill_tokens": float(spent["prefill"]),
            "scheduled_decode_tokens": float(spent["decode"]),
            "token_budget": float(engine.scan.token_budget),
            "sequence_cap": float(engine.scan.sequence_cap),
            **{f"blocked_{name}_seconds": spent[name] / NANOSECONDS for name in BLOCKED.values()},
            **self._kv_columns(),
            "kv_evicted_blocks_total": float(engine.meters.evicted_blocks),
            "recomputed_tokens_total": float(accounting.recomputed_tokens),
            "lost_tokens_total": float(accounting.lost_tokens),
            "preemptions_total": float(accounting.preemptions),
            "requests_finished_total": float(accounting.finished),
            "requests_finished_error_total": float(accounting.failed),
            "requests_aborted_total": float(accounting.aborted),
            **worker.columns(self._workers()),
            "probe_dropped_total": float(outbox.lost),
            "probe_errors_total": float(sum(guard.errors.values()) + outbox.errors),
        }
        # Only now that nothing has raised: what a failed sample would have told is in the next one.
        self._before = {name: before[name] + spent[name] for name in totals}
        self.last_ns = now_ns
        accounting.step_longest_ns = 0
        return columns

    def _totals(self, now_ns: int) -> dict[str, int]:
        accounting = self._engine.accounting
        clock = accounting.waiting.clock
        totals = {
            "steps": accounting.step_count,
            "step_ns": accounting.step_sum_ns,
            "prefill": accounting.prefill_tokens,
            "decode": accounting.decode_tokens,
        }
        for reason, name in BLOCKED.items():
            running = now_ns - clock.at_ns if clock.reason == reason else 0
            totals[name] = clock.totals[reason] + max(0, running)
        return totals

    def _oldest(self, now_ns: int) -> float | None:
        """Lives are in the order of their arrival, and those before the first that waits are running or deferred."""
        for life in self._engine.accounting.in_flight.values():
            if life.phase == QUEUED and life.deferred_reason != "streaming":
                return (now_ns - life.queued_ns) / NANOSECONDS
        return None

    def _by_bucket(self, scheduler: Any) -> Columns:
        accounting = self._engine.accounting
        names = self._engine.meters.buckets.names
        running = dict.fromkeys(names, 0)
        for request in scheduler.running:
            if (life := accounting.in_flight.get(request.request_id)) is not None:
                running[life.cell[0]] += 1
        waiting = {name: -running[name] for name in names}
        for (bucket, _), count in accounting.cells.items():
            waiting[bucket] += count
        return {
            "requests_running_by_bucket": json.dumps(running),
            "requests_waiting_by_bucket": json.dumps({name: max(0, count) for name, count in waiting.items()}),
        }

    def _kv_columns(self) -> Columns:
        state = self._kv.read()
        by_bucket = state.blocks_by_bucket
        return {
            "kv_blocks_total": float(state.blocks_total),
            "kv_blocks_used": float(state.blocks_used),
            "kv_blocks_free": float(state.blocks_free),
            "kv_blocks_cached": float(state.blocks_cached),
            "kv_block_size_tokens": _real(state.block_size_tokens),
            "kv_tokens_stored": _real(state.tokens_stored),
            "kv_slots_wasted": float(state.slots_wasted),
            "kv_fragmentation_ratio": state.fragmentation_ratio,
            "kv_cache_usage_ratio": state.usage_ratio,
            "kv_blocks_by_bucket": None if by_bucket is None else json.dumps(by_bucket),
            "kv_largest_holder": state.largest_holder,
        }


def _real(value: int | None) -> float | None:
    return None if value is None else float(value)
