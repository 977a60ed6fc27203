"""What keeps the head of the queue waiting, and who has what it wants. Pure."""

from __future__ import annotations

from bisect import bisect_right

NOTHING, SEQUENCE_CAP, TOKEN_BUDGET, KV_BLOCKS, ENCODER, PAUSED, PREFILL_INTERVAL = range(7)
REASONS: tuple[str, ...] = (
    *("nothing", "sequence_cap", "token_budget", "kv_blocks"),
    *("encoder", "paused", "prefill_interval"),
)
"""The last three stop the whole scan, but belong to the request or the operator: they count as deferred.

``prefill_interval``: `--prefill-schedule-interval` holds prefills back for a few steps so that decodes run undisturbed.
"""
DEFERRING: tuple[int, ...] = (ENCODER, PAUSED, PREFILL_INTERVAL)


def reason(paused: bool, preempted: bool, tokens_left: int, inputs_left: int, slots_left: int) -> int:
    """What stopped the scheduler's scan of the waiting requests, in the order in which the scheduler checks.

    ``inputs_left`` is less what a further sequence needs for its drafts. What none of the limits explains is a failed
    allocation: the scan ends nowhere else for a text model with chunked prefill.
    """
    if paused:
        return PAUSED
    if preempted:
        return KV_BLOCKS
    if tokens_left <= 0 or inputs_left <= 0:
        return TOKEN_BUDGET
    if slots_left <= 0:
        return SEQUENCE_CAP
    return KV_BLOCKS


class Run:
    """A stretch of time with one blocker; None: nobody in particular."""

    __slots__ = ("blocker", "end_ns", "start_ns")

    def __init__(self, start_ns: int, end_ns: int, blocker: str | None) -> None:
        self.start_ns = start_ns
        self.end_ns = end_ns
        self.blocker = blocker


class BlockerLog:
    """Run-length log of who was the blocker: grows only when that changes, bounded.

    Written by the engine's thread and summed by another, later: the last run grows in place, and when the list is full
    a shorter one takes its place, so that whoever took ``runs`` keeps what there was.
    """

    __slots__ = ("runs",)
    MOST = 4096

    def __init__(self) -> None:
        self.runs: list[Run] = []

    def extend(self, start_ns: int, end_ns: int, blocker: str | None) -> None:
        """That stretch of time had this blocker."""
        runs = self.runs
        if runs and runs[-1].blocker == blocker and runs[-1].end_ns == start_ns:
            runs[-1].end_ns = end_ns
            return
        if len(runs) >= self.MOST:
            self.runs = runs = runs[self.MOST // 2 :]
        runs.append(Run(start_ns, end_ns, blocker))


MOST_SUMMED = 512


def largest(runs: list[Run], windows: list[tuple[int, int]]) -> tuple[str, int] | None:
    """Who blocked longest in these stretches of time (in order), and how long; None when nobody did.

    Where they hold more than MOST_SUMMED runs, or begin before the log does, the time before is not counted: what is
    told is then a lower bound.
    """
    sums: dict[str, int] = {}
    left = MOST_SUMMED
    for since, until in reversed(windows):
        index = bisect_right(runs, until, key=lambda run: run.start_ns) - 1
        while index >= 0 and left and (run := runs[index]).end_ns > since:
            length = min(run.end_ns, until) - max(run.start_ns, since)
            if run.blocker is not None and length > 0:
                sums[run.blocker] = sums.get(run.blocker, 0) + length
            left -= 1
            index -= 1
    if not sums:
        return None
    name = max(sums, key=lambda blocker: (sums[blocker], blocker))
    return name, sums[name]
