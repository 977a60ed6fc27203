"""Reading the lake with SQL: what is seen, and that nothing else can be reached or changed."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.query import (
    QueryError,
    QueryTimeout,
    Reader,
    connect,
    run,
    stream,
)
from vllm_slo.analytics.settings import QuerySettings
from vllm_slo.analytics.statements import StatementError, check
from vllm_slo.analytics.views import files_sql, view_columns
from vllm_slo.exporters.schema import REQUESTS, TABLES, TEXT, Column, Table

SMALL = QuerySettings(memory_limit="256MiB", threads=1, timeout_seconds=30)
START = datetime(2026, 11, 30, 22, 0, tzinfo=UTC)


def request_rows(count: int, start: datetime = START, first: int = 0) -> pa.Table:
    """Requests a second apart, prompts of 1000, 2000, ... tokens."""
    rows: list[dict[str, Any]] = []
    for number in range(first, first + count):
        at = start + timedelta(seconds=number)
        rows.append(
            {
                "day": at.date(),
                "start_time": at,
                "end_time": at + timedelta(seconds=2),
                "received_time": at + timedelta(seconds=3),
                "request_id": f"r{number}",
                "trace_id": number.to_bytes(16, "big"),
                "span_id": (number + 1).to_bytes(8, "big"),
                "source": "stock",
                "shard": "a",
                "prompt_tokens": 1000 * (number + 1),
                "completion_tokens": 11,
                "time_to_first_token_seconds": Decimal("0.123456789"),
                "request_duration_seconds": Decimal("2.000000001"),
                "queue_seconds": Decimal("0.100000000"),
                "prefill_seconds": Decimal("0.020000000"),
                "decode_seconds": Decimal("1.800000000"),
            }
        )
    return pa.Table.from_pylist(rows, schema=REQUESTS.schema)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    made = Lake.open(tmp_path / "lake")
    made.append("requests", request_rows(40))
    return made


@pytest.fixture
def connection(lake: Lake) -> Iterator[duckdb.DuckDBPyConnection]:
    with connect(lake, Buckets(), SMALL) as opened:
        yield opened


def one(connection: duckdb.DuckDBPyConnection, sql: str) -> Any:
    """The one value of a query."""
    return run(connection, sql, 30).column(0)[0].as_py()


def digests(folder: Path) -> dict[str, str]:
    """Every file below a folder with its content."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def test_every_table_is_a_view_with_its_columns_whether_it_has_rows_or_not(
    connection: duckdb.DuckDBPyConnection,
) -> None:
    for table in TABLES:
        found = run(connection, f"from {table.name}", 30)
        assert tuple(found.column_names) == view_columns(table)
        for field in table.schema:
            if field.type != pa.binary() and not pa.types.is_timestamp(field.type):
                assert found.schema.field(field.name).type == field.type, field.name


def test_ids_are_hex_text_and_durations_exact(connection: duckdb.DuckDBPyConnection) -> None:
    row = run(connection, "from requests where request_id = 'r7'", 30).to_pylist()[0]
    assert row["trace_id"] == (7).to_bytes(16, "big").hex()
    assert row["span_id"] == (8).to_bytes(8, "big").hex()
    assert row["time_to_first_token_seconds"] == Decimal("0.123456789")
    assert row["frontend_seconds"] == Decimal("0.003456789")
    assert row["residual_seconds"] == Decimal("2.000000001") - Decimal("0.123456789") - Decimal("1.8")
    assert row["time_per_output_token_seconds"] == pytest.approx(0.18)
    assert row["start_time"] == START + timedelta(seconds=7)
    assert row["day"] == date(2026, 11, 30)


def test_the_bucket_follows_the_configuration_without_rewriting_rows(lake: Lake) -> None:
    sql = "select bucket, count(*)::bigint n from requests group by all order by all"
    with connect(lake, Buckets(), SMALL) as opened:
        found = {row["bucket"]: row["n"] for row in run(opened, sql, 30).to_pylist()}
        assert found == {"short": 4, "medium": 28, "long": 8}
    with connect(lake, Buckets((("it's tiny", 1000), ("rest", 2000))), SMALL) as opened:
        found = {row["bucket"]: row["n"] for row in run(opened, sql, 30).to_pylist()}
        assert found == {"it's tiny": 1, "rest": 39}


