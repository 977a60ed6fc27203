"""The lake: one Delta table for each table of the schema, on a local folder or an object store.

Data files are written here and committed with Delta's own transaction protocol, so any engine that reads Delta reads
the same rows.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from threading import RLock

import pyarrow as pa
import pyarrow.fs as fs
from deltalake import CommitProperties, DeltaTable, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError
from deltalake.transaction import AddAction, RemoveAction

from vllm_slo.analytics import parquet
from vllm_slo.analytics.datafile import DataFile, Folder, Writer, fsync, listed, written
from vllm_slo.analytics.upgrade import (
    LakeError,
    absent,
    absolute,
    check_folder,
    filesystem_of,
    first_line,
    load,
    make,
    schema_version,
    upgrade,
)
from vllm_slo.exporters.schema import SCHEMA_VERSION, TABLES, Table

_APPLICATION = re.compile(r"[A-Za-z0-9._-]{1,128}")

REPLACING = "vllm-slo-replace"
"""Application transaction shared by all that replace files: Delta itself lets two compactions of one file both pass."""
_ATTEMPTS = 20
"""Tries of an append against commits that removed files meanwhile; nothing of the append has to change for them."""


class CommitConflict(LakeError):
    """Somebody else committed first; look again and retry. Nothing was written."""


@dataclass(frozen=True)
class TableStats:
    """Size of one table; ``last_commit`` is null for a table that was never written to."""

    rows: int
    files: int
    size_bytes: int
    version: int
    last_commit: datetime | None


class Lake:
    """Handles on the tables, kept warm: a refresh reads only what was committed since the last one.

    Safe to share between threads. Any number of processes may hold a lake on the same place.
    """

    def __init__(
        self,
        path: str,
        tables: Mapping[str, Table],
        handles: dict[str, DeltaTable],
        *,
        writable: bool,
        options: dict[str, str],
    ) -> None:
        self.path = path
        self.is_local = "://" not in path
        self.tables = tables
        self.writable = writable
        self._handles = handles
        self._options = options
        self._locks = {name: RLock() for name in tables}
        self._files: dict[str, tuple[int, list[DataFile]]] = {}
        self._filesystem, self._root = filesystem_of(path)
        self._on_disk = isinstance(self._filesystem, fs.LocalFileSystem)

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        create: bool = True,
        *,
        tables: Sequence[Table] = TABLES,
        version: int = SCHEMA_VERSION,
        storage_options: Mapping[str, str] | None = None,
    ) -> Lake:
        """The lake at a folder or URL.

        ``create``: missing tables are made and older ones upgraded. Without it nothing is ever written: the lake must
        be there, columns newer than it are absent.
        Object stores take their credentials from ``storage_options`` or the environment, as Delta and Arrow do.
        Raises LakeError for a place that cannot be a lake and for a lake newer than this program.
        """
        path = absolute(location)
        options = dict(storage_options or {})
        if "://" not in path:
            check_folder(Path(path), create)
        found = {table.name: load(f"{path}/{table.name}", options) for table in tables}
        versions = {name: schema_version(handle, f"{path}/{name}") for name, handle in found.items() if handle}
        for name, at in versions.items():
            if at > version:
                raise LakeError(
                    f"{path}/{name}: schema version {at}, this vllm-slo knows {version}; "
                    "upgrade vllm-slo (pip install --upgrade vllm-slo) or use another lake"
                )
        handles: dict[str, DeltaTable] = {}
        for table in tables:
            handle = found[table.name]
            if handle is None and not create:
                raise absent(path, table.name, whole=not versions)
            if handle is None:
                handle = make(f"{path}/{table.name}", table, version, options)
            elif create and versions[table.name] < version:
                upgrade(handle, table, version)
            handles[table.name] = handle
        return cls(path, {t.name: t for t in tables}, handles, writable=create, options=options)

    def refresh(self, table: str) -> int:
        """Take in what others committed to a table; its Delta version."""
        with self._locks[table]:
            handle = self._handles[table]
            gone = LakeError(f"{self.path}/{table}: the table is gone; put the lake back in its place and start again")
            if self.is_local and not Path(self.path, table, "_delta_log").is_dir():
                raise gone  # Delta takes an absent log for "nothing new"
            try:
                handle.update_incremental()
            except (DeltaError, OSError):
                # Idle for longer than log entries are kept: what it would read on from is gone, so it opens anew.
                reopened = load(f"{self.path}/{table}", self._options)
                if reopened is None:
                    raise gone from None
                self._handles[table] = handle = reopened
            return int(handle.version())

    def applied(self, table: str, app: str) -> int | None:
        """The highest number that an application has committed to a table; null for none."""
        with self._locks[table]:
            self.refresh(table)
            return self._applied(table, app)

    def append(
        self,
        table: str,
        rows: pa.Table,
        writer: Writer | None = None,
        *,
        alone: str | None = None,
        checked_version: int | None = None,
    ) -> bool:
        """Commit rows in one transaction, sorted by time, one file a partition; false if the number was applied before.

        ``writer``: application id and number. An application must append its numbers in ascending order: a number at
        or below the last one committed is taken for a replay and changes nothing.
        ``alone`` with ``checked_version``: commit only if no append with the same ``alone`` came after that version of
        the table, else raise CommitConflict. So what was concluded from the table still holds when the rows enter it.
        Without ``checked_version`` an append that meets a removal of files is tried again.
        Rows must have the columns that the table had from the start; newer ones may be absent. No row at all still
        records the writer.
        When it returns, files and commit are on disk (folders and file:// URLs: fsync).
        """
        definition = self._writable(table)
        if writer is not None and not _APPLICATION.fullmatch(writer[0]):
            raise LakeError(f"writer {writer[0]!r}: an application id is 1 to 128 of A-Z a-z 0-9 . _ -; rename it")
        with self._locks[table]:
            handle = self._handles[table]
            if checked_version is None:
                self.refresh(table)
            elif int(handle.version()) != checked_version:
                raise CommitConflict(f"{self.path}/{table}: moved on since version {checked_version}; check again")
            if writer is not None and self._is_applied(table, writer):
                return False
            stem = f"part-{writer[0]}-{writer[1]:010d}" if writer else "part"
            added = self._write(definition, rows, stem, {})
            marks = [Transaction(*writer)] if writer else []
            if alone is not None:
                marks.append(Transaction(alone, int(handle.version())))
            actions = [add for add, _ in added]
            for _ in range(1 if checked_version is not None else _ATTEMPTS):
                try:
                    self._commit(definition, actions, marks)
                    return True
                except CommitConflict as error:
                    conflict = error
                    self.refresh(table)
                if writer is not None and self._is_applied(table, writer):
                    break
            self._discard(definition, [add.path for add in actions])
            if writer is not None and self._is_applied(table, writer):
                return False
            raise conflict

    def replace(
        self,
        table: str,
        old: Sequence[DataFile],
        rows: pa.Table | None,
        *,
        metadata: Mapping[str, str] | None = None,
        same_rows: bool,
    ) -> list[DataFile]:
        """Put rows in the place of whole files in one transaction; the new files.

        Appends that happen meanwhile are untouched. Raises CommitConflict, with nothing changed, if one of the files
        is no longer live. ``same_rows``: the logical content does not change (compaction), so that stream readers of
        the table skip the commit. The old files stay on disk for readers that hold them, until vacuum.
        """
        definition = self._writable(table)
        added = self._write(definition, rows, "merged", metadata or {}, data_change=not same_rows) if rows else []
        now = int(time.time() * 1000)
        removes = [RemoveAction(f.path, not same_rows, now, f.size_bytes, dict(f.partition)) for f in old]
        with self._locks[table]:
            self.refresh(table)
            live = {f.path for f in self.data_files(table)}
            try:
                if gone := [f.path for f in old if f.path not in live]:
                    raise CommitConflict(f"{self.path}/{table}: {gone[0]} is no longer live; look again")
                mark = Transaction(REPLACING, int(self._handles[table].version()))
                self._commit(definition, [*(add for add, _ in added), *removes], [mark])
            except CommitConflict:
                self._discard(definition, [add.path for add, _ in added])
                raise
        return [file for _, file in added]

    def data_files(self, table: str) -> list[DataFile]:
        """The live files of the table as of the last refresh, oldest rows first."""
        with self._locks[table]:
            handle = self._handles[table]
            at = int(handle.version())
            if table not in self._files or self._files[table][0] != at:
                self._files[table] = (at, listed(handle, self.tables[table], f"{self.path}/{table}"))
            return list(self._files[table][1])

    def files(self, table: str) -> list[str]:
        """Absolute paths (local lakes) or URLs of the live Parquet files, refreshed, oldest rows first."""
        with self._locks[table]:
            self.refresh(table)
            return [f.uri for f in self.data_files(table)]

    def read(
        self,
        table: str,
        files: Iterable[DataFile],
        columns: Sequence[str] | None = None,
        *,
        dictionaries: bool = False,
    ) -> pa.Table:
        """Rows of some files in the table's columns, partition columns filled in, file by file in the order given.

        Columns that a file does not have yet are null. ``dictionaries``: see `parquet.read`.
        """
        definition = self.tables[table]
        wanted = list(columns) if columns is not None else [c.name for c in definition.columns]
        parts = [
            parquet.read(
                self._filesystem,
                self._file_path(table, file.path),
                definition,
                wanted,
                dict(file.partition),
                dictionaries=dictionaries,
            )
            for file in files
        ]
        if not parts:
            return pa.schema([definition.schema.field(name) for name in wanted]).empty_table()
        return pa.concat_tables(parts).unify_dictionaries()

    def filled(self, table: str, files: Iterable[DataFile]) -> list[str]:
        """The columns of the table that one of the files has; partition columns are those of every file."""
        names = set(self.tables[table].partition_by)
        for file in files:
            with parquet.opened(self._filesystem, self._file_path(table, file.path)) as stored:
                names.update(stored.schema_arrow.names)
        return [column.name for column in self.tables[table].columns if column.name in names]

    def filesystem(self, table: str, file: DataFile) -> tuple[fs.FileSystem, str]:
        """Where Arrow finds a file."""
        return self._filesystem, self._file_path(table, file.path)

    def table_stats(self) -> dict[str, TableStats]:
        """Size of each table, from the Delta logs alone."""
        stats = {}
        for name in self.tables:
            with self._locks[name]:
                version = self.refresh(name)
                files = self.data_files(name)
                history = self._handles[name].history(1)
            stamp = history[0].get("timestamp") if history and version > 0 else None
            stats[name] = TableStats(
                rows=sum(f.rows for f in files),
                files=len(files),
                size_bytes=sum(f.size_bytes for f in files),
                version=version,
                last_commit=datetime.fromtimestamp(stamp / 1000, UTC) if stamp else None,
            )
        return stats

    def with_handle(self, table: str, action: Callable[[DeltaTable], object]) -> None:
        """Run a maintenance operation of Delta (vacuum, checkpoint, log clean-up) on the refreshed table."""
        self._writable(table)
        with self._locks[table]:
            self.refresh(table)
            action(self._handles[table])

    def _writable(self, table: str) -> Table:
        if not self.writable:
            raise LakeError(f"{self.path}: opened for reading; open it with create=True to write `{table}`")
        if table not in self.tables:
            raise LakeError(f"`{table}` is no table of the lake; the tables are {', '.join(self.tables)}")
        return self.tables[table]

    def _applied(self, table: str, app: str) -> int | None:
        return self._handles[table].transaction_version(app)

    def _is_applied(self, table: str, writer: Writer) -> bool:
        highest = self._applied(table, writer[0])
        return highest is not None and highest >= writer[1]

    def _file_path(self, table: str, path: str) -> str:
        return f"{self._root}/{table}/{path}"

    def _write(
        self, table: Table, rows: pa.Table, stem: str, metadata: Mapping[str, str], *, data_change: bool = True
    ) -> list[tuple[AddAction, DataFile]]:
        folder = Folder(self._filesystem, f"{self._root}/{table.name}", f"{self.path}/{table.name}")
        return written(folder, table, _in_columns(rows, table), stem, metadata, data_change=data_change)

    def _commit(self, table: Table, actions: Sequence[AddAction | RemoveAction], marks: list[Transaction]) -> None:
        handle = self._handles[table.name]
        before = int(handle.version())
        try:
            handle.create_write_transaction(
                list(actions),
                "append",
                handle.schema(),
                list(table.partition_by),
                commit_properties=CommitProperties(app_transactions=marks),
            )
        except CommitFailedError as error:
            raise CommitConflict(f"{self.path}/{table.name}: {first_line(error)}; look again and retry") from error
        except (DeltaError, OSError) as error:
            raise LakeError(
                f"{self.path}/{table.name}: the commit failed: {first_line(error)}; check space and permissions there"
            ) from error
        if self._on_disk:
            self._fsync_log(table.name, before + 1)

    def _fsync_log(self, table: str, version: int) -> None:
        log = Path(self._root, table, "_delta_log")
        while (entry := log / f"{version:020d}.json").exists():
            fsync(entry)
            version += 1
        fsync(log)

    def _discard(self, table: Table, paths: Iterable[str]) -> None:
        for path in paths:
            self._filesystem.delete_file(self._file_path(table.name, path))


def _in_columns(rows: pa.Table, table: Table) -> pa.Table:
    """Rows in the order of the table's columns, without newer columns that no row fills: files are as they were before
    these columns came, and readers take them for null."""
    given = set(rows.schema.names)
    if absent := [c.name for c in table.columns if c.name not in given and c.since == 1]:
        raise LakeError(f"rows for `{table.name}` lack {', '.join(absent)}; they need the columns of the schema")
    filled = [
        c.name
        for c in table.columns
        if c.since == 1 or (c.name in given and (rows[c.name].null_count < rows.num_rows or not rows.num_rows))
    ]
    return rows if filled == rows.schema.names else rows.select(filled)
