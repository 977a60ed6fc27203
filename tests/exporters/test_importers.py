"""Which form a file has, and how its parts are read."""

from __future__ import annotations

import gzip
import json
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_slo.exporters.importers import documents
from vllm_slo.exporters.importers.forms import form_of
from vllm_slo.exporters.importers.items import Body, Item, Rows, Unreadable
from vllm_slo.exporters.importers.reading import ImportFileError, digest, read
from vllm_slo.exporters.importers.receipt import settled
from vllm_slo.exporters.otlp.decoded import DecodeSettings
from vllm_slo.exporters.schema import REQUESTS, SPANS, TABLES

AT = datetime(2026, 11, 30, 12, tzinfo=UTC)


def items(content: bytes, folder: Path) -> list[Item]:
    """What a file with this content is read into."""
    path = folder / "file"
    path.write_bytes(content)
    return list(read(path, DecodeSettings()))


def a_request(**changes: Any) -> dict[str, Any]:
    """One row of requests that is sound."""
    return {
        "day": AT.date(),
        "start_time": AT,
        "end_time": AT + timedelta(seconds=1),
        "received_time": AT + timedelta(seconds=2),
        "trace_id": b"t" * 16,
        "span_id": b"s" * 8,
        "source": "stock",
    } | changes


def parquet(table: pa.Table) -> bytes:
    """A Parquet file."""
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return bytes(sink.getvalue())


@pytest.mark.parametrize(
    ("head", "form"),
    [
        (b"", "empty"),
        (b" \r\n\t", "empty"),
        (b"\xef\xbb\xbf", "empty"),
        (b"PAR1....", "parquet"),
        (b'{"resourceSpans":[]}', "json_lines"),
        (b'{"resourceSpans":[]}\n', "json_lines"),
        (b'\xef\xbb\xbf  {"a":1}\n{"a":2}', "json_lines"),
        (b'{\n  "resourceSpans": []\n}', "json"),
        (b'{"resourceSpans": [\n]}', "json"),
        (b"{not json}\n{}", "json_lines"),
        (b"[\n{}\n]", "json"),
        (b"\x0a\x00", "protobuf"),
        (b"\x00\x00\x00\x02\x0a\x00", "delimited"),
        (b"\x00\x00\x00\x09\x28\xb5\x2f\xfd", "delimited"),
        (b"\x00\x00\x00\x02\x12\x00", None),
        (b"# yaml: 1", None),
        (b"\xff\xfe{", None),
    ],
)
def test_the_form_is_told_by_the_first_bytes(head: bytes, form: str | None) -> None:
    assert form_of(head) == form