FORBIDDEN = {
    "read a file": "select * from read_csv('/etc/passwd')",
    "read a text": "select * from read_text('/etc/passwd')",
    "read by name": "select * from '/etc/passwd.csv'",
    "list files": "select * from glob('/etc/*')",
    "list the lake": "select * from glob('{lake}/**')",
    "read a live file raw": "select * from read_blob('{live}')",
    "read a link": "select * from read_text('{lake}/requests/link.parquet')",
    "a function in a subquery": "select (select count(*) from read_text('/etc/passwd'))",
    "a function in a query of text": "select * from query('from read_text(''/etc/passwd'')')",
    "an address": "select * from 'https://example.com/x.parquet'",
    "write a file": "copy (select 1) to '{out}'",
    "write into the lake": "copy (select 1 as a) to '{lake}/requests/new.parquet'",
    "overwrite a live file": "copy (select 1 as a) to '{live}' (format parquet, use_tmp_file false)",
    "overwrite within a select": (
        "with x as (copy (select 1 as a) to '{live}' (format parquet, use_tmp_file false)) select 1"
    ),
    "overwrite within an explain": (
        "explain analyze with x as (copy (select 1 as a) to '{live}' (format parquet, use_tmp_file false)) select 1"
    ),
    "explain a copy": "explain analyze copy (select 1 as a) to '{live}' (format parquet, use_tmp_file false)",
    "explain behind a comment": (
        "explain /* x */ analyze copy (select 1 as a) to '{live}' (format parquet, use_tmp_file false)"
    ),
    "explain with a comment among the options": (
        "explain (analyze /*) select 1 -- */) copy (select 1 as a) to '{live}' (format parquet, use_tmp_file false)"
    ),
    "explain with a line comment among the options": (
        "explain (analyze --) select 1 /*\n) copy (select 1 as a) to '{live}' (format parquet, use_tmp_file false) --*/"
    ),
    "explain with text among the options": (
        "explain (analyze, format ') select 1 --') copy (select 1 as a) to '{live}' (format parquet)"
    ),
    "explain an explain": "explain explain copy (select 1 as a) to '{live}' (format parquet, use_tmp_file false)",
    "a function within a lambda": "select list_transform([1], lambda x: (select max(size) from read_blob('{live}')))",
    "a function within a limit": "select 1 limit (select max(size) from read_blob('{live}'))",
    "a function within a window": "select sum(1) over (order by (select max(size) from read_blob('{live}')))",
    "a function of a schema": "select * from system.main.read_text('/etc/passwd')",
    "a table by its name as text": "from query_table('/etc/passwd')",
    "describe a file": "describe '/etc/passwd'",
    "delete within a select": "with x as (delete from requests returning *) from x",
    "a statement behind a zero byte": "select 1\0; copy (select 1) to '{out}'",
    "too deep to look through": "select " + "(select " * 400 + "1" + ")" * 400,
    "run serialized SQL": "select * from json_execute_serialized_sql('{{}}')",
    "attach": "attach '{out}' as other",
    "install": "install httpfs",
    "load": "load httpfs",
    "export": "export database '{out}'",
    "set": "set threads = 8",
    "reset": "reset threads",
    "pragma": "pragma threads = 8",
    "unlock": "set lock_configuration = false",
    "open the doors": "set enable_external_access = true",
    "log to a file": "call enable_logging(storage_path = '{out}')",
    "make a table": "create table t as select 1",
    "make a macro": "create macro f() as table select * from read_text('/etc/passwd')",
    "drop a view": "drop view requests",
    "insert within a select": "with x as (insert into requests select * from requests returning *) select * from x",
    "two statements": "select 1; drop view requests",
    "none": "-- nothing",
    "an environment variable": "select getenv('HOME')",
    "a Python variable": "select * from SMALL",
    "secrets": "create secret s (type s3)",
    "prepare": "prepare p as select 1",
    "variables": "set variable x = 1",
}


