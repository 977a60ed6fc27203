"""What vLLM finished after the newest request of the lake."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from lake_rows import NO_REQUESTS, NOON, request, rows
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.query import connect
from vllm_slo.analytics.silence import Silence, silence
from vllm_slo.exporters.schema import ENGINE_SAMPLES, REQUESTS


def found(folder: Path, requests: pa.Table, counter: dict[float, float], newest: float | None) -> tuple[Silence, ...]:
    """``counter``: seconds after noon -> requests that instance `a` finished. ``newest``: end of the extent."""
    lake = Lake.open(folder)
    if requests.num_rows:
        lake.append("requests", requests)
    samples = [
        {"time": at(seconds), "source": "scrape", "service_instance_id": "a", "requests_finished_total": finished}
        for seconds, finished in counter.items()
    ]
    lake.append("engine_samples", rows(ENGINE_SAMPLES, samples))
    with connect(lake, Buckets()) as connection:
        return silence(connection, None if newest is None else at(newest))


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def ended(seconds: float, start: float) -> pa.Table:
    return rows(REQUESTS, [request(1, start_time=at(start), end_time=at(seconds))])


def test_requests_that_vllm_finished_and_nobody_sent_are_missing(tmp_path: Path) -> None:
    counter = {50.0: 60.0, 65.0: 60.0, 100.0: 63.0, 170.0: 65.0, 230.0: 65.0}
    assert found(tmp_path, ended(30, 20), counter, 60) == (Silence("a", 5, at(65), at(170)),)


def test_a_restart_in_between_loses_no_count(tmp_path: Path) -> None:
    counter = {65.0: 60.0, 100.0: 2.0, 170.0: 5.0, 230.0: 5.0}
    assert [each.missing for each in found(tmp_path, ended(30, 20), counter, 60)] == [5]


def test_a_lake_without_requests_is_judged_too(tmp_path: Path) -> None:
    assert [each.missing for each in found(tmp_path, NO_REQUESTS, {0.0: 0.0, 50.0: 7.0, 120.0: 7.0}, None)] == [7]


@pytest.mark.parametrize(
    ("counter", "request_end"),
    [
        ({}, 30),
        ({65.0: 60.0, 100.0: 60.0, 170.0: 60.0, 230.0: 60.0}, 30),
        ({65.0: 60.0, 80.0: 61.0, 88.0: 61.0}, 30),
        ({65.0: 60.0, 100.0: 61.0, 170.0: 61.0}, 90),
    ],
    ids=["not scraped", "nothing finished", "spans may be on their way", "it arrived before and ended after"],
)
def test_otherwise_nothing_is_missing(tmp_path: Path, counter: dict[float, float], request_end: float) -> None:
    assert found(tmp_path, ended(request_end, 20), counter, 60) == ()
