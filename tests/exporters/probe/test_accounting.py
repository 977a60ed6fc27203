"""The accounting against a twin that keeps everything, over random histories."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from probe_twin import Chaos, Told, Twin
from vllm_slo.exporters.probe import blocked
from vllm_slo.exporters.probe.accounting import Accounting
from vllm_slo.exporters.probe.life import Life
from vllm_slo.exporters.probe.phases import MOST_WINDOWS
from vllm_slo.exporters.probe.steps import Chunk


def compare(chaos: Chaos) -> None:
    twin = Twin(chaos)
    assert sorted(life.engine_request_id for life in chaos.ended) == sorted(chaos.fates)
    for fate in chaos.fates.values():
        life = fate.life
        assert life is not None
        assert life.finish_reason == fate.reason
        deferred = life.deferred or {}
        got = {
            "step": life.queue_step,
            "sequence_cap": life.queue_sequence_cap,
            "token_budget": life.queue_token_budget,
            "kv_blocks": life.queue_kv_blocks,
            **{reason: deferred.get(reason, 0) for reason in ("grammar", "lora", "streaming", "encoder", "paused")},
            "head": life.head_ns,
            "own": life.prefill_own,
            "interference": life.prefill_interference,
            "other": life.prefill_other,
            "work": life.decode_work,
            "slowdown": life.decode_slowdown,
            "decode_interference": life.decode_interference,
            "preempted": life.preempted,
            "preempted_before": life.preempted_before,
            "recompute": life.recompute,
            "recompute_before": life.recompute_before,
        }
        assert got == twin.parts(fate), fate
        assert min(got.values()) >= 0
        assert life.queue + life.prefill + life.decode == life.end_ns - life.queued_ns
        assert (life.scheduled_ns, life.first_token_ns, life.end_ns) == (fate.scheduled, fate.first_token, fate.end)
        assert (life.preemptions, life.lost_tokens) == (fate.preemptions, fate.lost)
        assert life.recomputed_tokens == fate.recomputed
        assert life.recomputed_tokens <= life.lost_tokens
        if not fate.session and fate.first_token:
            assert life.prefill == life.first_token_ns - life.scheduled_ns
            assert life.decode == life.end_ns - life.first_token_ns
    accounting = chaos.accounting
    assert not accounting.in_flight
    assert not accounting.prefilling
    assert not accounting.awaiting
    assert not accounting.decoding
    assert accounting.lost_tokens == sum(fate.lost for fate in chaos.fates.values())
    assert accounting.recomputed_tokens == sum(fate.recomputed for fate in chaos.fates.values())


@given(random=st.randoms(use_true_random=False), depth=st.integers(1, 3), events=st.integers(1, 120))
@settings(max_examples=60, deadline=None)
def test_every_part_of_any_history_equals_the_direct_sum(random: Random, depth: int, events: int) -> None:
    chaos = Chaos(random, depth)
    chaos.run(events)
    compare(chaos)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(8))
def test_long_histories_equal_the_direct_sum(depth: int, seed: int) -> None:
    chaos = Chaos(Random(seed), depth)
    chaos.run(1500)
    compare(chaos)


def one_step(life: Life) -> tuple[Accounting, list[Life], object]:
    """An engine in whose first step, from 100 on, all of the prompt of 10 tokens is computed."""
    ended: list[Life] = []
    accounting = Accounting(Told(), ended.append)
    accounting.added(life)
    accounting.schedule_begins(100)
    accounting.admitted(life, 0)
    key = object()
    accounting.schedule_ends(key, 10, 1, [Chunk(life, 10, 10, True)], 0)
    return accounting, ended, key


def test_a_pooling_request_has_its_output_when_it_ends() -> None:
    life = Life("pooled", 90)
    accounting, ended, key = one_step(life)
    accounting.in_update = True
    accounting.ended(life, 140, "stop", 10)
    accounting.update_ends(key, 150, [])
    assert ended == [life]
    assert (life.first_token_ns, life.end_ns) == (150, 150)
    assert (life.queue, life.prefill, life.prefill_own, life.decode) == (10, 50, 50, 0)


def test_an_output_of_a_step_that_nobody_knows_changes_no_other() -> None:
    life = Life("one", 90)
    accounting, _, key = one_step(life)
    assert not accounting.update_ends(object(), 120, [])
    assert accounting.update_ends(key, 150, [life])
    assert life.prefill_own == 50


def test_an_update_whose_end_was_missed_leaves_nobody_behind() -> None:
    life = Life("one", 90)
    accounting, ended, _ = one_step(life)
    accounting.in_update = True
    accounting.ended(life, 140, "stop", 10)
    accounting.schedule_begins(200)
    assert ended == []
    assert not accounting.in_flight
    assert not accounting.prefilling
    assert accounting.cells == {}
    assert accounting.running == 0


def test_the_time_of_a_pause_is_no_part_of_a_step() -> None:
    life = Life("one", 90)
    accounting, _, key = one_step(life)
    accounting.update_ends(key, 150, [life])
    accounting.paused(160, True)
    accounting.paused(9_990, False)
    accounting.schedule_begins(10_000)
    second = object()
    accounting.schedule_ends(second, 1, 1, [], 0)
    accounting.update_ends(second, 10_040, [])
    assert accounting.step_longest_ns == 50
    accounting.ended(life, 10_050, "abort")
    assert (life.decode_work, life.decode_slowdown) == (40, 9_850 + 10)


def test_whoever_waits_while_the_engine_is_paused_does_so_for_that_alone() -> None:
    first, late = Life("first", 90), Life("late", 5_000)
    accounting = Accounting(Told(), lambda _life: None)
    accounting.added(first)
    accounting.schedule_begins(100)
    accounting.schedule_ends(object(), 0, 0, [], blocked.KV_BLOCKS)
    accounting.paused(200, True)
    accounting.added(late)
    accounting.paused(9_000, False)
    accounting.schedule_begins(9_010)
    for life in (first, late):
        accounting.ended(life, 9_010, "abort")
    assert (first.queue_step, first.queue_kv_blocks, first.deferred) == (10 + 10, 100, {"paused": 8_800})
    assert (late.queue_step, late.queue_kv_blocks, late.deferred) == (10, 0, {"paused": 4_000})


def test_a_step_that_runs_nothing_is_no_step() -> None:
    told = Told()
    accounting = Accounting(told, lambda _life: None)
    accounting.schedule_begins(100)
    key = object()
    accounting.schedule_ends(key, 0, 0, [], 0)
    accounting.update_ends(key, 150, [])
    assert (accounting.step_count, accounting.step_sum_ns, accounting.step_longest_ns) == (0, 0, 0)
    assert (told.of("step"), told.of("empty_step")) == ([], [(150,)])


def test_a_request_passed_over_again_and_again_keeps_a_bounded_record_of_when_it_waited() -> None:
    life = Life("one", 0)
    accounting = Accounting(Told(), lambda _life: None)
    accounting.added(life)
    for now in range(100, 100_100, 100):
        accounting.schedule_begins(now)
        accounting.looked_at(life, "kv_transfer" if now % 200 else None)
        accounting.schedule_ends(object(), 0, 0, [], blocked.TOKEN_BUDGET)
        accounting.pipeline.clear()
    assert len(life.windows) == MOST_WINDOWS
    assert (life.windows[0][0], life.windows[-1][1]) == (100, 99_900)
