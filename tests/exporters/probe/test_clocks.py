"""Cumulative clocks, the reference of a step, the longest gap."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.exporters.probe.blocked import KV_BLOCKS, NOTHING, SEQUENCE_CAP
from vllm_slo.exporters.probe.clocks import Gaps, QueueClock, Reference, StepClock


def test_time_in_the_queue_goes_to_what_was_found_before_it() -> None:
    clock = QueueClock()
    assert clock.tick(100) == 0
    clock.reason = SEQUENCE_CAP
    assert clock.tick(130) == 30
    clock.reason = KV_BLOCKS
    clock.tick(135)
    clock.reason = NOTHING
    clock.tick(200)
    assert (clock.totals[SEQUENCE_CAP], clock.totals[KV_BLOCKS], clock.totals[NOTHING]) == (30, 5, 65)


@given(
    st.lists(
        st.tuples(st.integers(1, 10**9), st.integers(0, 4000), st.integers(0, 600), st.booleans()),
        min_size=1,
        max_size=200,
    )
)
def test_every_nanosecond_of_steps_is_work_slowdown_or_interference(steps: list[tuple[int, int, int, bool]]) -> None:
    clock = StepClock()
    clock.skip(1000)
    now = 1000
    shares = 0
    for length, prefill, decoding, idle in steps:
        if idle:
            now += length // 2
            clock.skip(now)
        began = now
        now += length
        tokens = prefill + decoding
        before = clock.read()
        assert clock.tick(now, began, tokens, prefill, decoding) == now - began
        spent = [after - was for after, was in zip(clock.read(), before, strict=True)]
        assert min(spent) >= 0
        assert sum(spent) == length
        shares += length * prefill // tokens if prefill else 0
    assert sum(clock.read()) == now - 1000
    assert clock.prefill_ns == shares


def test_prefill_above_the_reference_is_interference() -> None:
    clock = StepClock()
    clock.skip(1)
    now = 1
    for _ in range(20):
        now += 4_000
        clock.tick(now, now - 4_000, 1, 0, 1)
    before = clock.read()
    now += 100_000
    clock.tick(now, now - 100_000, 2049, 2048, 1)
    work, slowdown, interference = (after - was for after, was in zip(clock.read(), before, strict=True))
    assert (work, slowdown, interference) == (4_000, 0, 96_000)


def test_a_larger_batch_is_slowdown() -> None:
    clock = StepClock()
    clock.skip(1)
    now = 1
    for decoding, length in ((1, 4_000), (64, 9_000)) * 20:
        now += length
        clock.tick(now, now - length, decoding, 0, decoding)
    work, slowdown, interference = clock.read()
    assert (work, interference) == (20 * 8_000, 0)
    assert slowdown == 20 * 5_000


def test_stalls_and_a_slow_start_do_not_move_the_reference() -> None:
    reference = Reference()
    reference.learn(4, 900_000)
    for number in range(200):
        reference.learn(4, 400_000 if number % 50 == 49 else 5_000)
    assert 5_000 <= reference.of(4) < 6_000


def test_a_size_never_seen_has_the_reference_of_the_next_smaller() -> None:
    reference = Reference()
    assert reference.of(8) == 0
    reference.learn(8, 7_000)
    assert (reference.of(1), reference.of(9), reference.of(500)) == (7_000, 7_000, 7_000)
    reference.learn(1, 4_000)
    assert (reference.of(1), reference.of(3), reference.of(8)) == (4_000, 4_000, 7_000)
    assert reference.smallest_ns == 4_000


@given(lengths=st.lists(st.integers(1, 1000), min_size=1, max_size=300), since=st.integers(0, 300))
def test_the_longest_gap_is_that_of_a_walk_over_all(lengths: list[int], since: int) -> None:
    gaps, ends, now = Gaps(), [0], 0
    for length in lengths:
        now += length
        gaps.add(now, length)
        ends.append(now)
    start = ends[min(since, len(lengths))]
    assert gaps.longest_since(start) == max(lengths[min(since, len(lengths)) :], default=0)


def test_ever_shorter_gaps_are_bounded() -> None:
    gaps, now = Gaps(), 0
    for length in range(5000, 0, -1):
        now += length
        gaps.add(now, length)
    assert len(gaps._ends) <= Gaps.MOST
    assert gaps.longest_since(now - 1 - 2 - 3) == 3
