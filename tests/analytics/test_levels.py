from __future__ import annotations

from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.analytics.levels import LEVELS, cover

MINUTE = timedelta(minutes=1)
START = datetime(2026, 5, 31, tzinfo=UTC)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
WIDTHS = dict(LEVELS)


def test_a_ragged_range_is_minutes_hours_days_hours_minutes() -> None:
    parts = cover(datetime(2026, 6, 1, 22, 58, tzinfo=UTC), datetime(2026, 6, 4, 1, 2, tzinfo=UTC))
    assert [(p.level, (p.end - p.start) // MINUTE) for p in parts] == [
        ("minute", 2),
        ("hour", 60),
        ("day", 2 * 24 * 60),
        ("hour", 60),
        ("minute", 2),
    ]


@given(
    st.integers(min_value=0, max_value=5000),
    st.integers(min_value=1, max_value=9000),
    st.sampled_from([timedelta(minutes=10), timedelta(hours=1), timedelta(hours=3), timedelta(days=2)]),
)
def test_stretches_cover_a_range_once_on_their_own_bounds(first: int, length: int, coarsest: timedelta) -> None:
    start = START + first * MINUTE
    end = start + length * MINUTE
    parts = cover(start, end, coarsest)
    assert parts[0].start == start
    assert parts[-1].end == end
    assert all(a.end == b.start for a, b in pairwise(parts))
    for part in parts:
        width = WIDTHS[part.level]
        assert width <= coarsest
        assert not (part.start - EPOCH) % width
        assert not (part.end - EPOCH) % width
    minutes = sum((p.end - p.start) // MINUTE for p in parts if p.level == "minute")
    assert coarsest < timedelta(hours=1) or minutes < 120
