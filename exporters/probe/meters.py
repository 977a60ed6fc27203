"""What the engine's thread counts between scrapes: histograms by cell, and counters. Integers only, no lock.

A cell is a context bucket and a class of priorities; there are at most as many as buckets times four. Every call comes
from the one thread that runs the scheduler, costs O(1) or O(cells), and makes an object only the first time that a cell
appears; any other thread may read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from time import monotonic_ns

from vllm_slo.exporters.probe.histogram import Histogram, bounds

Cell = tuple[str, int]
"""(Context bucket, class of priority, 0 the most urgent)."""

QUEUE = "queue"
TIME_TO_FIRST_TOKEN = "time_to_first_token"
INTER_TOKEN_LATENCY = "inter_token_latency"
TIME_PER_OUTPUT_TOKEN = "time_per_output_token"
REQUEST_DURATION = "request_duration"
PREFILL = "prefill"
STEP = "step"

RANGES: dict[str, tuple[float, float]] = {
    QUEUE: (0.001, 300),
    TIME_TO_FIRST_TOKEN: (0.001, 300),
    INTER_TOKEN_LATENCY: (0.001, 30),
    TIME_PER_OUTPUT_TOKEN: (0.001, 30),
    REQUEST_DURATION: (0.01, 3000),
    PREFILL: (0.001, 300),
    STEP: (0.0005, 30),
}
"""Histogram -> first and last default bound in seconds; see ``histogram.STEPS`` for those between."""


@dataclass(frozen=True)
class Buckets:
    """Context buckets as in the settings: names, and the largest prompt of each but the last, which takes the rest."""

    names: tuple[str, ...]
    uppers: tuple[int, ...]

    @classmethod
    def of(cls, pairs: Iterable[tuple[str, int | None]]) -> Buckets:
        """From `Settings.buckets`."""
        listed = tuple(pairs)
        return cls(tuple(name for name, _ in listed), tuple(bound or 0 for _, bound in listed[:-1]))

    def name(self, prompt_tokens: int) -> str:
        """The bucket of a prompt."""
        return self.names[bisect_left(self.uppers, prompt_tokens)]


def priority_labels(uppers: Sequence[int]) -> tuple[str, ...]:
    """Class of priority -> label: the priorities in it, in vLLM's sense (lower is earlier).

    >>> priority_labels((-1, 0))
    ('<=-1', '0', '>=1')
    >>> priority_labels(())
    ('any',)
    """
    if not uppers:
        return ("any",)
    inner = (str(high) if low + 1 == high else f"{low + 1}..{high}" for low, high in pairwise(uppers))
    return (f"<={uppers[0]}", *inner, f">={uppers[-1] + 1}")


class Meters:
    """Counters and histograms of one engine. ``objectives`` are thresholds in seconds by histogram: each is a bound."""

    def __init__(
        self,
        buckets: Buckets,
        priority_uppers: Sequence[int] = (),
        objectives: Mapping[str, Iterable[float]] | None = None,
    ) -> None:
        self.buckets = buckets
        self.priorities = priority_labels(priority_uppers)
        self._uppers = tuple(priority_uppers)
        more = objectives or {}
        self.bounds = {name: bounds(first, last, more.get(name, ())) for name, (first, last) in RANGES.items()}
        self.histograms: dict[str, dict[Cell, Histogram]] = {name: {} for name in RANGES if name != STEP}
        self.steps = Histogram(self.bounds[STEP])
        self.last_step_ns = 0
        """When the last step ended, empty ones among them, on the monotonic clock; 0 before the first."""
        self.requests: dict[tuple[str, int, str], int] = {}
        """(bucket, class, finish reason) -> requests ended."""
        self.preemptions: dict[tuple[str, int, str], int] = {}
        """(bucket, class, reason) -> preemptions."""
        self.lost_tokens: dict[Cell, int] = {}
        self.recomputed_tokens = 0
        self.evicted_blocks = 0
        self.cells = tuple((name, number) for name in buckets.names for number in range(len(self.priorities)))
        """Every cell there can be."""
        self._cells = {cell: cell for cell in self.cells}
        # What most requests are: only a series that begins at 0 shows its first increase.
        ordinary = self.priority_class(0)
        for cell in self.cells:
            if cell[1] == ordinary:
                for name in self.histograms:
                    self._new(name, cell)

    def cell(self, prompt_tokens: int, priority: int) -> Cell:
        """The cell of a request; one object for each cell."""
        found = self.buckets.name(prompt_tokens), bisect_left(self._uppers, priority)
        return self._cells[found]

    def priority_class(self, priority: int) -> int:
        """The class that a priority is in."""
        return bisect_left(self._uppers, priority)

    def scheduled(self, cell: Cell, queue_ns: int) -> None:
        """A request was scheduled for the first time."""
        self._observe(QUEUE, cell, queue_ns)

    def first_token(self, cell: Cell, ttft_ns: int, prefill_ns: int) -> None:
        """A request has its first token, ``ttft_ns`` after its arrival at the front end."""
        self._observe(TIME_TO_FIRST_TOKEN, cell, ttft_ns)
        self._observe(PREFILL, cell, prefill_ns)

    def output_gap(self, gap_ns: int, decoding: Mapping[Cell, int]) -> None:
        """A step gave a further token to so many requests of each cell, all of them ``gap_ns`` after the one before."""
        at, cells = bisect_left(self.bounds[INTER_TOKEN_LATENCY], gap_ns), self.histograms[INTER_TOKEN_LATENCY]
        for cell, requests in decoding.items():
            histogram = cells.get(cell) or self._new(INTER_TOKEN_LATENCY, cell)
            histogram.counts[at] += requests
            histogram.sum += gap_ns * requests

    def one_gap(self, cell: Cell, gap_ns: int) -> None:
        """The same for one request that did not take part in the step before."""
        self._observe(INTER_TOKEN_LATENCY, cell, gap_ns)

    def finished(self, cell: Cell, reason: str, duration_ns: int, token_ns: int | None = None) -> None:
        """A request ended. Only one that was served in full has a duration, and ``token_ns``, its mean time a token."""
        key = (*cell, reason)
        self.requests[key] = self.requests.get(key, 0) + 1
        if reason not in ("abort", "error"):
            self._observe(REQUEST_DURATION, cell, duration_ns)
            if token_ns is not None:
                self._observe(TIME_PER_OUTPUT_TOKEN, cell, token_ns)

    def preempted(self, cell: Cell, reason: str, lost_tokens: int) -> None:
        """A request lost its blocks, and with them so many computed tokens."""
        key = (*cell, reason)
        self.preemptions[key] = self.preemptions.get(key, 0) + 1
        self.lost_tokens[cell] = self.lost_tokens.get(cell, 0) + lost_tokens

    def recomputed(self, tokens: int) -> None:
        """So many lost tokens are computed again."""
        self.recomputed_tokens += tokens

    def evicted(self, blocks: int) -> None:
        """So many cached blocks were thrown out for reuse."""
        self.evicted_blocks += blocks

    def step(self, step_ns: int, end_ns: int = 0) -> None:
        """A step took so long; it ends now, or at ``end_ns`` of the monotonic clock."""
        self.steps.observe(step_ns)
        self.last_step_ns = end_ns or monotonic_ns()

    def empty_step(self, end_ns: int) -> None:
        """A step that ran nothing ended: the engine is alive, and no step time is observed."""
        self.last_step_ns = end_ns

    def _observe(self, name: str, cell: Cell, value_ns: int) -> None:
        (self.histograms[name].get(cell) or self._new(name, cell)).observe(value_ns)

    def _new(self, name: str, cell: Cell) -> Histogram:
        histogram = self.histograms[name][cell] = Histogram(self.bounds[name])
        return histogram