@pytest.mark.parametrize("attempt", FORBIDDEN)
def test_nothing_but_the_lake_can_be_read_and_nothing_written(
    attempt: str, lake: Lake, connection: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    live = lake.files("requests")[0]
    (Path(lake.path) / "requests" / "link.parquet").symlink_to("/etc/passwd")
    out = tmp_path / "out"
    before = digests(tmp_path)
    with pytest.raises((StatementError, QueryError)):
        run(connection, FORBIDDEN[attempt].format(lake=lake.path, live=live, out=out), 30)
    assert digests(tmp_path) == before
    assert not out.exists()
    assert one(connection, "select count(*) from requests") == 40


def test_the_connection_itself_is_locked_even_without_the_check(
    lake: Lake, connection: duckdb.DuckDBPyConnection, tmp_path: Path
) -> None:
    link = Path(lake.path) / "requests" / "link.parquet"
    link.symlink_to("/etc/passwd")
    for sql in (
        "select * from read_csv('/etc/passwd')",
        "select * from glob('/etc/*')",
        f"select * from read_text('{link}')",
        f"copy (select 1) to '{tmp_path}/out.csv'",
        f"copy (select 1) to '{lake.path}/requests/new.parquet'",
        f"attach '{tmp_path}/other.db'",
        "install httpfs",
        "load httpfs",
        "set enable_external_access = true",
        "set allowed_paths = ['/etc/passwd']",
        "set memory_limit = '100GB'",
    ):
        with pytest.raises(duckdb.Error):
            connection.execute(sql)


@pytest.mark.parametrize(
    "sql",
    [
        "select 1",
        "from requests limit 1",
        "with x as (from requests) select count(*) from x union all select 2",
        "with recursive t(n) as (select 1 union all select n + 1 from t where n < 5) select sum(n) from t",
        "pivot requests on source in ('stock') using count(*)",
        "describe requests",
        "summarize requests",
        "show tables",
        "explain select 1",
        "explain (format json) select 1",
        "explain analyze select count(*) from requests",
        "EXPLAIN (ANALYZE true, FORMAT json) select count(*) from requests",
        "select * from range(3) a, generate_series(1, 2) b, unnest([1, 2]) c",
        "select * from (values (1)) t(x)",
        "select quantile_cont(queue_seconds, [0.5, 0.99]) over () from requests qualify row_number() over () = 1",
        "select r.request_id from requests r asof join events e on r.start_time >= e.time",
    ],
)
def test_reading_statements_of_every_kind_run(sql: str, connection: duckdb.DuckDBPyConnection) -> None:
    check(connection, sql)
    run(connection, sql, 30)


def test_a_query_that_runs_too_long_is_stopped(connection: duckdb.DuckDBPyConnection) -> None:
    began = time.monotonic()
    with pytest.raises(QueryTimeout, match=r"ran longer than 0\.5 s and was stopped"):
        run(connection, "select sum(a.range * b.range) from range(10000000) a, range(10000000) b", 0.5)
    assert time.monotonic() - began < 10
    assert one(connection, "select 1") == 1


def test_a_query_that_needs_too_much_memory_is_refused(lake: Lake) -> None:
    tight = QuerySettings(memory_limit="50MiB", threads=1)
    with connect(lake, Buckets(), tight) as opened, pytest.raises(QueryError, match="Out of Memory"):
        run(opened, "select list(range order by hash(range)) from range(50000000)", 60)


def test_an_unknown_column_brings_the_nearest_names(connection: duckdb.DuckDBPyConnection) -> None:
    with pytest.raises(QueryError) as caught:
        run(connection, "select promt_tokens from requests", 30)
    assert "nearest to 'promt_tokens': requests.prompt_tokens" in str(caught.value)
    with pytest.raises(QueryError, match="views: requests, spans, engine_samples, events, rollups"):
        run(connection, "from request", 30)


def test_a_syntax_error_shows_the_place(connection: duckdb.DuckDBPyConnection) -> None:
    with pytest.raises(QueryError, match=r"syntax error at or near \"selec\""):
        run(connection, "selec 1", 30)


def test_a_limit_ends_the_stream(connection: duckdb.DuckDBPyConnection) -> None:
    with stream(connection, "from requests order by start_time", 30, limit=3) as result:
        assert result.read_all()["request_id"].to_pylist() == ["r0", "r1", "r2"]


def test_parameters_are_bound(connection: duckdb.DuckDBPyConnection) -> None:
    found = run(connection, "select count(*) from requests where start_time >= $1", 30, [START + timedelta(seconds=30)])
    assert found.column(0)[0].as_py() == 10


def test_a_reader_sees_commits_at_its_next_query_and_reopens_only_then(lake: Lake) -> None:
    reader = Reader(Lake.open(lake.path, create=False), Buckets(), SMALL)
    sql = "select count(*)::bigint n from requests"
    assert reader.run(sql).to_pylist() == [{"n": 40}]
    first = reader._connection
    assert reader.run(sql).to_pylist() == [{"n": 40}]
    assert reader._connection is first
    lake.append("requests", request_rows(5, first=100))
    assert reader.run(sql).to_pylist() == [{"n": 45}]
    assert reader._connection is not first


def test_an_open_cursor_keeps_its_files_while_compaction_replaces_them(lake: Lake) -> None:
    reader = Reader(Lake.open(lake.path, create=False), Buckets(), SMALL)
    cursor = reader.cursor()
    lake.append("requests", request_rows(5, first=100))
    files = lake.data_files("requests")
    lake.replace("requests", files, lake.read("requests", files), same_rows=True)
    assert one(cursor, "select count(*) from requests") == 40
    assert one(reader.cursor(), "select count(*) from requests") == 45


def test_a_query_is_asked_again_when_vacuum_took_its_files(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader(Lake.open(lake.path, create=False), Buckets(), SMALL)
    cursors = [reader.cursor()]
    files = lake.data_files("requests")
    lake.replace("requests", files, lake.read("requests", files), same_rows=True)
    for file in files:
        Path(file.uri).unlink()
    monkeypatch.setattr(reader, "cursor", lambda: cursors.pop() if cursors else Reader.cursor(reader))
    assert reader.run("select count(*)::bigint n from requests where shard = 'a'").to_pylist() == [{"n": 40}]
    assert not cursors


def test_several_readers_count_whole_commits_while_the_writer_appends_and_compacts(tmp_path: Path) -> None:
    writer = Lake.open(tmp_path / "lake")
    writer.append("requests", request_rows(100))
    ended = threading.Event()
    failures: list[str] = []
    seen: set[int] = set()

    def read() -> None:
        reader = Reader(Lake.open(writer.path, create=False), Buckets(), SMALL)
        while not ended.is_set():
            try:
                count = reader.run("select count(*)::bigint n from requests").to_pylist()[0]["n"]
            except QueryError as error:
                failures.append(str(error))
                return
            seen.add(count)
            if count % 100:
                failures.append(f"{count} rows: half a commit")

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    try:
        for commit in range(1, 25):
            writer.append("requests", request_rows(100, first=commit * 100))
            if commit % 6 == 0:
                files = writer.data_files("requests")
                writer.replace("requests", files, writer.read("requests", files), same_rows=True)
    finally:
        ended.set()
        for reader in readers:
            reader.join(60)
    assert not failures
    assert len(seen) > 1


def test_older_files_show_newer_columns_as_null(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    newer = Table(
        "requests",
        "",
        (
            Column("start_time", REQUESTS.schema.field("start_time").type, "", required=True),
            Column("zone", TEXT, "", since=2),
        ),
        partition_by=(),
        time_column="start_time",
    )
    old, new = str(tmp_path / "old.parquet"), str(tmp_path / "new.parquet")
    pq.write_table(pa.table({"start_time": pa.array([START], pa.timestamp("us", "UTC"))}), old)
    pq.write_table(pa.table({"zone": ["x"], "start_time": pa.array([START], pa.timestamp("us", "UTC"))}), new)
    with duckdb.connect() as plain:
        for files, zones in (([old, new], ["x", None]), ([old], [None]), ([new, old], ["x", None]), ([], [])):
            found = plain.execute(f"select zone from {files_sql(newer, files)} order by zone nulls last").fetchall()
            assert [zone for (zone,) in found] == zones


def test_an_empty_table_has_the_types_of_a_filled_one(lake: Lake, tmp_path: Path) -> None:
    sql = "select column_name, column_type from (describe requests)"
    with connect(lake, Buckets(), SMALL) as full, connect(Lake.open(tmp_path / "other"), Buckets(), SMALL) as empty:
        assert run(full, sql, 30) == run(empty, sql, 30)
        assert one(empty, "select count(*) from requests") == 0


def test_a_lake_at_a_url_gives_the_same_rows(lake: Lake) -> None:
    with connect(lake, Buckets(), SMALL) as local:
        expected = run(local, "from requests order by start_time", 30)
    remote = Lake.open(f"file://{lake.path}", create=False)
    assert not remote.is_local
    with connect(remote, Buckets(), SMALL) as far:
        assert run(far, "from requests order by start_time", 30).to_pylist() == expected.to_pylist()
        assert run(far, "from events", 30).num_rows == 0
        with pytest.raises(duckdb.Error):
            far.execute("select * from read_text('/etc/passwd')")
