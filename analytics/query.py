"""Read-only SQL over the lake: an in-memory DuckDB with a view a table, closed to all but the lake's live files.

Readers hold no lock and share nothing with the writer: each sees the files that were live when it opened or refreshed.
"""

from __future__ import annotations

import difflib
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import duckdb
import pyarrow as pa

from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.settings import QuerySettings
from vllm_slo.analytics.statements import StatementError, check
from vllm_slo.analytics.views import files_sql, view_columns, view_sql
from vllm_slo.exporters.schema import TABLES, Table

if TYPE_CHECKING:
    import pyarrow.dataset as ds

BATCH_ROWS = 65_536


class QueryError(StatementError):
    """A query that failed: DuckDB's message, and the names that exist where one was unknown."""


class QueryTimeout(QueryError):
    """A query that ran longer than it may."""


def connect(lake: Lake, buckets: Buckets, settings: QuerySettings | None = None) -> duckdb.DuckDBPyConnection:
    """An in-memory connection with a view for each table of ``lake``.

    Locked: of the file system it reads the lake's live files and nothing else, it reaches no network, loads no
    extension, sees no Python variable, spills nothing to disk, and its settings cannot be changed.
    A COPY could still overwrite a live file: hand foreign SQL to ``run`` or ``stream``, which refuse all but reading.
    """
    limits = settings or QuerySettings()
    connection = duckdb.connect(":memory:")
    connection.execute("set TimeZone = 'UTC'")
    connection.execute("set memory_limit = ?", [limits.memory_limit])
    if limits.threads is not None:
        connection.execute("set threads = ?", [limits.threads])
    connection.execute("set parquet_metadata_cache = true")
    files = create_views(connection, lake, buckets)
    connection.execute("set allowed_paths = ?", [files])
    for setting in _LOCKS:
        connection.execute(f"set {setting}")
    return connection


_LOCKS = (
    "temp_directory = ''",
    "python_enable_replacements = false",
    "autoinstall_known_extensions = false",
    "autoload_known_extensions = false",
    "allow_community_extensions = false",
    "allow_extension_repositories = 'forbidden'",
    "allow_persistent_secrets = false",
    "enable_external_access = false",
    "lock_configuration = true",
)


def create_views(connection: duckdb.DuckDBPyConnection, lake: Lake, buckets: Buckets) -> list[str]:
    """Make the view of each table, and `stored.<table>` with the columns as they are stored; the local files behind."""
    used: list[str] = []
    connection.execute("create schema stored")
    for table in TABLES:
        if lake.is_local:
            files = lake.files(table.name)
            used += files
            source = f"(select {', '.join(table.schema.names)} from {files_sql(table, files)})"
        else:
            source = f"dataset_{table.name}"
            connection.register(source, _dataset(lake, table))
        connection.execute(f"create view stored.{table.name} as from {source}")
        connection.execute(f"create view {table.name} as {view_sql(table, f'stored.{table.name}', buckets)}")
    return used


def _dataset(lake: Lake, table: Table) -> ds.Dataset:
    """The live files of a table on an object store, in the columns of the schema (null where a file lacks one)."""
    import pyarrow.dataset as ds  # slow to load, and of no use to a local lake

    lake.refresh(table.name)
    places = [lake.filesystem(table.name, file) for file in lake.data_files(table.name)]
    if not places:
        return ds.dataset(table.schema.empty_table())
    keys = pa.schema([table.schema.field(name) for name in table.partition_by])
    return ds.dataset(
        [path for _, path in places],
        schema=table.schema,
        format="parquet",
        filesystem=places[0][0],
        partitioning=ds.partitioning(keys, flavor="hive") if table.partition_by else None,
    )


