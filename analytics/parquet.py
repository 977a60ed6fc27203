"""How rows lie in a Parquet file: encodings, compression, row groups, chosen by measurement.

One million rows of `requests` with random ids, one core, pyarrow 26: bytes a row / microseconds of CPU to write a row /
CPU milliseconds for DuckDB 2.0.1 to read ten columns of all rows.

==============================================================  ======  =====  ====
pyarrow's defaults with zstd 1 (dictionary tried everywhere)      92.7   1.06     -
no dictionary for ids                                             89.2   0.89     -
no dictionary for ids and measures                                75.7   0.66   123
delta-packed measures, decimals as int64                          73.8   0.50    63
byte-stream-split measures                                        71.9   0.54   104
delta-packed measures, length-delta ids, both uncompressed        72.5   0.48    65
the same with zstd 3 / 6 / 9                                      74.1   0.7/1.2/1.6
==============================================================  ======  =====  ====
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as fs
import pyarrow.parquet as pq

from vllm_slo.analytics.upgrade import LakeError, first_line
from vllm_slo.exporters.schema import BYTES, SECONDS, TIME, Table

ROW_GROUP_ROWS = 100_000
"""Rows of a row group: small enough that an hour of a busy day is a few groups, large enough to compress."""
LEVEL = 1
"""zstd level. Higher ones cost two to three times the CPU and save nothing: what is left is random."""

SOURCES = "vllm_slo.sources"
"""Key-value metadata of a merged file: the paths of the files it stands for, one a line."""

FEW_VALUES = frozenset(
    {
        "source",
        "service_name",
        "service_instance_id",
        "shard",
        "model",
        "engine",
        "status",
        "finish_reason",
        "quality",
        "kind",
        "scope_name",
        "records",
        "lora",
        "http_route",
        "blocked_by",
        "resource_attributes",
        "vllm_version",
        "level",
        "bucket",
        "metric",
    }
)
"""Text columns that repeat few values in any file."""
_FEW_VALUES = pa.dictionary(pa.int32(), pa.string())

_DELTA_INTEGERS = frozenset({"prompt_tokens", "completion_tokens", "bin", "count"})


def write_options(table: Table) -> dict[str, Any]:
    """Keyword arguments of ``pyarrow.parquet.ParquetWriter`` for rows of a table (partition columns left out).

    Ids: length-delta, uncompressed (they are random). Times, durations and token counts: delta-packed; durations
    uncompressed (no gain). Everything else: dictionary and zstd.
    """
    columns = [c for c in table.columns if c.name not in table.partition_by]
    encoding: dict[str, str] = {}
    raw: set[str] = set()
    for column in columns:
        if column.type == BYTES:
            encoding[column.name] = "DELTA_LENGTH_BYTE_ARRAY"
            raw.add(column.name)
        elif column.name == "request_id":
            encoding[column.name] = "DELTA_LENGTH_BYTE_ARRAY"
        elif column.type == SECONDS:
            encoding[column.name] = "DELTA_BINARY_PACKED"
            raw.add(column.name)
        elif column.type == TIME or column.name in _DELTA_INTEGERS:
            encoding[column.name] = "DELTA_BINARY_PACKED"
    names = [c.name for c in columns]
    return {
        "use_dictionary": [n for n in names if n not in encoding] or False,
        "column_encoding": encoding,
        "compression": {n: "none" if n in raw else "zstd" for n in names},
        "compression_level": {n: LEVEL for n in names if n not in raw},
        "store_decimal_as_integer": True,
        "store_schema": False,
    }


def delta_statistics(rows: pa.Table, time_column: str) -> str:
    """The `stats` of a Delta add action, as JSON: row count and the range of the time column.

    Delta keeps times to the millisecond, so the range is widened to whole ones.
    """
    extremes = pc.min_max(rows[time_column])
    low, high = extremes["min"].as_py(), extremes["max"].as_py()
    return json.dumps(
        {
            "numRecords": rows.num_rows,
            "minValues": {time_column: _millisecond_text(low)},
            "maxValues": {time_column: _millisecond_text(high + timedelta(microseconds=999))},
            "nullCount": {time_column: 0},
        }
    )


def _millisecond_text(time: datetime) -> str:
    at = time.astimezone(UTC)
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at.microsecond // 1000:03d}Z"


def write(filesystem: fs.FileSystem, path: str, rows: pa.Table, table: Table, metadata: Mapping[str, str]) -> int:
    """Write rows (without partition columns) as one file with key-value metadata; its size in bytes."""
    if isinstance(filesystem, fs.LocalFileSystem):
        filesystem.create_dir(path.rpartition("/")[0], recursive=True)
    with filesystem.open_output_stream(path) as sink:
        with pq.ParquetWriter(sink, rows.schema, **write_options(table)) as writer:
            writer.write_table(rows, row_group_size=ROW_GROUP_ROWS)
            writer.add_key_value_metadata(dict(metadata))
        return int(sink.tell())


@contextmanager
def opened(filesystem: fs.FileSystem, path: str, **options: Any) -> Iterator[pq.ParquetFile]:
    """One file of the lake, for reading.

    Raises LakeError when it is damaged, here or while it is read: a fault of the lake, never of rows that are to enter.
    """
    try:
        with pq.ParquetFile(path, filesystem=filesystem, **options) as file:
            yield file
    except pa.ArrowInvalid as error:
        raise LakeError(f"{path}: the file is damaged: {first_line(error)}; restore it from a backup") from error


def partitions(rows: pa.Table, table: Table) -> Iterator[tuple[dict[str, str], pa.Table]]:
    """Rows sorted by the time column and split by partition: partition values as text, rows without those columns."""
    if rows.num_rows == 0:
        return
    if not table.partition_by:
        yield {}, by_time(rows, table.time_column)
        return
    names = list(table.partition_by)
    encoded = [rows[name].combine_chunks().dictionary_encode() for name in names]
    code = np.zeros(rows.num_rows, dtype=np.int64)
    for column in encoded:
        code = code * len(column.dictionary) + column.indices.to_numpy(zero_copy_only=False)
    for value in np.unique(code):
        chosen = np.flatnonzero(code == value)
        part = rows if len(chosen) == rows.num_rows else rows.take(pa.array(chosen))
        values = {name: str(column[int(chosen[0])].as_py()) for name, column in zip(names, encoded, strict=True)}
        yield values, by_time(part.drop_columns(names), table.time_column)


def by_time(rows: pa.Table, time_column: str) -> pa.Table:
    """The rows in one chunk, in order of a time column; equal times keep their order."""
    times = np.concatenate([chunk.cast(pa.int64()).to_numpy() for chunk in rows[time_column].chunks] or [np.empty(0)])
    if np.all(times[1:] >= times[:-1]):
        return rows.combine_chunks()
    order = pa.array(np.argsort(times, kind="stable"))
    columns = [
        pa.nulls(rows.num_rows, column.type) if column.null_count == rows.num_rows else column.take(order)
        for column in rows.combine_chunks().columns
    ]
    return pa.Table.from_arrays(columns, schema=rows.schema)


def read(
    filesystem: fs.FileSystem,
    path: str,
    table: Table,
    columns: Sequence[str],
    partition: Mapping[str, str],
    *,
    dictionaries: bool = False,
) -> pa.Table:
    """Columns of one file in the types of the table; partition columns from their values, absent columns null.

    ``dictionaries``: text columns with few values come as dictionary arrays, a tenth of the memory.
    """
    fields = [table.schema.field(name) for name in columns]
    if dictionaries:
        fields = [field.with_type(_FEW_VALUES) if field.name in FEW_VALUES else field for field in fields]
    with opened(filesystem, path) as file:
        metadata = file.metadata
    present = set(metadata.schema.names)
    encoded = [field.name for field in fields if field.type == _FEW_VALUES and field.name in present]
    with opened(filesystem, path, metadata=metadata, read_dictionary=encoded) as file:
        stored = file.read(columns=[name for name in columns if name in present])
    arrays = []
    for field in fields:
        if field.name in partition:
            value = pa.repeat(pa.scalar(partition[field.name]), stored.num_rows)
            arrays.append(pa.chunked_array([value.dictionary_encode() if field.type == _FEW_VALUES else value]))
        elif field.name in present:
            arrays.append(stored[field.name])
        else:
            arrays.append(pa.chunked_array([pa.nulls(stored.num_rows, field.type)]))
    cast = [array.cast(field.type) for array, field in zip(arrays, fields, strict=True)]
    return pa.Table.from_arrays(cast, schema=pa.schema(fields))
