"""A Delta table of the lake: where it may be, opened, made, and brought to the schema of this program.

Delta keeps the schema version as the table property ``vllm_slo.schemaVersion`` (part of the table's metadata, so it
survives checkpoints and log clean-up).
"""

from __future__ import annotations

import os
from pathlib import Path

import pyarrow as pa
import pyarrow.fs as fs
from deltalake import DeltaTable, Schema
from deltalake.exceptions import DeltaError, TableNotFoundError

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.schema import Table

VERSION_PROPERTY = "vllm_slo.schemaVersion"
PROPERTIES: dict[str, str] = {
    "delta.checkpointInterval": "20",
    "delta.logRetentionDuration": "interval 1 days",
    "delta.deletedFileRetentionDuration": "interval 1 hours",
    "delta.enableExpiredLogCleanup": "false",
    "delta.dataSkippingNumIndexedCols": "3",
}
"""A commit's cost grows by 0.08 ms for each commit since the last checkpoint and a checkpoint costs about 25 ms, so 20
is near the minimum (8 ms a commit). Old log entries are removed by maintenance, not while the receiver commits."""


class LakeError(SloError):
    """A lake that cannot be opened, read or written, with the cure."""


def absolute(location: str | os.PathLike[str]) -> str:
    text = os.fspath(location)
    return text.rstrip("/") if "://" in text else os.path.abspath(os.path.expanduser(text))


def filesystem_of(path: str) -> tuple[fs.FileSystem, str]:
    if "://" not in path:
        return fs.LocalFileSystem(), path
    try:
        filesystem, root = fs.FileSystem.from_uri(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise LakeError(
            f"{path}: {first_line(error)}; a lake is a folder or an s3://, gs://, abfs:// or file:// URL"
        ) from error
    return filesystem, root.rstrip("/")


def check_folder(path: Path, create: bool) -> None:
    if path.is_file():
        raise LakeError(f"{path}: is a file; a lake is a folder: name another place with --lake or VLLM_SLO_LAKE")
    if not path.is_dir() and not create:
        raise absent(str(path), None, whole=True)
    if create:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LakeError(f"{path}: cannot be made: {error.strerror}; choose a place that can be written") from error


def absent(path: str, table: str | None, *, whole: bool) -> LakeError:
    """The error for a lake, or one table of an older lake, that a reader finds missing."""
    if whole:
        return LakeError(
            f"{path}: there is no lake here; name the right place with --lake or VLLM_SLO_LAKE, "
            "or make one with `vllm-slo up` or `vllm-slo import`"
        )
    return LakeError(
        f"{path}: the lake has no table `{table}`; a lake of an older vllm-slo is brought up to date by its next "
        "`vllm-slo up` or `vllm-slo import`"
    )


def load(uri: str, options: dict[str, str]) -> DeltaTable | None:
    try:
        return DeltaTable(uri, storage_options=options or None)
    except TableNotFoundError:
        return None
    except (DeltaError, OSError) as error:
        raise LakeError(
            f"{uri}: the table cannot be read: {first_line(error)}; restore {uri}/_delta_log from a backup, "
            "check the credentials of an object store, or move the table away to begin a new one"
        ) from error


def make(uri: str, table: Table, version: int, options: dict[str, str]) -> DeltaTable:
    try:
        DeltaTable.create(
            uri,
            schema=Schema.from_arrow(table.schema),
            mode="ignore",
            partition_by=list(table.partition_by),
            name=table.name,
            description=table.description,
            configuration={**PROPERTIES, VERSION_PROPERTY: str(version)},
            storage_options=options or None,
            raise_if_key_not_exists=False,
        )
    except (DeltaError, OSError) as error:
        raise LakeError(
            f"{uri}: the table cannot be made: {first_line(error)}; check space and permissions there"
        ) from error
    handle = load(uri, options)
    if handle is None:
        raise LakeError(f"{uri}: the table was made and is not there; check that nothing removes files from the lake")
    return handle


def schema_version(handle: DeltaTable, uri: str) -> int:
    text = handle.metadata().configuration.get(VERSION_PROPERTY)
    if text is None or not text.isdigit():
        raise LakeError(
            f"{uri}: a Delta table that vllm-slo did not make (property {VERSION_PROPERTY} is {text!r}); "
            "use another place for the lake"
        )
    return int(text)


def upgrade(handle: DeltaTable, table: Table, version: int) -> None:
    """Add the columns that the table lacks (null in older rows), then record the version.

    Killed in between, the next opening finishes the work: what is there is not added again.
    """
    present = {field.name for field in handle.schema().fields}
    missing = [pa.field(c.name, c.type) for c in table.columns if c.name not in present]
    if missing:
        handle.alter.add_columns(list(Schema.from_arrow(pa.schema(missing)).fields))
    handle.alter.set_table_properties({VERSION_PROPERTY: str(version)}, raise_if_not_exists=False)
    handle.update_incremental()


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