@contextmanager
def stream(
    connection: duckdb.DuckDBPyConnection,
    sql: str,
    timeout_seconds: float,
    parameters: Sequence[object] = (),
    limit: int | None = None,
) -> Iterator[pa.RecordBatchReader]:
    """The result of one reading statement as record batches, at most ``limit`` rows.

    Raises StatementError when it does more than read, QueryTimeout after ``timeout_seconds`` (counted until the last
    batch is taken), QueryError for what DuckDB refuses.
    """
    expired = threading.Event()

    def stop() -> None:
        expired.set()
        connection.interrupt()

    timer = threading.Timer(timeout_seconds, stop)
    timer.daemon = True
    timer.start()
    try:
        check(connection, sql)
        relation = connection.sql(sql, params=list(parameters))
        if relation is None:
            raise QueryError("the statement gives no rows; write a SELECT")
        yield (relation if limit is None else relation.limit(limit)).to_arrow_reader(BATCH_ROWS)
    except duckdb.InterruptException as error:
        if expired.is_set():
            raise QueryTimeout(
                f"the query ran longer than {timeout_seconds:g} s and was stopped; "
                "narrow its time range, or raise query.timeout_seconds or --timeout"
            ) from error
        raise KeyboardInterrupt from error
    except duckdb.Error as error:
        raise QueryError(explain(str(error))) from error
    except RuntimeError as error:
        if str(error) == "Query interrupted":  # what DuckDB makes of a KeyboardInterrupt that it notices itself
            raise KeyboardInterrupt from error
        raise
    finally:
        timer.cancel()
        timer.join()  # else its thread may drop the last reference to the connection while Python ends: an abort


def run(
    connection: duckdb.DuckDBPyConnection, sql: str, timeout_seconds: float, parameters: Sequence[object] = ()
) -> pa.Table:
    """The whole result of one reading statement; errors as in ``stream``."""
    with stream(connection, sql, timeout_seconds, parameters) as reader:
        return reader.read_all()


class Reader:
    """A connection that follows the lake: reopened when a table has a newer version.

    One connection serves one thread at a time; take ``cursor()`` for each of several.
    """

    def __init__(self, lake: Lake, buckets: Buckets, settings: QuerySettings | None = None) -> None:
        self.lake = lake
        self.buckets = buckets
        self.settings = settings or QuerySettings()
        self._lock = threading.Lock()
        self._versions: tuple[int, ...] = ()
        self._connection: duckdb.DuckDBPyConnection | None = None

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A cursor over the lake as it is now; reopens only when a commit came since the last call."""
        return self.snapshot()[1]

    def snapshot(self) -> tuple[tuple[int, ...], duckdb.DuckDBPyConnection]:
        """The versions of the tables, and a cursor over them. Raises QueryError where a live file cannot be read."""
        with self._lock:
            versions = tuple(self.lake.refresh(table.name) for table in TABLES)
            if self._connection is None or versions != self._versions:
                try:
                    self._connection = connect(self.lake, self.buckets, self.settings)
                except duckdb.Error as error:
                    raise QueryError(explain(str(error))) from error
                self._versions = versions
            return versions, self._connection.cursor()

    def refresh(self) -> None:
        """Make the next cursor open anew, whatever the versions say."""
        with self._lock:
            self._connection = None

    def run(self, sql: str, parameters: Sequence[object] = (), timeout_seconds: float | None = None) -> pa.Table:
        """The result of one reading statement; asked once more when compaction took a file away meanwhile."""
        seconds = self.settings.timeout_seconds if timeout_seconds is None else timeout_seconds
        try:
            return run(self.cursor(), sql, seconds, parameters)
        except QueryError as error:
            if not isinstance(error.__cause__, duckdb.IOException):
                raise
        self.refresh()
        return run(self.cursor(), sql, seconds, parameters)


_UNKNOWN = (
    re.compile(r'(?:Table|View) with name "?(?P<name>[^"\s]+)"? does not exist'),
    re.compile(r'Referenced (?:column|table) "(?P<name>[^"]+)" not found'),
    re.compile(r'does not have a column named "(?P<name>[^"]+)"'),
)


def explain(message: str) -> str:
    """DuckDB's message; where a name is unknown, also the nearest names and all views."""
    for pattern in _UNKNOWN:
        match = pattern.search(message)
        if match:
            return f"{message}\n\n{_names_near(match['name'])}"
    return message


def _names_near(name: str) -> str:
    known = {table.name: table.name for table in TABLES}
    for table in TABLES:
        for column in view_columns(table):
            known.setdefault(column, f"{table.name}.{column}")
    near = difflib.get_close_matches(name.lower(), known, n=5, cutoff=0.5)
    lines = [f"nearest to '{name}': {', '.join(known[n] for n in near)}"] if near else []
    lines.append(f"views: {', '.join(table.name for table in TABLES)}; the columns of one: DESCRIBE requests")
    return "\n".join(lines)
