"""Maintenance changes files, never answers, and disturbs neither readers nor the writer."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lake_rows import NOON, random_requests, requests, samples, spans
from vllm_slo.analytics import rollup
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.datafile import DataFile
from vllm_slo.analytics.drain import Drain
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.maintenance import Maintenance, MaintenanceSettings, Report, groups
from vllm_slo.analytics.parquet import SOURCES
from vllm_slo.analytics.settings import RetentionSettings

BUCKETS = Buckets()
DAY = timedelta(days=1)
AT_ONCE = MaintenanceSettings(grace=timedelta(0), tidy_interval=timedelta(0))


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.open(tmp_path / "lake")


def _run(lake: Lake, settings: MaintenanceSettings | None = None, now: datetime = NOON + DAY) -> Report:
    return Maintenance(lake, settings or MaintenanceSettings(), lambda: now).run_once()


def _rows(lake: Lake, table: str = "requests") -> list[dict[str, Any]]:
    lake.refresh(table)
    return sorted(lake.read(table, lake.data_files(table)).to_pylist(), key=repr)


def _drained(lake: Lake, segments: int, size: int = 30) -> None:
    drain = Drain(lake, BUCKETS)
    for number in range(segments):
        drain.apply(
            "spool",
            number,
            {"requests": random_requests(size, number), "spans": spans(range(number * 10, number * 10 + 5))},
        )


def test_a_day_that_is_over_becomes_one_file_with_the_same_rows(lake: Lake) -> None:
    _drained(lake, 5)
    before = _rows(lake)
    report = _run(lake)
    assert _rows(lake) == before
    stats = lake.table_stats()
    assert (stats["requests"].files, stats["spans"].files, stats["rollups"].files) == (1, 1, 3)
    assert report.merges == 5
    assert _run(lake).merges == 0


def test_a_merged_file_is_in_order_of_time_and_names_its_sources(lake: Lake) -> None:
    _drained(lake, 4)
    lake.refresh("requests")
    sources = {file.path for file in lake.data_files("requests")}
    _run(lake)
    [path] = lake.files("requests")
    times = pq.read_table(path, columns=["start_time"])["start_time"].to_pylist()
    assert times == sorted(times)
    metadata = pq.read_metadata(path).metadata
    assert set(metadata[SOURCES.encode()].decode().split("\n")) == sources


def test_today_is_merged_only_in_full_hands_of_one_size(lake: Lake) -> None:
    _drained(lake, 7)
    assert _run(lake, now=NOON).merges == 0
    _drained_more = random_requests(30, seed=70)
    Drain(lake, BUCKETS).apply("spool", 70, {"requests": _drained_more})
    _run(lake, now=NOON)
    assert lake.table_stats()["requests"].files == 1


def _file(size: int, minute: int = 0) -> DataFile:
    at = NOON + timedelta(minutes=minute)
    return DataFile(f"{minute}", f"{minute}", size, 1, (("day", "2026-11-30"),), at, at)


def test_files_of_different_sizes_wait_for_their_like() -> None:
    settings = MaintenanceSettings(fan_in=4, target_bytes=1 << 20)
    small, larger = [_file(1000, m) for m in range(3)], [_file(200_000, m) for m in range(3, 6)]
    assert groups(small + larger, settings, over=False) == []
    small.append(_file(1000, 9))
    assert groups(small + larger, settings, over=False) == [small]
    assert groups(small + larger, settings, over=True) == [small + larger]


def test_files_near_the_target_are_left_alone_and_groups_stop_at_it() -> None:
    settings = MaintenanceSettings(fan_in=4, target_bytes=1000)
    full, small = [_file(600, m) for m in range(9)], [_file(300, m) for m in range(9, 18)]
    assert groups(full, settings, over=True) == []
    assert [len(group) for group in groups(small, settings, over=True)] == [3, 3, 3]


def test_an_hour_of_a_merged_day_reads_few_row_groups(lake: Lake) -> None:
    """600,000 rows in 24 appends, each spread over two and a half hours."""
    one, size = requests([1]), 25_000
    midnight = int(NOON.replace(hour=0).timestamp() * 1e6)
    chance = np.random.default_rng(1)
    for hour in range(24):
        times = midnight + hour * 3_400_000_000 + chance.integers(0, 9_000_000_000 if hour < 22 else 10**9, size)
        rows = one.take(pa.array(np.zeros(size, dtype=np.int64)))
        for name in ("start_time", "end_time"):
            place = rows.schema.get_field_index(name)
            rows = rows.set_column(place, rows.schema.field(place), pa.array(times).cast(pa.timestamp("us", "UTC")))
        lake.append("requests", rows)
    _run(lake)
    low, high = NOON.replace(hour=10), NOON.replace(hour=11)
    touched = total = 0
    for path in lake.files("requests"):
        metadata = pq.read_metadata(path)
        place = metadata.schema.names.index("start_time")
        for group in range(metadata.num_row_groups):
            statistics = metadata.row_group(group).column(place).statistics
            total += 1
            touched += statistics.min < high and statistics.max >= low
    assert total >= 6
    assert touched <= 2


def test_rollups_of_many_commits_are_summed(lake: Lake) -> None:
    drain = Drain(lake, BUCKETS)
    for number in range(6):
        drain.apply("spool", number, {"requests": requests(range(number * 10, number * 10 + 10))})
    before = lake.table_stats()["rollups"].rows
    stored = rollup.merge(pa.Table.from_pylist(_rows(lake, "rollups"), schema=lake.tables["rollups"].schema))
    report = _run(lake)
    after = lake.table_stats()["rollups"].rows
    assert after == stored.num_rows < before
    assert report.rollup_rows_summed == before - after
    assert _rows(lake, "rollups") == sorted(stored.to_pylist(), key=repr)


class Interrupted(Lake):
    """A lake in which something else happens just before the next commit."""

    meanwhile: Callable[[], None] | None = None

    def _commit(self, *given: Any) -> None:
        if self.meanwhile is not None:
            action, self.meanwhile = self.meanwhile, None
            action()
        super()._commit(*given)


def test_an_append_just_before_the_commit_of_a_merge_is_kept(tmp_path: Path) -> None:
    lake = Interrupted.open(tmp_path)
    assert isinstance(lake, Interrupted)
    _drained(lake, 5)
    other = Lake.open(tmp_path)
    before = _rows(lake)
    late = requests(range(500, 510))
    lake.meanwhile = lambda: None if other.append("requests", late, ("other", 1)) else pytest.fail("not appended")
    report = _run(lake)
    assert (report.conflicts, report.merges > 0) == (0, True)
    assert _rows(lake) == sorted([*before, *late.to_pylist()], key=repr)


def test_of_two_merges_of_the_same_files_one_wins_and_no_row_is_lost(tmp_path: Path) -> None:
    lake = Interrupted.open(tmp_path)
    assert isinstance(lake, Interrupted)
    _drained(lake, 5)
    before = {name: _rows(lake, name) for name in ("requests", "spans")}
    other = Lake.open(tmp_path)

    def meanwhile() -> None:
        _run(other)

    lake.meanwhile = meanwhile
    assert _run(lake).conflicts >= 1
    assert {name: _rows(lake, name) for name in ("requests", "spans")} == before
    assert _run(lake).conflicts == 0


def test_maintenance_all_the_time_beside_a_writer_and_a_reader(tmp_path: Path) -> None:
    writer, reader = Lake.open(tmp_path), Lake.open(tmp_path, create=False)
    stop = threading.Event()
    failures: list[BaseException] = []
    counts: list[int] = []

    def guarded(action: Callable[[], None]) -> threading.Thread:
        def loop() -> None:
            try:
                while not stop.is_set():
                    action()
            except BaseException as error:  # noqa: BLE001 - shown by the assertion below
                failures.append(error)

        thread = threading.Thread(target=loop)
        thread.start()
        return thread

    def read() -> None:
        if files := reader.files("requests"):
            with duckdb.connect() as connection:
                connection.execute(f"select count(*) from read_parquet({files})")
                [(count,)] = connection.fetchall()
            counts.append(count)

    often = MaintenanceSettings(fan_in=2, tidy_interval=timedelta(0))
    maintenance = Maintenance(Lake.open(tmp_path), often, lambda: NOON)
    threads = [guarded(read), guarded(lambda: maintenance.run_once() and None)]
    try:
        _drained(writer, 40)
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert failures == []
    assert counts == sorted(counts)
    assert len(_rows(writer)) == 1200
    stored = rollup.merge(pa.Table.from_pylist(_rows(writer, "rollups"), schema=writer.tables["rollups"].schema))
    expected = rollup.merge(
        rollup.rows(pa.Table.from_pylist(_rows(writer), schema=writer.tables["requests"].schema), BUCKETS)
    )
    assert stored.to_pylist() == expected.to_pylist()


def test_a_reader_with_an_older_list_of_files_goes_on_for_the_grace_period(lake: Lake) -> None:
    _drained(lake, 5)
    held = lake.files("requests")
    _run(lake)
    assert lake.files("requests") != held
    with duckdb.connect() as connection:
        connection.execute(f"select count(*) from read_parquet({held})")
        assert connection.fetchall() == [(150,)]
    report = _run(lake, AT_ONCE)
    assert report.files_vacuumed >= 5
    assert not any(Path(path).exists() for path in held)
    assert len(_rows(lake)) == 150


def test_files_of_a_writer_that_died_before_its_commit_go_after_the_grace_period(lake: Lake, tmp_path: Path) -> None:
    _drained(lake, 1)
    folder = Path(lake.files("requests")[0]).parent
    old, new = (
        folder / "part-x-0000000001-0000000000000000.parquet",
        folder / "part-x-0000000002-1111111111111111.parquet",
    )
    for path in (old, new):
        path.write_bytes(b"x")
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    _run(lake)
    assert (old.exists(), new.exists()) == (False, True)


def test_old_log_entries_go_and_the_lake_opens_from_the_checkpoint(lake: Lake) -> None:
    _drained(lake, 30)
    log = Path(lake.path, "requests", "_delta_log")
    three_days_ago = time.time() - 3 * 86_400
    for entry in log.glob("*.json"):
        os.utime(entry, (three_days_ago, three_days_ago))
    before = len(list(log.glob("*.json")))
    _run(lake, AT_ONCE)
    assert len(list(log.glob("*.json"))) < before / 2
    again = Lake.open(lake.path)
    assert (again.applied("requests", "spool"), len(_rows(again))) == (29, 900)


def test_vacuum_and_log_clean_up_run_once_an_interval(lake: Lake) -> None:
    clock = [NOON]
    maintenance = Maintenance(lake, MaintenanceSettings(), lambda: clock[0])
    tidied = []
    for minutes in (0, 5, 10, 12):
        clock[0] = NOON + timedelta(minutes=minutes)
        tidied.append(maintenance.run_once().tables_tidied)
    assert tidied == [5, 0, 5, 0]


def test_rows_leave_when_their_days_are_over(lake: Lake) -> None:
    today = NOON
    drain = Drain(lake, BUCKETS)
    for age in (0, 1, 2, 3):
        at = today - age * DAY
        drain.apply("spool", age, {"requests": random_requests(5, age, start=at.replace(hour=1))})
        lake.append("spans", spans([age], start_time=at, day=at.date()))
        lake.append("engine_samples", samples([("a", -age * 86_400, 1.0)]))
    retention = RetentionSettings(
        requests_days=2, spans_days=1, engine_samples_days=0, rollups_minute_days=0, rollups_hour_days=1
    )
    report = _run(lake, MaintenanceSettings(retention=retention), now=today)

    def days(table: str) -> list[date]:
        lake.refresh(table)
        return sorted({date.fromisoformat(dict(f.partition)["day"]) for f in lake.data_files(table)}, reverse=True)

    assert len(days("requests")) == 3
    assert len(days("spans")) == 2
    assert days("engine_samples") == [today.date()]
    levels: dict[str, int] = {}
    for file in lake.data_files("rollups"):
        level = dict(file.partition)["level"]
        levels[level] = levels.get(level, 0) + 1
    assert levels == {"minute": 1, "hour": 2, "day": 4}
    assert report.days_dropped == 1 + 2 + 3 + 3 + 2
    assert report.rows_dropped > 10


def test_over_the_size_limit_the_oldest_days_go_first_and_today_stays(lake: Lake) -> None:
    for age in range(4):
        at = NOON - age * DAY
        lake.append("requests", requests(range(age * 100, age * 100 + 100), start_time=at, day=at.date()))
    total = sum(stats.size_bytes for stats in lake.table_stats().values())
    limit = MaintenanceSettings(retention=RetentionSettings(total_bytes=total * 6 // 10))
    _run(lake, limit, now=NOON)
    lake.refresh("requests")
    assert [dict(f.partition)["day"] for f in lake.data_files("requests")] == ["2026-11-29", "2026-11-30"]
    tight = MaintenanceSettings(retention=RetentionSettings(total_bytes=1))
    report = _run(lake, tight, now=NOON)
    lake.refresh("requests")
    assert [dict(f.partition)["day"] for f in lake.data_files("requests")] == ["2026-11-30"]
    assert report.bytes_over_limit == sum(s.size_bytes for s in lake.table_stats().values()) - 1


def test_files_whose_rollups_are_not_in_yet_are_left_alone(lake: Lake) -> None:
    for number in range(3):
        lake.append("requests", requests([number]), ("spool", number))
    lake.append("rollups", rollup.rows(requests([0]), BUCKETS), ("spool", 0))
    report = _run(lake, MaintenanceSettings(retention=RetentionSettings(requests_days=0)), now=NOON + 5 * DAY)
    assert report.rows_dropped == 1
    assert len(_rows(lake)) == 2


def test_events_are_merged_though_they_have_no_day(lake: Lake) -> None:
    event = {
        "event_id": "e",
        "time": datetime(2026, 1, 1, tzinfo=UTC),
        "kind": "note",
        "title": "t",
        "source": "command",
    }
    for number in range(8):
        row = {**event, "event_id": str(number)}
        lake.append("events", pa.Table.from_pylist([row], schema=lake.tables["events"].schema))
    _run(lake)
    assert (lake.table_stats()["events"].files, len(_rows(lake, "events"))) == (1, 8)


def test_the_same_work_is_done_on_a_url(tmp_path: Path) -> None:
    lake = Lake.open(f"file://{tmp_path}/lake")
    _drained(lake, 5)
    before = _rows(lake)
    _run(lake, AT_ONCE)
    assert _rows(lake) == before
    assert lake.table_stats()["requests"].files == 1
