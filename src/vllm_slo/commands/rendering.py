"""Query results as text: values exact, times ISO in UTC, nulls told from empty text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from decimal import Decimal
from typing import IO, Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table
from rich.text import Text

NULL = "null"
"""How a table shows null; text that reads `null` is shown in quotes."""
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that would command a terminal. Spans come from anywhere, so tables show these as text."""


def plain_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[tuple[Any, ...]]:
    """Rows of JSON-like values: text, numbers, booleans, None, lists and dictionaries.

    Times become ISO text (UTC with Z, to the stored precision), bytes hex, decimals stay Decimal.
    """
    for batch in batches:
        columns = [_plain(column).to_pylist() for column in batch.columns]
        if columns:
            yield from (tuple(map(_value, row)) for row in zip(*columns, strict=True))


def write_csv(schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: IO[str]) -> int:
    """RFC 4180 with a header and LF; null is nothing, empty text is `""`. Returns the rows."""
    out.write(",".join(_csv(name) for name in schema.names) + "\n")
    rows = 0
    for row in plain_rows(batches):
        out.write(",".join("" if value is None else _csv(_text(value)) for value in row) + "\n")
        rows += 1
    return rows


def write_jsonl(schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: IO[str]) -> int:
    """One JSON object a line. Returns the rows."""
    rows = 0
    for row in plain_rows(batches):
        out.write(_object(schema.names, row) + "\n")
        rows += 1
    return rows


def write_json(schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: IO[str]) -> int:
    """One JSON list of objects, a row a line. Returns the rows."""
    rows = 0
    for row in plain_rows(batches):
        out.write((",\n" if rows else "[\n") + _object(schema.names, row))
        rows += 1
    out.write("\n]\n" if rows else "[]\n")
    return rows


def write_table(schema: pa.Schema, batches: Iterable[pa.RecordBatch], out: IO[str], width: int | None) -> int:
    """Aligned columns; where they do not fit ``width`` characters, one column a line. None: any width fits."""
    rows = [tuple(_cell(value) for value in row) for row in plain_rows(batches)]
    numeric = [_is_number(field.type) for field in schema]
    needed = sum(max([len(name), *(_widest(row[i]) for row in rows)]) + 2 for i, name in enumerate(schema.names))
    console = Console(file=out, width=max(needed, 20) if width is None else width, highlight=False)
    if width is not None and needed > width:
        _write_records(schema.names, rows, console)
        return len(rows)
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for name, right in zip(schema.names, numeric, strict=True):
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    return len(rows)


def write_counts(head: Sequence[str], rows: Sequence[Sequence[str]], out: IO[str]) -> None:
    """Aligned text columns; every column but the first is right-aligned where its first cell is a number."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    width = 20
    for position, name in enumerate(head):
        cells = [row[position] for row in rows]
        right = position > 0 and bool(cells) and cells[0][:1].isdigit()
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
        width += max(map(len, [name, *cells])) + 2
    for row in rows:
        table.add_row(*map(Text, row))
    Console(file=out, highlight=False, width=width).print(table)


def _write_records(names: Sequence[str], rows: Sequence[tuple[Text, ...]], console: Console) -> None:
    for number, row in enumerate(rows, start=1):
        console.print(Text(f"row {number}", style="bold"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for name, cell in zip(names, row, strict=True):
            table.add_row(Text(name), cell)
        console.print(table)


def _plain(column: pa.Array) -> pa.Array:
    kind = column.type
    if pa.types.is_timestamp(kind):
        if kind.tz is None:
            return pc.strftime(column, format="%Y-%m-%dT%H:%M:%S")
        return pc.strftime(column.cast(pa.timestamp(kind.unit, "UTC")), format="%Y-%m-%dT%H:%M:%SZ")
    return column


def _value(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
    if isinstance(value, list):
        return [_value(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _value(item) for key, item in value.items()}
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return value


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, dict)):
        return _json(value)
    return _decimal(value) if _is_decimal(value) else str(value)


def _cell(value: Any) -> Text:
    if value is None:
        return Text(NULL, style="dim italic")
    text = _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", _text(value))
    return Text(json.dumps(text) if text == NULL else text)


def _csv(text: str) -> str:
    if not text or any(character in text for character in ',"\r\n'):
        return '"' + text.replace('"', '""') + '"'
    return text


def _object(names: Sequence[str], row: Sequence[Any]) -> str:
    return "{" + ", ".join(f"{_json(name)}: {_json(value)}" for name, value in zip(names, row, strict=True)) + "}"


def _json(value: Any) -> str:
    """JSON of a value; decimals keep every digit, as JSON numbers."""
    if _is_decimal(value):
        return _decimal(value)
    if isinstance(value, list):
        return "[" + ", ".join(map(_json, value)) + "]"
    if isinstance(value, dict):
        return _object(list(value), list(value.values()))
    return json.dumps(value, ensure_ascii=False, default=str)


def _is_decimal(value: Any) -> bool:
    return isinstance(value, Decimal)


def _decimal(value: Any) -> str:
    return format(value, "f")


def _is_number(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))


def _widest(cell: Text) -> int:
    return max((len(line) for line in cell.plain.splitlines()), default=0)


Writer = Callable[[pa.Schema, Iterable[pa.RecordBatch], IO[str]], int]
WRITERS: dict[str, Writer] = {"csv": write_csv, "json": write_json, "jsonl": write_jsonl}
