"""Extent, freshness, coverage, events and engine load of a selection, on small lakes and on recordings."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from fixtures.latency_lake import BUCKETS, NOON, Request, fill, recorded, traffic
from vllm_slo.analytics import events
from vllm_slo.analytics.coverage import coverage
from vllm_slo.analytics.engine_series import engine_series, engine_step
from vllm_slo.analytics.extent import extent
from vllm_slo.analytics.health import freshness
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.marks import marks
from vllm_slo.analytics.query import connect
from vllm_slo.analytics.selection import Selection
from vllm_slo.exporters.schema import ENGINE_SAMPLES

HOUR = Selection.around(NOON, NOON + timedelta(hours=1))


def samples(values: list[tuple[int, float | None]], instance: str = "a", running: float = 1.0) -> pa.Table:
    """Engine samples: seconds after noon, and the counter of finished requests."""
    rows = [
        {
            "day": NOON.date(),
            "time": NOON + timedelta(seconds=second),
            "source": "scrape",
            "service_instance_id": instance,
            "shard": instance,
            "model": "m",
            "engine": "0",
            "requests_running": running * (i + 1),
            "requests_finished_total": finished,
        }
        for i, (second, finished) in enumerate(values)
    ]
    return pa.Table.from_pylist(rows, schema=ENGINE_SAMPLES.schema)


def finished_at(seconds: list[float], shard: str = "a") -> list[Request]:
    tick = Request().request_duration
    return [
        Request(at=NOON + timedelta(seconds=s) - timedelta(microseconds=tick // 1000), shard=shard) for s in seconds
    ]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory: pytest.TempPathFactory, captures: Path) -> duckdb.DuckDBPyConnection:
    return connect(recorded(tmp_path_factory.mktemp("recorded"), captures), BUCKETS)


def test_the_extent_is_that_of_plausible_times_and_lists_every_value(tmp_path: Path) -> None:
    requests = traffic(500, seed=2)
    far = Request(at=datetime(2099, 1, 1, tzinfo=UTC), quality="clock_skew", model="skewed")
    found = extent(connect(fill(tmp_path, [*requests, far], commits=2), BUCKETS))
    assert found is not None
    assert found.start == min(r.at for r in requests).replace(second=0, microsecond=0)
    assert found.end == max(r.at for r in requests).replace(second=0, microsecond=0) + timedelta(minutes=1)
    assert found.models == ("m", "n")
    assert found.shards == ("a", "b", None)
    assert found.buckets == ("long", "short", None)


def test_an_empty_lake_has_no_extent(tmp_path: Path) -> None:
    assert extent(connect(Lake.open(tmp_path), BUCKETS)) is None


def test_freshness_is_the_newest_request_and_its_receipt(tmp_path: Path) -> None:
    connection = connect(fill(tmp_path, [Request(), Request(at=NOON + timedelta(seconds=50))]), BUCKETS)
    found = freshness(connection, NOON + timedelta(minutes=1))
    assert found is not None
    assert found.last_start == NOON + timedelta(seconds=50)
    assert found.last_received > found.last_start + timedelta(seconds=5)
    assert freshness(connection, NOON) is None


def test_coverage_compares_what_ended_between_the_first_and_the_last_scrape(tmp_path: Path) -> None:
    lake = fill(tmp_path, finished_at([1, 5, 11, 15, 29]))
    lake.append("engine_samples", samples([(0, 7.0), (10, 9.0), (20, 13.0)]))
    (found,) = coverage(connect(lake, BUCKETS), HOUR)
    assert (found.instance, found.received, found.finished, found.covered) == ("a", 4, 6, 4)
    assert (found.since, found.until) == (NOON, NOON + timedelta(seconds=20))


def test_the_extent_of_days_without_minutes_ends_with_their_last_hour(tmp_path: Path) -> None:
    lake = fill(tmp_path, [Request(at=NOON), Request(at=NOON + timedelta(hours=5, minutes=40))])
    lake.refresh("rollups")
    minutes = [file for file in lake.data_files("rollups") if ("level", "minute") in file.partition]
    lake.replace("rollups", minutes, None, same_rows=False)
    found = extent(connect(lake, BUCKETS))
    assert found is not None
    assert (found.start, found.end) == (NOON, NOON + timedelta(hours=6))


def test_a_restart_between_scrapes_never_gives_a_negative_count(tmp_path: Path) -> None:
    lake = fill(tmp_path, finished_at([1, 5, 15, 25]))
    lake.append("engine_samples", samples([(0, 100.0), (10, 102.0), (20, 1.0), (30, None), (40, 2.0)]))
    (found,) = coverage(connect(lake, BUCKETS), HOUR)
    assert (found.received, found.finished) == (4, 2 + 1 + 1)


def test_coverage_is_unknown_where_nothing_was_scraped_and_never_over_all(tmp_path: Path) -> None:
    lake = fill(tmp_path, [*finished_at([1, 2]), *finished_at([1, 2, 3], "b"), *finished_at([4], "c")])
    lake.append("engine_samples", samples([(0, 0.0), (10, 2.0)], "b"))
    lake.append("engine_samples", samples([(0, 0.0)], "c"))
    found = {c.instance: c for c in coverage(connect(lake, BUCKETS), HOUR)}
    assert [(found[i].finished, found[i].covered) for i in "abc"] == [(None, None), (2, 2), (None, None)]


def test_every_request_of_the_recordings_is_covered(recordings: duckdb.DuckDBPyConnection) -> None:
    whole = extent(recordings)
    assert whole is not None
    found = coverage(recordings, Selection.around(whole.start, whole.end))
    assert [c.instance for c in found] == ["general-0", "general-1", "long-0", "short-0"]
    for c in found:
        assert c.finished is not None
        assert c.finished > 100
        assert c.covered == c.finished
        assert abs(c.received - c.finished) <= 5


def test_events_are_those_that_touch_the_range_and_concern_the_selection(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    minute = timedelta(minutes=1)
    rows = [
        events.row("deploy", "before", NOON - minute),
        events.row("exclusion", "reaches into it", NOON - minute, end_time=NOON + minute),
        events.row("deploy", "for all", NOON + minute),
        events.row("note", "for a", NOON + 2 * minute, shard="a"),
        events.row("note", "for b", NOON + 3 * minute, shard="b"),
        events.row("deploy", "after", NOON + 61 * minute),
    ]
    events.add(lake, events.table(rows))
    connection = connect(lake, BUCKETS)
    assert [m.title for m in marks(connection, HOUR)] == ["reaches into it", "for all", "for a", "for b"]
    only_a = Selection(HOUR.start, HOUR.end, shards=("a",))
    assert [m.title for m in marks(connection, only_a)] == ["reaches into it", "for all", "for a"]
    assert [m.title for m in marks(connection, HOUR, most=1)] == ["for b"]


def test_engine_gauges_are_means_of_a_step_and_none_without_a_sample(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    lake.append("engine_samples", samples([(0, 1.0), (10, 1.0), (40, 1.0)]))
    lake.append("engine_samples", samples([(70, 1.0)], "b", running=8.0))
    connection = connect(lake, BUCKETS)
    selection = Selection.around(NOON, NOON + timedelta(minutes=2))
    a, b = engine_series(connection, selection, timedelta(seconds=30))
    assert (a.name, a.values["requests_running"]) == ("a", (1.5, 3.0, None, None))
    assert (b.name, b.values["requests_running"]) == ("b", (None, None, 8.0, None))
    assert a.values["requests_waiting"] == (None,) * 4


def test_the_step_of_engines_is_no_finer_than_their_scrapes(recordings: duckdb.DuckDBPyConnection) -> None:
    whole = extent(recordings)
    assert whole is not None
    selection = Selection.around(whole.start, whole.end)
    assert engine_step(recordings, selection, timedelta(seconds=10)) == timedelta(seconds=30)
    assert engine_step(recordings, selection, timedelta(minutes=5)) == timedelta(minutes=5)
