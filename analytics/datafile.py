"""One Parquet file of a table: what its name says, what the Delta log says of it, and how it comes to stay on disk."""

from __future__ import annotations

import contextlib
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as fs
from deltalake import DeltaTable
from deltalake.transaction import AddAction

from vllm_slo.analytics import parquet
from vllm_slo.exporters.schema import Table

Writer = tuple[str, int]
"""Application id and its ascending number: a Delta application transaction."""

_PART = re.compile(r"part-(?P<app>[A-Za-z0-9._-]{1,128})-(?P<number>\d+)-[0-9a-f]{16}\.parquet")


@dataclass(frozen=True)
class DataFile:
    """One live Parquet file of a table; times are those of the table's time column (null if unknown)."""

    path: str
    uri: str
    size_bytes: int
    rows: int
    partition: tuple[tuple[str, str], ...]
    low: datetime | None
    high: datetime | None

    @property
    def writer(self) -> Writer | None:
        """Who appended the file; null for files that maintenance rewrote or that were appended without a writer."""
        match = _PART.fullmatch(self.path.rpartition("/")[2])
        return (match["app"], int(match["number"])) if match else None


@dataclass(frozen=True)
class Folder:
    """Where the files of one table lie: for Arrow (``root``) and for everybody else (``uri``)."""

    filesystem: fs.FileSystem
    root: str
    uri: str

    @property
    def on_disk(self) -> bool:
        """Whether files must be fsynced to stay; an object store keeps what it has acknowledged."""
        return isinstance(self.filesystem, fs.LocalFileSystem)


def written(
    folder: Folder, table: Table, rows: pa.Table, stem: str, metadata: Mapping[str, str], *, data_change: bool
) -> list[tuple[AddAction, DataFile]]:
    """Rows as files that no commit names yet, one a partition, on disk when this returns.

    When one of them cannot be written, none stays: a full disk is not filled further by each new try.
    """
    made: list[tuple[AddAction, DataFile]] = []
    path = ""
    try:
        for values, part in parquet.partitions(rows, table):
            place = "".join(f"{column}={value}/" for column, value in values.items())
            path = f"{place}{stem}-{uuid.uuid4().hex[:16]}.parquet"
            made.append(_written(folder, path, values, part, table, metadata, data_change))
    except BaseException:
        for unneeded in (path, *(file.path for _, file in made)):
            with contextlib.suppress(OSError):
                folder.filesystem.delete_file(f"{folder.root}/{unneeded}")
        raise
    return made


def _written(
    folder: Folder,
    path: str,
    values: dict[str, str],
    rows: pa.Table,
    table: Table,
    metadata: Mapping[str, str],
    data_change: bool,
) -> tuple[AddAction, DataFile]:
    target = Path(folder.root, path)
    fresh = [parent for parent in target.parents if not parent.exists()] if folder.on_disk else []
    size = parquet.write(folder.filesystem, f"{folder.root}/{path}", rows, table, metadata)
    if folder.on_disk:
        for item in (target, target.parent, *(parent.parent for parent in fresh)):
            fsync(item)
    stats = parquet.delta_statistics(rows, table.time_column)
    extremes = pc.min_max(rows[table.time_column])
    low, high = extremes["min"].as_py(), extremes["max"].as_py()
    add = AddAction(path, size, values, int(time.time() * 1000), data_change, stats)
    return add, DataFile(path, f"{folder.uri}/{path}", size, rows.num_rows, tuple(values.items()), low, high)


def listed(handle: DeltaTable, table: Table, uri: str) -> list[DataFile]:
    """The live files of a table, oldest rows first."""
    actions = pa.table(handle.get_add_actions(flatten=True))
    if actions.num_rows == 0:
        return []
    names = set(actions.column_names)
    low, high = f"min.{table.time_column}", f"max.{table.time_column}"
    empty: list[None] = [None] * actions.num_rows
    lows = actions[low].to_pylist() if low in names else empty
    highs = actions[high].to_pylist() if high in names else empty
    parts = [[str(v) for v in actions[f"partition.{column}"].to_pylist()] for column in table.partition_by]
    files = [
        DataFile(
            path,
            f"{uri}/{path}",
            size,
            rows or 0,
            tuple(zip(table.partition_by, (part[i] for part in parts), strict=True)),
            lows[i],
            highs[i],
        )
        for i, (path, size, rows) in enumerate(
            zip(
                actions["path"].to_pylist(),
                actions["size_bytes"].to_pylist(),
                actions["num_records"].to_pylist(),
                strict=True,
            )
        )
    ]
    return sorted(files, key=lambda f: (f.low is not None, f.low, f.path) if f.low else (False, None, f.path))


def fsync(path: Path) -> None:
    """Put a file or a folder on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
