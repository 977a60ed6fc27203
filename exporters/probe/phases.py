"""Books the time of a phase into the parts of a life when it leaves that phase. Pure."""

from __future__ import annotations

from vllm_slo.exporters.probe.blocked import DEFERRING, KV_BLOCKS, REASONS, SEQUENCE_CAP, TOKEN_BUDGET
from vllm_slo.exporters.probe.clocks import Gaps, QueueClock, StepClock
from vllm_slo.exporters.probe.life import DECODE, PREEMPTED, PREFILL, QUEUED, RECOMPUTE, Life

MOST_WINDOWS = 64
"""Of a request that is passed over and looked at again all the time; the last one then holds what lies between, too."""


def book(life: Life, now_ns: int, queue: QueueClock, steps: StepClock, gaps: Gaps) -> None:
    """Books ``since_ns`` to ``now_ns``. What came after the last tick of a clock goes to the part that was running."""
    phase = life.phase
    length = now_ns - life.since_ns
    life.since_ns = now_ns
    if phase == QUEUED:
        _book_queue(life, now_ns, length, queue)
    elif phase == PREFILL:
        share = steps.prefill_ns - life.share_open
        interference = min(share, length) if share > 0 else 0
        life.prefill_interference += interference
        life.prefill_other += length - interference
    elif phase == DECODE:
        work, slowdown, interference = life.decode_open
        life.decode_work += steps.work - work
        life.decode_slowdown += steps.slowdown - slowdown + now_ns - steps.at_ns
        life.decode_interference += steps.interference - interference
        life.worst_gap_ns = max(life.worst_gap_ns, gaps.longest_since(life.gap_since_ns))
        life.gap_since_ns = steps.at_ns
    elif phase == PREEMPTED:
        life.preempted += length
        if not life.turn_has_token:
            life.preempted_before += length
    elif phase == RECOMPUTE:
        life.recompute += length
        if not life.turn_has_token:
            life.recompute_before += length


def own_share(life: Life, own_ns: int) -> None:
    """Books a step's share as the request's own prefill: it is neither interference nor other any more."""
    life.prefill_own += own_ns
    life.share_open += own_ns
    life.since_ns += own_ns


def _book_queue(life: Life, now_ns: int, length: int, queue: QueueClock) -> None:
    if life.deferred_reason is not None:
        _defer(life, life.deferred_reason, length)
        return
    opened = life.queue_open
    if opened is None:
        life.queue_step += length
        return
    totals = queue.totals
    spent = [now - then for now, then in zip(totals, opened, strict=True)]
    spent[queue.reason] += now_ns - queue.at_ns
    life.queue_sequence_cap += spent[SEQUENCE_CAP]
    life.queue_token_budget += spent[TOKEN_BUDGET]
    life.queue_kv_blocks += spent[KV_BLOCKS]
    left = length - spent[SEQUENCE_CAP] - spent[TOKEN_BUDGET] - spent[KV_BLOCKS]
    for reason in DEFERRING:
        if spent[reason]:
            _defer(life, REASONS[reason], spent[reason])
            left -= spent[reason]
    life.queue_step += left
    windows = life.windows
    windows.append((now_ns - length, now_ns))
    if len(windows) > MOST_WINDOWS:
        windows[-2:] = [(windows[-2][0], now_ns)]


def _defer(life: Life, reason: str, length: int) -> None:
    if life.deferred is None:
        life.deferred = {}
    life.deferred[reason] = life.deferred.get(reason, 0) + length
