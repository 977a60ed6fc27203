"""The lake: exactly-once appends, what readers see, what is refused."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from lake_rows import NOON, random_requests, request, requests, rows
from vllm_slo.analytics import parquet
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.lake import CommitConflict, Lake
from vllm_slo.analytics.query import connect, run
from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.schema import EVENTS, REQUESTS, TABLES


@pytest.fixture(params=["folder", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "lake") if request.param == "folder" else f"file://{tmp_path}/lake"


def _everything(lake: Lake, table: str = "requests") -> pa.Table:
    lake.refresh(table)
    return lake.read(table, lake.data_files(table))


def test_rows_come_back_unchanged_and_in_order_of_time(place: str) -> None:
    lake = Lake.open(place)
    given = random_requests(500, seed=1)
    assert lake.append("requests", given)
    assert _everything(lake).equals(given.take(pa.array(_order(given))))


def _order(table: pa.Table) -> list[int]:
    times = table["start_time"].to_pylist()
    return sorted(range(len(times)), key=times.__getitem__)


def test_any_reader_of_delta_and_duckdb_see_the_same_rows(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    given = random_requests(300, seed=2)
    lake.append("requests", given)
    through_delta = pa.table(DeltaTable(tmp_path / "requests").scan().read_all())
    assert sorted(through_delta["request_id"].to_pylist()) == sorted(given["request_id"].to_pylist())
    assert (
        through_delta["decode_seconds"].to_pylist() == _sorted_like(through_delta, given)["decode_seconds"].to_pylist()
    )
    files = lake.files("requests")
    assert all(Path(file).is_file() for file in files)
    with duckdb.connect() as connection:
        connection.execute(f"select sum(decode_seconds), min(day) from read_parquet({files}, hive_partitioning = true)")
        [(total, day)] = connection.fetchall()
    assert total == sum(v for v in given["decode_seconds"].to_pylist() if v is not None)
    assert str(day) == "2026-11-30"


def _sorted_like(reference: pa.Table, table: pa.Table) -> pa.Table:
    places = {key: place for place, key in enumerate(table["span_id"].to_pylist())}
    return table.take(pa.array([places[key] for key in reference["span_id"].to_pylist()]))


def test_a_number_of_a_writer_enters_once(place: str) -> None:
    lake = Lake.open(place)
    assert lake.applied("requests", "spool") is None
    assert lake.append("requests", requests(range(3)), ("spool", 0))
    assert not lake.append("requests", requests(range(3)), ("spool", 0))
    assert lake.append("requests", requests(range(3, 5)), ("spool", 7))
    assert not lake.append("requests", requests(range(9)), ("spool", 6))
    assert lake.append("requests", requests(range(5, 6)), ("other", 0))
    assert (lake.applied("requests", "spool"), lake.applied("requests", "other")) == (7, 0)
    assert Lake.open(place).applied("requests", "spool") == 7
    assert _everything(lake).num_rows == 6


def test_writers_are_remembered_after_checkpoints_and_log_clean_up(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    for number in range(45):
        lake.append("requests", requests([number]), ("spool", number))

    def clean(handle: DeltaTable) -> None:
        handle.alter.set_table_properties({"delta.logRetentionDuration": "interval 0 days"})
        handle.update_incremental()
        handle.create_checkpoint()
        handle.cleanup_metadata()

    lake.with_handle("requests", clean)
    log = tmp_path / "requests" / "_delta_log"
    assert not (log / f"{0:020d}.json").exists()
    again = Lake.open(tmp_path)
    assert again.applied("requests", "spool") == 44
    assert not again.append("requests", requests([44]), ("spool", 44))
    assert _everything(again).num_rows == 45


def test_rows_of_two_days_become_two_partitions_in_one_commit(place: str) -> None:
    lake = Lake.open(place)
    before = lake.refresh("requests")
    lake.append("requests", requests([1, 2 * 86_400]), ("spool", 1))
    files = lake.data_files("requests") if lake.refresh("requests") == before + 1 else []
    assert [dict(file.partition)["day"] for file in files] == ["2026-11-30", "2026-12-02"]
    assert {file.writer for file in files} == {("spool", 1)}
    assert [(file.rows, file.low) for file in files] == [
        (1, NOON + timedelta(seconds=1)),
        (1, NOON + timedelta(days=2)),
    ]


def test_an_empty_table_commits_only_the_number(place: str) -> None:
    lake = Lake.open(place)
    assert lake.append("requests", requests([]), ("spool", 4))
    assert (lake.applied("requests", "spool"), lake.files("requests")) == (4, [])


def test_tables_without_partitions_work_the_same(place: str) -> None:
    lake = Lake.open(place)
    event = {"event_id": "e", "time": NOON, "kind": "note", "title": "t", "source": "command"}
    lake.append("events", rows(EVENTS, [event]))
    assert _everything(lake, "events").to_pylist()[0]["title"] == "t"


def test_a_second_lake_sees_commits_of_the_first(place: str) -> None:
    first, second = Lake.open(place), Lake.open(place, create=False)
    first.append("requests", requests(range(4)))
    assert len(second.files("requests")) == 1
    first.append("requests", requests(range(4, 6)))
    assert second.table_stats()["requests"].rows == 6


def test_what_was_checked_must_still_hold_when_rows_enter(place: str) -> None:
    first, second = Lake.open(place), Lake.open(place)
    seen_by_first, seen_by_second = first.refresh("requests"), second.refresh("requests")
    second.append("requests", requests([1]), ("b", 1), alone="dedup", checked_version=seen_by_second)
    with pytest.raises(CommitConflict):
        first.append("requests", requests([1]), ("a", 1), alone="dedup", checked_version=seen_by_first)
    assert _everything(first).num_rows == 1
    orphans = _parquet_files(place) - {Path(uri.removeprefix("file://")) for uri in first.files("requests")}
    assert orphans == set()


def _parquet_files(place: str) -> set[Path]:
    return set(Path(place.removeprefix("file://"), "requests").rglob("*.parquet")) - set(
        Path(place.removeprefix("file://"), "requests", "_delta_log").glob("*")
    )


def test_threads_share_one_lake(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    failures: list[BaseException] = []

    def write(name: str) -> None:
        try:
            for number in range(10):
                lake.append("requests", requests([number]), (name, number))
                lake.files("requests")
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert lake.table_stats()["requests"].rows == 30


def test_stats_count_rows_files_and_bytes(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    assert lake.table_stats()["spans"].last_commit is None
    lake.append("requests", requests(range(10)))
    lake.append("requests", requests(range(10, 15)))
    stats = lake.table_stats()["requests"]
    assert (stats.rows, stats.files, stats.version) == (15, 2, 2)
    assert stats.size_bytes == sum(os.path.getsize(file) for file in lake.files("requests"))
    assert stats.last_commit is not None
    assert abs(stats.last_commit - datetime.now(UTC)) < timedelta(minutes=1)


def test_files_hold_no_partition_column_and_pack_durations_as_integers(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    lake.append("requests", requests(range(10)))
    schema = pq.read_metadata(lake.files("requests")[0]).schema
    columns = {schema.column(i).name: schema.column(i).physical_type for i in range(len(schema.names))}
    assert "day" not in columns
    assert columns["decode_seconds"] == "INT64"


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "locked"
    folder.mkdir()
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    yield folder
    folder.chmod(stat.S_IRWXU)


def test_opening_to_read_writes_nothing(tmp_path: Path) -> None:
    Lake.open(tmp_path).append("requests", requests(range(3)))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    reader = Lake.open(tmp_path, create=False)
    reader.files("requests")
    reader.table_stats()
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    with pytest.raises(SloError, match="opened for reading"):
        reader.append("requests", requests([9]))


def test_a_missing_lake_is_not_made_by_a_reader(tmp_path: Path) -> None:
    with pytest.raises(SloError, match=r"no lake here.*--lake"):
        Lake.open(tmp_path / "lake", create=False)
    assert not (tmp_path / "lake").exists()
    with pytest.raises(SloError, match=r"no lake here.*--lake"):
        Lake.open(f"file://{tmp_path}/lake", create=False)


def test_a_file_cannot_be_a_lake(tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("x")
    for create in (True, False):
        with pytest.raises(SloError, match=r"is a file; a lake is a folder"):
            Lake.open(tmp_path / "lake", create=create)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_without_permission_says_so(locked: Path) -> None:
    with pytest.raises(SloError, match="cannot be made"):
        Lake.open(locked / "lake")


def test_a_broken_log_names_the_table_and_the_cure(tmp_path: Path) -> None:
    Lake.open(tmp_path)
    (tmp_path / "spans" / "_delta_log" / f"{0:020d}.json").write_text('{"protocol')
    with pytest.raises(SloError, match=r"spans: the table cannot be read: .*restore .*_delta_log from a backup"):
        Lake.open(tmp_path, create=False)


def test_a_lake_with_one_table_removed_is_refused_to_readers(tmp_path: Path) -> None:
    Lake.open(tmp_path)
    shutil.rmtree(tmp_path / "rollups")
    with pytest.raises(SloError, match="no table `rollups`"):
        Lake.open(tmp_path, create=False)
    assert Lake.open(tmp_path).files("rollups") == []


def test_a_delta_table_of_somebody_else_is_not_touched(tmp_path: Path) -> None:
    DeltaTable.create(tmp_path / "requests", schema=pa.schema([("x", pa.int64())]))
    with pytest.raises(SloError, match="did not make"):
        Lake.open(tmp_path)
    assert not (tmp_path / "spans").exists()


def test_an_unusable_url_names_what_is_allowed() -> None:
    with pytest.raises(SloError, match=r"nosuch://"):
        Lake.open("nosuch://bucket/lake")


def test_rows_without_a_column_are_refused(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    with pytest.raises(SloError, match="lack model"):
        lake.append("requests", requests([1]).drop_columns(["model"]))


def test_a_name_that_cannot_be_a_writer_is_refused(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    with pytest.raises(SloError, match="application id"):
        lake.append("requests", requests([1]), ("a/b", 1))


def test_every_table_of_the_schema_is_there(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    for table in TABLES:
        stored = DeltaTable(tmp_path / table.name)
        assert [field.name for field in stored.schema().fields] == table.schema.names
        assert stored.metadata().partition_columns == list(table.partition_by)
    assert lake.tables["requests"] is REQUESTS


def test_what_an_append_wrote_is_on_disk_folders_too(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake.open(place)
    synced: set[str] = set()
    fsync = os.fsync

    def remember(descriptor: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", remember)
    lake.append("requests", requests(range(1)))
    (file,) = lake.files("requests")
    data = Path(file.removeprefix("file://"))
    table = data.parent.parent
    log = table / "_delta_log"
    assert {str(path) for path in (data, data.parent, table, log, log / f"{1:020d}.json")} <= synced


def test_a_write_that_fails_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake.open(tmp_path)
    two_days = requests([0, 86_400])
    write = parquet.write
    done: list[str] = []

    def fill(filesystem: object, path: str, *arguments: object) -> int:
        size = write(filesystem, path, *arguments)  # type: ignore[arg-type]
        done.append(path)
        if len(done) == 2:
            raise OSError(28, "No space left on device")
        return size

    monkeypatch.setattr(parquet, "write", fill)
    with pytest.raises(OSError, match="No space"):
        lake.append("requests", two_days, ("spool", 1))
    assert len(done) == 2
    assert not list(tmp_path.rglob("*.parquet"))
    monkeypatch.undo()
    assert lake.append("requests", two_days, ("spool", 1))


def test_times_before_1970_and_far_ahead_are_kept(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    odd = [datetime(1960, 1, 1, tzinfo=UTC), datetime(2262, 1, 1, tzinfo=UTC)]
    lake.append("requests", rows(REQUESTS, [request(i, start_time=t, day=NOON.date()) for i, t in enumerate(odd)]))
    assert _everything(lake)["start_time"].to_pylist() == odd
    assert [(f.low, f.high) for f in lake.data_files("requests")] == [tuple(odd)]


def test_a_table_that_vanishes_is_an_error_not_an_empty_answer(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    lake.append("requests", requests([1]))
    shutil.rmtree(tmp_path / "requests")
    with pytest.raises(SloError, match="the table is gone"):
        lake.files("requests")


def test_a_reader_idle_for_longer_than_the_log_is_kept_catches_up(tmp_path: Path) -> None:
    writer, reader = Lake.open(tmp_path), Lake.open(tmp_path, create=False)
    for number in range(30):
        writer.append("requests", requests([number]), ("spool", number))

    def clean(handle: DeltaTable) -> None:
        handle.create_checkpoint()
        for entry in (tmp_path / "requests" / "_delta_log").glob("*.json"):
            if int(entry.stem) < handle.version():
                entry.unlink()

    writer.with_handle("requests", clean)
    assert len(reader.files("requests")) == 30


def test_columns_that_no_row_fills_are_in_no_file_and_null_for_every_reader(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    lake.append("requests", requests(range(3)))
    lake.append("requests", requests([3], records="engine", lora="x"))
    lake.refresh("requests")
    narrow, wide = lake.data_files("requests")
    newer = {c.name for c in REQUESTS.columns if c.since > 1}
    assert not newer & set(pq.read_schema(narrow.uri).names)
    assert newer & set(pq.read_schema(wide.uri).names) == {"records", "lora"}
    assert lake.read("requests", [narrow, wide])["lora"].to_pylist() == [None, None, None, "x"]
    assert sorted(pa.table(DeltaTable(tmp_path / "requests").scan().read_all())["lora"].to_pylist(), key=repr) == [
        "x",
        None,
        None,
        None,
    ]
    with connect(lake, Buckets()) as connection:
        sql = "select count(lora) named, count(draft_tokens) drafts, sum(queue_unknown_seconds) unknown from requests"
        assert run(connection, sql, 60).to_pylist() == [{"named": 1, "drafts": 0, "unknown": Decimal("0.8")}]
    merged = lake.replace("requests", [narrow, wide], lake.read("requests", [narrow, wide]), same_rows=True)
    assert lake.read("requests", merged)["records"].to_pylist() == [None, None, None, "engine"]


def test_rows_must_have_the_columns_of_the_first_version(tmp_path: Path) -> None:
    with pytest.raises(SloError, match="lack decode_seconds"):
        Lake.open(tmp_path).append("requests", requests([1]).drop_columns(["decode_seconds"]))
