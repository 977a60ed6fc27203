"""The lake, or a range of time of it, as one DuckDB file, or as a folder of Parquet or CSV files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import duckdb

from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.query import create_views
from vllm_slo.analytics.selection import literal
from vllm_slo.analytics.views import quoted, view_sql
from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.schema import SCHEMA_VERSION, TABLES, Table

STORAGE_VERSION = "v1.4.0"
"""DuckDB's long-term-support line: its 1.4 and everything newer open the file."""

Rows = dict[str, int]
"""Rows by table."""

_COPY_OPTIONS = {
    "parquet": "format parquet, compression zstd",
    "csv": "format csv, header true, timestampformat '%Y-%m-%dT%H:%M:%S.%fZ'",
}


class ExportError(SloError):
    """An export that cannot be written."""


def to_duckdb(
    lake: Lake, buckets: Buckets, file: Path, since: datetime | None, until: datetime | None, *, force: bool
) -> Rows:
    """Write one DuckDB database with the tables of the lake in the schema `stored` and the views of the same names.

    The views have ids as hex text, the derived columns and `bucket`, as `vllm-slo query` shows them.
    Rows are those of [``since``, ``until``), rollups by the start of their minute, hour or day. The table `export` says
    which, and from when.
    The file appears whole or not at all. Raises ExportError when it is there and ``force`` is not given.
    """
    with _draft(file, force) as draft, _reader(lake, buckets) as connection:
        connection.execute(f"attach {quoted(str(draft))} as target (storage_version '{STORAGE_VERSION}')")
        connection.execute("create schema target.stored")
        rows: Rows = {}
        for table in TABLES:
            name = f"target.stored.{table.name}"
            connection.execute(
                f"create table {name} as select * from stored.{table.name} where {_within(table, since, until)}"
            )
            rows[table.name] = _count(connection, name)
        connection.execute("create table target.export (key varchar, value varchar)")
        about = {"schema_version": str(SCHEMA_VERSION), "lake": lake.path, "exported": _iso(datetime.now(UTC))}
        about |= {"since": _iso(since), "until": _iso(until)}
        connection.executemany("insert into target.export values (?, ?)", list(about.items()))
        connection.execute("use target")
        for table in TABLES:
            connection.execute(f"create view main.{table.name} as {_typed_view(connection, table, buckets)}")
        connection.execute("use memory")
        connection.execute("detach target")
    return rows


def to_folder(
    lake: Lake,
    buckets: Buckets,
    folder: Path,
    form: str,
    since: datetime | None,
    until: datetime | None,
    *,
    force: bool,
) -> Rows:
    """Write one file a table, `requests.parquet` and so on (``form``: parquet or csv), with the columns of the views.

    The folder appears whole or not at all. Raises ExportError when it is there and ``force`` is not given.
    """
    with _draft(folder, force) as draft, _reader(lake, buckets) as connection:
        draft.mkdir()
        rows: Rows = {}
        for table in TABLES:
            target = draft / f"{table.name}.{form}"
            source = f"select * from {table.name} where {_within(table, since, until)}"
            copied = connection.execute(f"copy ({source}) to {quoted(str(target))} ({_COPY_OPTIONS[form]})").fetchall()
            rows[table.name] = int(copied[0][0])
    return rows


def size_bytes(path: Path) -> int:
    """Bytes of a file, or of all files in a folder."""
    return sum(each.stat().st_size for each in (path.iterdir() if path.is_dir() else (path,)))


def _typed_view(connection: duckdb.DuckDBPyConnection, table: Table, buckets: Buckets) -> str:
    """The view over `stored`, computed columns cast to the types they have here.

    A view keeps its types in the file, and other versions of DuckDB derive others (of a difference of decimals).
    """
    view = view_sql(table, f"stored.{table.name}", buckets)
    types = connection.execute(f"select column_name, column_type from (describe {view})").fetchall()
    computed = {derived.name for derived in table.derived}
    columns = [f"{name}::{kind} as {name}" if name in computed else name for name, kind in types]
    return f"select {', '.join(columns)} from ({view})"


def _within(table: Table, since: datetime | None, until: datetime | None) -> str:
    time = table.time_column
    tests = [f"{time} >= {literal(since)}"] if since else []
    tests += [f"{time} < {literal(until)}"] if until else []
    return " and ".join(tests) or "true"


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else f"{moment.astimezone(UTC):%Y-%m-%dT%H:%M:%S.%fZ}"


def _count(connection: duckdb.DuckDBPyConnection, name: str) -> int:
    ((rows,),) = connection.execute(f"select count(*) from {name}").fetchall()
    return int(rows)


@contextmanager
def _reader(lake: Lake, buckets: Buckets) -> Iterator[duckdb.DuckDBPyConnection]:
    """A connection that may write files: it runs only the statements of this module."""
    with duckdb.connect(":memory:") as connection:
        connection.execute("set TimeZone = 'UTC'")
        create_views(connection, lake, buckets)
        try:
            yield connection
        except (duckdb.IOException, duckdb.OutOfMemoryException) as error:
            raise ExportError(f"{error}; check space and permissions, or export less with --since") from error


@contextmanager
def _draft(target: Path, force: bool) -> Iterator[Path]:
    """A place beside ``target`` that takes its name when the block ends well, and is removed when it does not."""
    if target.exists() and not force:
        raise ExportError(f"{target} is there already; --force replaces it, or name another")
    if not target.absolute().parent.is_dir():
        raise ExportError(f"{target}: the folder {target.absolute().parent} is not there; make it first")
    draft = target.with_name(f".{target.name}.{os.getpid()}.draft")
    _remove(draft)
    try:
        yield draft
        if target.is_dir():
            _remove(target)
        os.replace(draft, target)
    except OSError as error:
        raise ExportError(f"{target}: {error.strerror}; check space and permissions there") from error
    finally:
        _remove(draft)
        _remove(draft.with_name(f"{draft.name}.wal"))


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
