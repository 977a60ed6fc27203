"""Counters and histograms by cell, against adding up every value."""

from __future__ import annotations

import random
import sys
import threading
from collections import Counter
from itertools import pairwise

import pytest

from vllm_slo.exporters.probe.histogram import NANOSECONDS, STEPS, Histogram, bounds
from vllm_slo.exporters.probe.meters import (
    INTER_TOKEN_LATENCY,
    PREFILL,
    QUEUE,
    RANGES,
    REQUEST_DURATION,
    STEP,
    TIME_PER_OUTPUT_TOKEN,
    TIME_TO_FIRST_TOKEN,
    Buckets,
    Meters,
    priority_labels,
)

BUCKETS = Buckets.of((("short", 4096), ("medium", 32768), ("long", None)))


def meters(**objectives: list[float]) -> Meters:
    """Three buckets, priorities below 0, 0 and above."""
    return Meters(BUCKETS, (-1, 0), objectives)


class TestBounds:
    """Of histograms."""

    def test_each_is_at_most_five_thirds_of_the_one_before(self) -> None:
        for first, last in RANGES.values():
            found = bounds(first, last)
            assert all(a < b and 3 * b <= 5 * a for a, b in pairwise(found))

    def test_they_go_from_the_first_to_the_last_in_both_ends_included(self) -> None:
        assert bounds(0.001, 0.01) == tuple(round(step * 1_000_000) for step in (*STEPS, 10))

    def test_the_queue_begins_at_a_millisecond(self) -> None:
        assert meters().bounds[QUEUE][0] == 1_000_000

    def test_an_objective_is_a_bound_exactly(self) -> None:
        found = meters(queue=[0.123456789]).bounds[QUEUE]
        assert 123_456_789 in found
        assert list(found) == sorted(found)

    def test_an_objective_that_is_a_default_bound_is_not_doubled(self) -> None:
        assert meters(queue=[0.5, 0.1 * 3, 0.3, 300]).bounds == meters().bounds

    def test_an_objective_beyond_the_defaults_is_a_bound_too(self) -> None:
        assert meters(queue=[900.0]).bounds[QUEUE][-1] == 900 * NANOSECONDS

    def test_objectives_of_one_histogram_leave_the_others_alone(self) -> None:
        assert meters(queue=[0.123]).bounds[PREFILL] == meters().bounds[PREFILL]


class TestHistogram:
    """One of them."""

    def test_a_bound_is_inclusive_as_in_prometheus(self) -> None:
        histogram = Histogram((10, 20))
        for value in (10, 11, 20, 21):
            histogram.observe(value)
        assert histogram.read() == ([1, 2, 1], 62)

    def test_a_negative_value_counts_as_none(self) -> None:
        histogram = Histogram((10, 20))
        histogram.observe(-5)
        assert histogram.read() == ([1, 0, 0], 0)

    def test_another_thread_reads_counts_that_never_fall(self) -> None:
        histogram, stop, before = Histogram((1, 2, 3)), threading.Event(), sys.getswitchinterval()

        def write() -> None:
            while not stop.is_set():
                for value in (1, 2, 3, 4):
                    histogram.observe(value)

        writer = threading.Thread(target=write)
        sys.setswitchinterval(1e-6)
        try:
            writer.start()
            last = 0
            for _ in range(2_000):
                counts, _ = histogram.read()
                assert sum(counts) >= last
                assert max(counts) - min(counts) <= 1
                last = sum(counts)
        finally:
            stop.set()
            writer.join()
            sys.setswitchinterval(before)


