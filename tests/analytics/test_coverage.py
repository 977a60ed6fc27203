"""Coverage: rows received against what vLLM's counters rose by."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake_rows import NOON, request, rows
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.coverage import NOT_SCRAPED, UNMATCHED, Coverage, coverage
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.query import connect
from vllm_slo.analytics.selection import Selection
from vllm_slo.exporters.schema import ENGINE_SAMPLES, REQUESTS

HOUR = Selection(NOON, NOON + timedelta(hours=1))
Measure = Callable[..., tuple[Coverage, ...]]


@pytest.fixture
def measure(tmp_path: Path) -> Measure:
    """Coverage over the hour after noon, of requests and samples written to a lake."""

    def run(requests: pa.Table, samples: pa.Table, selection: Selection = HOUR) -> tuple[Coverage, ...]:
        lake = Lake.open(tmp_path)
        lake.append("requests", requests)
        lake.append("engine_samples", samples)
        with connect(lake, Buckets()) as connection:
            return coverage(connection, selection)

    return run


def _ended(instance: str | None, seconds: Iterable[float], **given: Any) -> list[dict[str, Any]]:
    return [
        request(
            number,
            start_time=NOON + timedelta(seconds=at - 5),
            end_time=NOON + timedelta(seconds=at),
            service_instance_id=instance,
            **given,
        )
        for number, at in enumerate(seconds)
    ]


def _sample(instance: str, at: float, finished: float | None, **given: Any) -> dict[str, Any]:
    return {
        "time": NOON + timedelta(seconds=at),
        "source": "scrape",
        "service_instance_id": instance,
        "requests_finished_total": finished,
        **given,
    }


def _samples(*given: dict[str, Any]) -> pa.Table:
    return rows(ENGINE_SAMPLES, given)


def test_rows_are_counted_between_the_first_and_the_last_sample(measure: Measure) -> None:
    requests = rows(REQUESTS, _ended("a", [5, 10, 11, 600, 1000, 1001]))
    [found] = measure(requests, _samples(_sample("a", 10, 100), _sample("a", 1000, 104)))
    assert (found.received, found.finished, found.covered, found.reason) == (3, 4, 3, None)
    assert (found.since, found.until) == (NOON + timedelta(seconds=10), NOON + timedelta(seconds=1000))


def test_rows_left_out_by_quality_are_received_all_the_same(measure: Measure) -> None:
    requests = rows(REQUESTS, _ended("a", [20, 30], quality="negative_time"))
    [found] = measure(requests, _samples(_sample("a", 10, 0), _sample("a", 100, 2)))
    assert (found.received, found.finished) == (2, 2)


def test_rows_that_clients_reported_are_no_spans_received(measure: Measure) -> None:
    requests = rows(REQUESTS, [*_ended("a", [20]), *_ended("a", [20.5], source="client")])
    shown = replace(HOUR, sources=("client",))
    [found] = measure(requests, _samples(_sample("a", 10, 0), _sample("a", 100, 1)), shown)
    assert (found.received, found.finished) == (1, 1)


def test_a_counter_that_falls_was_restarted(measure: Measure) -> None:
    requests = rows(REQUESTS, _ended("a", [20]))
    samples = _samples(_sample("a", 10, 100), _sample("a", 20, 103), _sample("a", 30, 2), _sample("a", 40, 5))
    [found] = measure(requests, samples)
    assert found.finished == 3 + 2 + 3


def test_a_restart_is_seen_by_its_start_time_though_the_counter_did_not_fall(measure: Measure) -> None:
    samples = _samples(
        _sample("a", 10, 3, process_start_time=NOON - timedelta(hours=1)),
        _sample("a", 20, 4, process_start_time=NOON + timedelta(seconds=15)),
    )
    [found] = measure(rows(REQUESTS, _ended("a", [15])), samples)
    assert found.finished == 4


def test_failed_requests_are_counted_over_restarts_and_unknown_without_the_counter(measure: Measure) -> None:
    told = [
        _sample("a", at, finished, requests_finished_error_total=failed)
        for at, finished, failed in ((10, 100, 7), (20, 103, 9), (30, 2, 1), (40, 5, 1))
    ]
    untold = [_sample("b", 10, 0), _sample("b", 40, 5)]
    found = {c.instance: c for c in measure(rows(REQUESTS, _ended("a", [20])), _samples(*told, *untold))}
    assert (found["a"].failed, found["b"].failed) == (2 + 1, None)


def test_engines_of_one_instance_add_up(measure: Measure) -> None:
    samples = _samples(
        *(_sample("a", at, finished, engine="0") for at, finished in ((10, 1), (20, 3), (30, 7))),
        *(_sample("a", at, finished, engine="1") for at, finished in ((10, 50), (20, 1), (30, 2))),
    )
    [found] = measure(rows(REQUESTS, _ended("a", [15])), samples)
    assert found.finished == 6 + 2


def test_samples_without_the_counter_do_not_count(measure: Measure) -> None:
    samples = _samples(_sample("a", 10, 1), _sample("a", 20, None), _sample("a", 30, 4))
    [found] = measure(rows(REQUESTS, _ended("a", [15])), samples)
    assert found.finished == 3


def test_an_instance_that_is_not_scraped_is_unknown_with_the_cure(measure: Measure) -> None:
    found = measure(rows(REQUESTS, _ended("a", [15]) + _ended("b", [16])), _samples(_sample("a", 10, 1)))
    assert [(c.instance, c.received, c.finished, c.covered, c.reason) for c in found] == [
        ("a", 1, None, None, NOT_SCRAPED),
        ("b", 1, None, None, NOT_SCRAPED),
    ]


@pytest.mark.parametrize("name", [None, "another name"])
def test_spans_under_another_name_make_the_scraped_instance_unknown_not_uncovered(
    measure: Measure, name: str | None
) -> None:
    samples = _samples(_sample("host:8000", 10, 0), _sample("host:8000", 100, 2))
    found = {c.instance: c for c in measure(rows(REQUESTS, _ended(name, [20, 30])), samples)}
    unknown = found["host:8000"]
    assert (unknown.received, unknown.finished, unknown.covered, unknown.reason) == (0, 2, None, UNMATCHED)
    assert set(found) == {"host:8000"} | ({name} if name else set())


def test_no_spans_at_all_is_coverage_of_nothing(measure: Measure) -> None:
    samples = _samples(_sample("a", 10, 0), _sample("a", 100, 2))
    [found] = measure(rows(REQUESTS, _ended("a", [-7200])), samples)
    assert (found.received, found.finished, found.covered, found.reason) == (0, 2, 0, None)


def test_more_rows_than_finished_requests_stay_visible(measure: Measure) -> None:
    samples = _samples(_sample("a", 10, 0), _sample("a", 100, 1))
    [found] = measure(rows(REQUESTS, _ended("a", [20, 30, 40])), samples)
    assert (found.received, found.finished, found.covered) == (3, 1, 1)


def test_an_empty_range_has_no_instances(measure: Measure) -> None:
    late = Selection(NOON + timedelta(days=1), NOON + timedelta(days=2))
    assert measure(rows(REQUESTS, _ended("a", [15])), _samples(_sample("a", 10, 1)), late) == ()


Run = list[tuple[int, bool]]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=2, max_size=12))
def test_restarts_never_make_the_rise_negative_and_a_walk_finds_the_same(tmp_path_factory: Any, run: Run) -> None:
    """Between two samples some requests finish; now and then the server restarts first, so the counter begins at 0."""
    counter, process, expected, taken = 10, NOON - timedelta(days=1), 0, []
    for place, (finished, restarts) in enumerate(run):
        if restarts and place:
            counter, process = 0, NOON + timedelta(seconds=place * 10 - 1)
        counter += finished
        expected += finished if place else 0
        taken.append(_sample("a", place * 10, float(counter), process_start_time=process))
    lake = Lake.open(tmp_path_factory.mktemp("lake"))
    lake.append("engine_samples", _samples(*taken))
    with connect(lake, Buckets()) as connection:
        [found] = coverage(connection, HOUR)
    assert found.finished == expected


def test_what_the_probe_saw_and_vllm_does_not_count_is_told_apart_by_how_it_ended(measure: Measure) -> None:
    served = _ended("a", (10, 20, 30))
    lost: list[dict[str, Any]] = []
    endings = (
        ("abort", "engine+frontend+edge"),
        ("abort", "engine"),
        ("abort", "engine+stock"),
        ("error", "engine"),
        ("rejected", "edge"),
    )
    for number, (ending, records) in enumerate(endings):
        lost += _ended("a", (40 + number,), source="probe", quality="unfinished", finish_reason=ending, records=records)
    pieces = [*_ended("a", (50,), quality="superseded"), *_ended("a", (51,), source="probe", quality="late_record")]
    counters = rows(ENGINE_SAMPLES, (_sample("a", at, n) for at, n in ((0, 0), (60, 5))))
    probed = rows(ENGINE_SAMPLES, [_sample("a", at, 1000.0 - at, source="probe") for at in range(0, 60, 7)])
    (found,) = measure(rows(REQUESTS, [*served, *lost, *pieces]), pa.concat_tables([counters, probed]))
    assert (found.received, found.finished, found.covered) == (5, 5, 5)
    assert found.uncounted == {"abort": 2, "rejected": 1}
