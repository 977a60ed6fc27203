"""Parquet with the columns of a lake table or of its view -> rows of that table, checked like what is received."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vllm_slo.exporters.importers.items import Item, Rows, Unreadable
from vllm_slo.exporters.otlp.clean import PromptText, prompt_text
from vllm_slo.exporters.otlp.decoded import DecodeSettings
from vllm_slo.exporters.otlp.refusals import Refusals
from vllm_slo.exporters.schema import BYTES, DATE, QUALITY_REASONS, TABLES, TEXT, TIME, Table

BATCH_ROWS = 65_536

_ID_BYTES = {"trace_id": 16, "span_id": 8, "parent_span_id": 8}
_FILLED = frozenset({"day", "received_time"})
"""Columns that are made when they are absent: the day from the time, the receipt from the end."""
_JSON_COLUMNS = ("attributes", "resource_attributes", "events", "links")


def read(source: Any, settings: DecodeSettings) -> Iterator[Item]:
    """The rows of a Parquet file (path or file object), in batches.

    Which table it is of: the one whose required columns it has. Columns of neither table nor view are passed over.
    Refused rows: `invalid_trace_id`, `invalid_span_id` (a wrong length or all zero), `missing_value` (null in a
    required column), `unknown_quality`, `malformed_json`. Attributes that carry prompt text are dropped from the JSON
    columns.
    """
    try:
        file = pq.ParquetFile(source)
    except (pa.ArrowException, OSError) as error:
        yield Unreadable("malformed_parquet", str(error), "file")
        return
    with file:
        table = _table_of(set(file.schema_arrow.names))
        if table is None:
            yield Unreadable(
                "unknown_table",
                f"columns {', '.join(file.schema_arrow.names[:6])} ... are of no table of the lake",
                "file",
            )
            return
        clean = prompt_text(settings.prompt_text_attributes)
        position = 0
        batches = file.iter_batches(BATCH_ROWS)
        while True:
            place = f"rows from {position}"
            try:
                batch = next(batches, None)
                if batch is None:
                    return
                yield _rows(table, pa.Table.from_batches([batch]), place, clean)
            except (pa.ArrowException, OSError, ValueError) as error:
                yield Unreadable("malformed_rows", f"{table.name}: {error}", place)
                if batch is None:
                    return
            position += 0 if batch is None else batch.num_rows


def _table_of(names: set[str]) -> Table | None:
    """The table whose required columns are all there; of several, the one that knows most of the columns."""
    fitting = [
        table
        for table in TABLES
        if {c.name for c in table.columns if c.required} - _FILLED - set(table.partition_by) <= names
    ]
    return max(fitting, key=lambda table: len(names & set(table.schema.names)), default=None)


def _rows(table: Table, stored: pa.Table, place: str, clean: PromptText) -> Rows:
    refusals = Refusals()
    dropped: dict[str, int] = {}
    columns: dict[str, pa.ChunkedArray] = {}
    for field in table.schema:
        if field.name in stored.column_names:
            columns[field.name] = _typed(stored[field.name], field.type)
        else:
            columns[field.name] = pa.chunked_array([pa.nulls(stored.num_rows, field.type)])
    if "received_time" in columns:
        columns["received_time"] = pc.coalesce(columns["received_time"], columns["end_time"])
    if "day" in columns:
        columns["day"] = _day(columns, table.time_column)
    no_json: dict[str, Any] = {}
    for name in _JSON_COLUMNS:
        if name in columns:
            columns[name], no_json[name] = _cleaned(columns[name], clean, dropped)
    rows = pa.table([columns[field.name] for field in table.schema], schema=table.schema)
    keep = np.ones(rows.num_rows, dtype=bool)
    unreadable = ((name, "malformed_json", ~bad) for name, bad in no_json.items())
    for name, reason, good in (*_checks(table, rows), *unreadable):
        bad = keep & ~good
        if bad.any():
            refusals.add(reason, f"{place}: row {int(np.argmax(bad))}: {name}", int(bad.sum()))
            keep &= good
    return Rows(table.name, rows.filter(pa.array(keep)), place, tuple(refusals.list()), dropped)


def _checks(table: Table, rows: pa.Table) -> Iterator[tuple[str, str, Any]]:
    """(column, reason, mask of the good rows)."""
    for column in table.columns:
        if column.required and rows[column.name].null_count:
            yield column.name, "missing_value", _mask(pc.is_valid(rows[column.name]))
    if "trace_id" in rows.column_names:
        for name in ("trace_id", "span_id"):
            size = _ID_BYTES[name]
            good = pc.and_(
                pc.equal(pc.binary_length(rows[name]), size), pc.not_equal(rows[name], pa.scalar(bytes(size), BYTES))
            )
            yield name, f"invalid_{name}", _mask(pc.fill_null(good, False))
    if "quality" in rows.column_names and table.name != "rollups":
        known = pa.array([None, *QUALITY_REASONS], TEXT)
        yield "quality", "unknown_quality", _mask(pc.is_in(rows["quality"], value_set=known))


def _mask(values: pa.ChunkedArray) -> Any:
    return np.asarray(values.to_numpy(), dtype=bool)


def _typed(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """The values in the type of the schema: hex text as bytes, times without zone as UTC."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if kind == BYTES and pa.types.is_string(values.type):
        return pa.chunked_array([pa.array([_hex(text) for text in values.to_pylist()], BYTES)])
    if kind == TIME and pa.types.is_timestamp(values.type) and values.type.tz is None:
        values = values.cast(pa.timestamp(values.type.unit, "UTC"))
    if pa.types.is_decimal(kind) and pa.types.is_floating(values.type):
        values = pc.round(values, kind.scale)
    return values.cast(kind)


