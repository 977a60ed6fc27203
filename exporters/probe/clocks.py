"""Cumulative clocks of one engine: a request's share of time is the difference of two readings. Pure, nanoseconds."""

from __future__ import annotations

from bisect import bisect_right

from vllm_slo.exporters.probe.blocked import NOTHING, REASONS

QueueReading = tuple[int, ...]
DecodeReading = tuple[int, int, int]


class QueueClock:
    """Time by what blocks the head of the queue; ticks at each schedule, O(1) whatever waits."""

    __slots__ = ("at_ns", "reason", "totals")

    def __init__(self) -> None:
        self.at_ns = 0
        self.reason = NOTHING
        self.totals = [0] * len(REASONS)

    def tick(self, now_ns: int) -> int:
        """Charges the time since the last tick to the reason found then, and returns that time; 0 at the first."""
        length = now_ns - self.at_ns if self.at_ns else 0
        self.totals[self.reason] += length
        self.at_ns = now_ns
        return length

    def read(self) -> QueueReading:
        """The totals in the order of `blocked.REASONS`."""
        return tuple(self.totals)


class Reference:
    """Length of a pure decode step by class of batch size (powers of two), a slow robust mean.

    The first steps of a class count only where they are shorter (the very first ones compile and warm up), later ones
    with a weight of 1/16 and at most twice the mean, so that a stall does not move it.
    """

    __slots__ = ("_lengths", "_seen", "_smallest", "smallest_ns")
    WARM_UP = 8

    def __init__(self) -> None:
        self._lengths = [0] * 24
        self._seen = [0] * 24
        self._smallest = 24
        self.smallest_ns = 0
        """That of the smallest class seen; 0 when none was."""

    def learn(self, sequences: int, length_ns: int) -> None:
        """Takes in a pure decode step."""
        c = (sequences - 1).bit_length()
        known, seen = self._lengths[c], self._seen[c]
        if not seen:
            known = length_ns
        elif seen < self.WARM_UP:
            known = min(known, length_ns)
        else:
            known += (min(length_ns, 2 * known) - known) // 16
        self._seen[c] = seen + 1
        self._lengths[c] = known = known or 1
        if c <= self._smallest:
            self._smallest = c
            self.smallest_ns = known

    def of(self, sequences: int) -> int:
        """For a batch of that size: its class, else the next smaller one seen, else the smallest."""
        c = (sequences - 1).bit_length()
        lengths = self._lengths
        while c >= 0:
            if lengths[c]:
                return max(lengths[c], self.smallest_ns)
            c -= 1
        return self.smallest_ns


class StepClock:
    """Time by what a step spent it on; ticks when a step's output has been processed.

    Decode: every nanosecond is work, slowdown or interference (of the requests that decode then), so that differences
    sum to the time between. Prefill: ``prefill_ns`` is the time of steps times the share of prefill in their tokens.
    """

    __slots__ = ("at_ns", "interference", "prefill_ns", "reference", "slowdown", "work")

    def __init__(self) -> None:
        self.at_ns = 0
        self.work = 0
        self.slowdown = 0
        self.interference = 0
        self.prefill_ns = 0
        self.reference = Reference()

    def skip(self, now_ns: int) -> None:
        """Passes over time in which the engine had nothing to do, or was paused."""
        if self.at_ns:
            self.slowdown += now_ns - self.at_ns
        self.at_ns = now_ns

    def tick(self, now_ns: int, began_ns: int, tokens: int, prefill_tokens: int, decoding: int) -> int:
        """Ends the step that executed since ``began_ns``, and returns its length since the one before."""
        length = now_ns - self.at_ns
        self.at_ns = now_ns
        if not decoding:
            if prefill_tokens:
                self.interference += length
                self.prefill_ns += (now_ns - began_ns) * prefill_tokens // tokens
            else:
                self.slowdown += length
            return length
        reference = self.reference
        smallest = reference.smallest_ns
        if prefill_tokens:
            self.prefill_ns += (now_ns - began_ns) * prefill_tokens // tokens
            if smallest:
                work = min(length, smallest)
                slowdown = min(length - work, reference.of(decoding) - smallest)
                self.work += work
                self.slowdown += slowdown
                self.interference += length - work - slowdown
            else:
                interference = length * prefill_tokens // tokens
                self.interference += interference
                self.work += length - interference
        else:
            if 0 < smallest < length:
                self.work += smallest
                self.slowdown += length - smallest
            else:
                self.work += length
            reference.learn(decoding, length)
        return length

    def prefill_at(self, now_ns: int, start_ns: int, tokens: int, prefill_tokens: int) -> int:
        """``prefill_ns`` in the middle of a step that was scheduled at ``start_ns``."""
        if not prefill_tokens:
            return self.prefill_ns
        return self.prefill_ns + (now_ns - max(start_ns, self.at_ns)) * prefill_tokens // tokens

    def read(self) -> DecodeReading:
        """Work, slowdown, interference at the last tick."""
        return self.work, self.slowdown, self.interference


class Gaps:
    """The longest gap between outputs since any moment, in O(log n): gaps that a later longer one hides are forgotten.

    Every request that decodes has an output in every step that decodes; with pipeline parallelism, where its turn
    comes every few steps, the gap is that of the steps and thus too short.
    """

    __slots__ = ("_ends", "_lengths")
    MOST = 512

    def __init__(self) -> None:
        self._ends: list[int] = []
        self._lengths: list[int] = []

    def add(self, end_ns: int, length_ns: int) -> None:
        """A gap that ended now. Beyond MOST of ever shorter ones, every second of the older half is forgotten."""
        ends, lengths = self._ends, self._lengths
        while lengths and lengths[-1] <= length_ns:
            lengths.pop()
            ends.pop()
        ends.append(end_ns)
        lengths.append(length_ns)
        if len(ends) > self.MOST:
            del ends[0 : self.MOST // 2 : 2], lengths[0 : self.MOST // 2 : 2]

    def longest_since(self, since_ns: int) -> int:
        """Of gaps that ended later; no longer than the time from then to its end; 0 when there was none."""
        index = bisect_right(self._ends, since_ns)
        if index == len(self._ends):
            return 0
        return min(self._lengths[index], self._ends[index] - since_ns)