@settings(max_examples=400, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_no_content_crashes_the_reader(content: bytes, packed: bool) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for item in items(gzip.compress(content) if packed else content, Path(folder)):
            if isinstance(item, Unreadable):
                assert item.reason.replace("_", "").isalpha()


@pytest.mark.parametrize("cut", [1, 10, 500])
def test_a_parquet_file_that_is_cut_is_unreadable(cut: int, tmp_path: Path) -> None:
    content = parquet(pa.Table.from_pylist([a_request()], REQUESTS.schema))
    (item,) = items(content[:-cut], tmp_path)
    assert isinstance(item, Unreadable)
    assert item.reason == "malformed_parquet"


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_the_table_of_a_parquet_file_is_told_by_its_columns(table: Any, tmp_path: Path) -> None:
    (item,) = items(parquet(_one_row(table.schema)), tmp_path)
    assert isinstance(item, Rows)
    assert item.table == table.name
    assert item.rows.schema == table.schema


def _one_row(schema: pa.Schema) -> pa.Table:
    values: dict[pa.DataType, Any] = {pa.binary(): b"", pa.string(): "x", pa.date32(): date(2026, 1, 1)}
    row = {
        field.name: values.get(field.type, AT if pa.types.is_timestamp(field.type) else 1)
        for field in schema
        if not field.nullable
    }
    return pa.Table.from_pylist([row], schema)


def test_bad_rows_of_a_parquet_file_are_refused_by_reason_and_the_others_kept(tmp_path: Path) -> None:
    rows = [
        a_request(),
        a_request(trace_id=b"short"),
        a_request(span_id=bytes(8)),
        a_request(trace_id=None),
        a_request(quality="nonsense"),
        a_request(quality="clock_skew"),
    ]
    loose = pa.schema([pa.field(field.name, field.type) for field in REQUESTS.schema])
    missing = pa.Table.from_pylist([*rows, a_request(source=None)], loose)
    (item,) = items(parquet(missing), tmp_path)
    assert isinstance(item, Rows)
    assert item.rows.num_rows == 2
    assert {refusal.reason: refusal.count for refusal in item.refused} == {
        "missing_value": 1,
        "invalid_trace_id": 2,
        "invalid_span_id": 1,
        "unknown_quality": 1,
    }
    assert "row 6: source" in item.refused[0].detail


def test_hex_ids_times_without_zone_and_absent_columns_are_taken(tmp_path: Path) -> None:
    table = pa.table(
        {
            "start_time": pa.array([datetime(2026, 11, 30, 23, 59)], pa.timestamp("ns")),
            "end_time": pa.array([datetime(2026, 12, 1)], pa.timestamp("ms")),
            "trace_id": ["ab" * 16],
            "span_id": ["cd" * 8],
            "source": pa.array(["client"]).dictionary_encode(),
            "queue_seconds": [0.1],
            "frontend_seconds": [0.2],
        }
    )
    (item,) = items(parquet(table), tmp_path)
    assert isinstance(item, Rows)
    row = item.rows.to_pylist()[0]
    assert row["trace_id"] == b"\xab" * 16
    assert (row["day"], row["start_time"]) == (date(2026, 11, 30), datetime(2026, 11, 30, 23, 59, tzinfo=UTC))
    assert row["received_time"] == datetime(2026, 12, 1, tzinfo=UTC)
    assert str(row["queue_seconds"]) == "0.100000000"
    assert row["parent_span_id"] is None


def test_attributes_that_are_no_json_cost_their_row_alone(tmp_path: Path) -> None:
    rows = [a_request(attributes='{"a": 1}'), a_request(attributes="{no json"), a_request(attributes=None)]
    (item,) = items(parquet(pa.Table.from_pylist(rows, REQUESTS.schema)), tmp_path)
    assert isinstance(item, Rows)
    assert item.rows["attributes"].to_pylist() == ['{"a": 1}', None]
    assert [(refusal.reason, refusal.count) for refusal in item.refused] == [("malformed_json", 1)]
    assert "row 1: attributes" in item.refused[0].detail


def test_a_record_that_unpacks_without_end_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LARGEST_RECORD", 1000)
    bomb = pa.compress(b"\n" * 100_000, codec="zstd", asbytes=True)
    good = pa.compress(b"\n\x00", codec="zstd", asbytes=True)
    content = b"".join(len(record).to_bytes(4, "big") + record for record in (bomb, good))
    first, second = items(content, tmp_path)
    assert isinstance(first, Unreadable)
    assert (first.reason, first.place) == ("too_large", "record 1")
    assert isinstance(second, Body)


def test_a_foreign_parquet_file_says_which_columns_it_has(tmp_path: Path) -> None:
    (item,) = items(parquet(pa.table({"a": [1], "b": [2]})), tmp_path)
    assert isinstance(item, Unreadable)
    assert (item.reason, "a, b" in item.detail) == ("unknown_table", True)


def test_a_record_whose_length_cannot_be_right_ends_the_reading(tmp_path: Path) -> None:
    good = b"\x00\x00\x00\x02\x0a\x00"
    found = items(good + b"\xff\xff\xff\xff" + good, tmp_path)
    assert [type(item).__name__ for item in found] == ["Body", "Unreadable"]
    assert isinstance(found[1], Unreadable)
    assert found[1].reason == "malformed_length"


def test_progress_ends_at_the_size_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(gzip.compress(b"\n".join(json.dumps({"resourceSpans": []}).encode() for _ in range(1000))))
    seen: list[int] = []
    assert len(list(read(path, DecodeSettings(), progress=seen.append))) == 1000
    assert seen == sorted(seen)
    assert seen[-1] == path.stat().st_size


def test_a_file_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    with pytest.raises(ImportFileError, match="absent: No such file"):
        digest(tmp_path / "absent")


def test_the_receipt_is_the_latest_end_of_what_is_not_skewed() -> None:
    later = AT + timedelta(days=9)
    requests = pa.Table.from_pylist(
        [a_request(), a_request(start_time=later, end_time=later, day=later.date(), quality="clock_skew")],
        REQUESTS.schema,
    )
    spans = SPANS.schema.empty_table()
    tables = settled({"requests": requests, "spans": spans}, AT + timedelta(days=1))
    received, empty = tables["requests"], tables["spans"]
    assert set(received["received_time"].to_pylist()) == {AT + timedelta(seconds=1)}
    assert received["day"].to_pylist() == [AT.date(), AT.date()]
    assert empty.num_rows == 0
    only_skewed = settled({"requests": requests.slice(1)}, AT)["requests"]
    assert only_skewed["received_time"].to_pylist() == [AT]
    assert received.schema == REQUESTS.schema