def _hex(text: str | None) -> bytes | None:
    if text is None:
        return None
    try:
        return bytes.fromhex(text)
    except ValueError:
        return b""


def _day(columns: dict[str, pa.ChunkedArray], time_column: str) -> pa.ChunkedArray:
    """The day of the time, or what the file says (a day of receipt) where it says something."""
    return pc.coalesce(columns["day"], columns[time_column].cast(DATE))


def _cleaned(
    texts: pa.ChunkedArray, clean: PromptText, dropped: dict[str, int]
) -> tuple[pa.ChunkedArray, npt.NDArray[np.bool_]]:
    """JSON texts without the keys that carry prompt text, and which are no JSON; each distinct text is read once."""
    encoded = texts.combine_chunks().dictionary_encode()
    changed = False
    kept: list[str | None] = []
    broken: list[bool] = []
    counts = np.bincount(encoded.indices.drop_null().to_numpy(), minlength=len(encoded.dictionary))
    for text, count in zip(encoded.dictionary.to_pylist(), counts, strict=True):
        found: dict[str, int] = {}
        try:
            value = _without(orjson.loads(text), clean, found)
        except orjson.JSONDecodeError:
            kept.append(None)
            broken.append(True)
            continue
        for pattern, times in found.items():
            dropped[pattern] = dropped.get(pattern, 0) + times * int(count)
        changed |= bool(found)
        kept.append(orjson.dumps(value).decode() if found and value else None if found else text)
        broken.append(False)
    bad = pc.fill_null(pa.array(broken, pa.bool_()).take(encoded.indices), False)
    if changed or any(broken):
        texts = pa.chunked_array([pa.array(kept, TEXT).take(encoded.indices)])
    return texts, np.asarray(bad.to_numpy(zero_copy_only=False), dtype=bool)


def _without(value: Any, clean: PromptText, dropped: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [_without(item, clean, dropped) for item in value]
    if not isinstance(value, dict):
        return value
    kept = {}
    for key, item in value.items():
        pattern = clean.pattern(key)
        if pattern is None:
            kept[key] = _without(item, clean, dropped)
        else:
            dropped[pattern] = dropped.get(pattern, 0) + 1
    return kept
