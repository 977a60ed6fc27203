"""Histograms for a hot path: bounds in nanoseconds, one thread that writes, no lock.

The reader copies the counts in one operation of the interpreter. Between that and reading the sum another value may
come in, so a scrape's sum can be one value ahead of its counts; the next one has both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

NANOSECONDS = 1_000_000_000
STEPS: tuple[float, ...] = (1, 1.5, 2, 3, 5, 7.5)
"""Bounds within a decade. Each is at most 5/3 of the one before it, so a quantile read from the histogram lies within a
range whose ends differ by at most two thirds."""


def bounds(first_seconds: float, last_seconds: float, more_seconds: Iterable[float] = ()) -> tuple[int, ...]:
    """STEPS per decade from ``first_seconds`` to ``last_seconds``, and ``more_seconds``, ascending, in nanoseconds.

    Counting in whole nanoseconds makes equal what was written differently: 0.3 and 0.1 * 3 are one bound.
    """
    low, high = round(first_seconds * NANOSECONDS), round(last_seconds * NANOSECONDS)
    decades = (10**power for power in range(len(str(high))))
    series = (round(decade * step) for decade in decades for step in STEPS)
    return tuple(sorted({low, high, *(b for b in series if low <= b <= high), *(_whole(s) for s in more_seconds)}))


def _whole(seconds: float) -> int:
    return round(seconds * NANOSECONDS)


class Histogram:
    """Counts by bound (inclusive, as in Prometheus) and one count above the last, and the sum."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, upper: Sequence[int]) -> None:
        self.bounds = upper
        self.counts = [0] * (len(upper) + 1)
        self.sum = 0

    def observe(self, value: int) -> None:
        """Count one value; a negative one (a wall clock was set back) counts as 0."""
        if value < 0:
            value = 0
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def read(self) -> tuple[list[int], int]:
        """(Counts, the last of them above all bounds; sum), for another thread."""
        return self.counts.copy(), self.sum
