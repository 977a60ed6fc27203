"""What blocks the head of the queue, and the log of who is the blocker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.exporters.probe import blocked
from vllm_slo.exporters.probe.blocked import BlockerLog, largest, reason


def test_the_reason_is_the_limit_that_the_scheduler_checks_first() -> None:
    assert reason(True, True, 0, 0, 0) == blocked.PAUSED
    assert reason(False, True, 0, 0, 0) == blocked.KV_BLOCKS
    assert reason(False, False, 0, 5, 0) == blocked.TOKEN_BUDGET
    assert reason(False, False, 5, 0, 0) == blocked.TOKEN_BUDGET
    assert reason(False, False, 5, 5, 0) == blocked.SEQUENCE_CAP
    assert reason(False, False, 5, 5, 1) == blocked.KV_BLOCKS


def test_a_log_grows_only_when_the_blocker_changes() -> None:
    log = BlockerLog()
    for start in range(0, 100, 10):
        log.extend(start, start + 10, "a" if start < 50 else "b")
    assert [(run.start_ns, run.end_ns, run.blocker) for run in log.runs] == [(0, 50, "a"), (50, 100, "b")]


def test_a_full_log_leaves_what_was_taken_from_it_alone() -> None:
    log = BlockerLog()
    for number in range(BlockerLog.MOST):
        log.extend(number, number + 1, f"r{number}")
    taken = log.runs
    log.extend(BlockerLog.MOST, BlockerLog.MOST + 1, "new")
    assert len(taken) == BlockerLog.MOST
    assert len(log.runs) == BlockerLog.MOST // 2 + 1
    assert largest(taken, [(0, 1)]) == ("r0", 1)


def test_time_with_nobody_in_particular_names_nobody() -> None:
    log = BlockerLog()
    log.extend(0, 50, None)
    assert largest(log.runs, [(0, 50)]) is None
    assert largest([], [(0, 50)]) is None


@given(
    lengths=st.lists(st.tuples(st.integers(1, 9), st.sampled_from(["a", "b", "c", None])), max_size=40),
    cuts=st.lists(st.integers(0, 200), min_size=2, max_size=8, unique=True),
)
def test_the_largest_blocker_is_that_of_the_nanosecond_by_nanosecond_sum(
    lengths: list[tuple[int, str | None]], cuts: list[int]
) -> None:
    log = BlockerLog()
    by_nanosecond: list[str | None] = []
    for length, blocker in lengths:
        log.extend(len(by_nanosecond), len(by_nanosecond) + length, blocker)
        by_nanosecond += [blocker] * length
    cuts = sorted(cuts)
    windows = list(zip(cuts[::2], cuts[1::2], strict=False))
    sums: dict[str, int] = {}
    for since, until in windows:
        for name in by_nanosecond[since:until]:
            if name is not None:
                sums[name] = sums.get(name, 0) + 1
    found = largest(log.runs, windows)
    assert found == (max(((length, name) for name, length in sums.items()), default=(0, ""))[::-1] if sums else None)