class TestCells:
    """Buckets and classes of priorities."""

    def test_a_prompt_of_the_bound_belongs_to_the_bucket(self) -> None:
        assert [BUCKETS.name(tokens) for tokens in (1, 4096, 4097, 32768, 32769, 10**9)] == [
            "short",
            "short",
            "medium",
            "medium",
            "long",
            "long",
        ]

    def test_one_bucket_takes_everything(self) -> None:
        assert Buckets.of((("all", None),)).name(10**9) == "all"

    @pytest.mark.parametrize(
        ("uppers", "labels"),
        [((), ("any",)), ((0,), ("<=0", ">=1")), ((-5, 0, 1), ("<=-5", "-4..0", "1", ">=2"))],
    )
    def test_labels_name_the_priorities_of_a_class(self, uppers: tuple[int, ...], labels: tuple[str, ...]) -> None:
        assert priority_labels(uppers) == labels

    def test_whatever_the_priorities_there_are_at_most_buckets_times_four_cells(self) -> None:
        found = Meters(BUCKETS, (-10, 0, 10))
        cells = {found.cell(tokens, priority) for tokens in (1, 5_000, 50_000) for priority in range(-100, 100)}
        assert cells <= set(found.cells)
        assert len(found.cells) == 12

    def test_a_cell_is_one_object(self) -> None:
        found = meters()
        assert found.cell(10, 0) is found.cell(20, 0)


def test_gaps_of_many_requests_at_once_are_as_one_by_one() -> None:
    chance = random.Random(1)
    at_once, one_by_one = meters(), meters()
    cells = [at_once.cell(tokens, priority) for tokens in (1, 5_000) for priority in (0, 1)]
    for _ in range(500):
        gap = int(10 ** chance.uniform(5, 11))
        decoding = {cell: chance.randrange(1, 9) for cell in chance.sample(cells, chance.randrange(1, 5))}
        at_once.output_gap(gap, decoding)
        for cell, requests in decoding.items():
            for _ in range(requests):
                one_by_one.one_gap(cell, gap)
    ours, theirs = at_once.histograms[INTER_TOKEN_LATENCY], one_by_one.histograms[INTER_TOKEN_LATENCY]
    assert {cell: h.read() for cell, h in ours.items()} == {cell: h.read() for cell, h in theirs.items()}
    assert sum(sum(h.counts) for h in ours.values()) > 500


def test_each_event_is_counted_in_its_histogram_and_cell() -> None:
    found = meters()
    short, urgent = found.cell(10, 0), found.cell(5_000, -3)
    found.scheduled(short, 5_000_000)
    found.first_token(urgent, 70_000_000, 20_000_000)
    found.finished(short, "stop", 900_000_000, 8_000_000)
    found.finished(short, "length", 900_000_000)
    found.step(4_000_000, 77)
    counted = {
        (name, cell): histogram.sum
        for name, cells in found.histograms.items()
        for cell, histogram in cells.items()
        if sum(histogram.counts)
    }
    assert counted == {
        (QUEUE, short): 5_000_000,
        (TIME_TO_FIRST_TOKEN, urgent): 70_000_000,
        (PREFILL, urgent): 20_000_000,
        (REQUEST_DURATION, short): 1_800_000_000,
        (TIME_PER_OUTPUT_TOKEN, short): 8_000_000,
    }
    assert found.steps.sum == 4_000_000
    assert STEP not in found.histograms
    assert found.last_step_ns == 77


def test_an_aborted_request_is_counted_and_has_no_duration() -> None:
    found = meters()
    cell = found.cell(10, 0)
    found.finished(cell, "abort", 1)
    found.finished(cell, "error", 1)
    assert found.requests == {("short", 1, "abort"): 1, ("short", 1, "error"): 1}
    assert sum(found.histograms[REQUEST_DURATION][cell].counts) == 0


def test_preemptions_and_their_tokens_add_up() -> None:
    found = meters()
    cell = found.cell(10, 0)
    for lost in (10, 20):
        found.preempted(cell, "kv_blocks", lost)
    found.recomputed(25)
    found.evicted(3)
    assert found.preemptions == Counter({("short", 1, "kv_blocks"): 2})
    assert (found.lost_tokens, found.recomputed_tokens, found.evicted_blocks) == ({cell: 30}, 25, 3)


def test_the_ordinary_class_has_histograms_from_the_start_and_others_when_they_come() -> None:
    found = meters()
    assert set(found.histograms[QUEUE]) == {("short", 1), ("medium", 1), ("long", 1)}
    found.scheduled(found.cell(10, 5), 1)
    assert ("short", 2) in found.histograms[QUEUE]
