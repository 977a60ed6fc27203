"""Spans of the probe become rows, column by column; what is no such thing stays what it was."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from probe_spans import RESOURCE, Request, body, edge, event, sample, span
from vllm_slo.exporters import records
from vllm_slo.exporters.otlp import fast, plain
from vllm_slo.exporters.otlp.decoded import Decoded, DecodeSettings
from vllm_slo.exporters.otlp.probe import attribute_key
from vllm_slo.exporters.schema import ENGINE_SAMPLES, EVENTS, FLAG, INTEGER, REAL, REQUESTS, SECONDS, TABLES, TEXT, TIME

START = 1_796_080_000_123_456_789
RECEIVED = START + 5 * 10**9
REQUEST = Request("cmpl-1-0", START)
EXAMPLES: dict[pa.DataType, tuple[Any, Any]] = {
    SECONDS: (1_234_567_891, Decimal("1.234567891")),
    TIME: (START, datetime.fromtimestamp(START // 1000 / 1e6, UTC)),
    INTEGER: (7, 7),
    REAL: (0.25, 0.25),
    FLAG: (True, True),
    TEXT: ("x", "x"),
}
"""Type of a column -> what its attribute holds, what the column then holds."""
OF_THE_SPAN = {"day", "time", "start_time", "end_time", "trace_id", "span_id", "parent_span_id", "source", "records"}
OF_THE_SPAN |= {"service_name", "service_instance_id", "shard", "model", "status", "attributes", "resource_attributes"}
OF_THE_SPAN |= {"received_time", "quality"}


def decode(*spans: Span, settings: DecodeSettings | None = None, resource: dict[str, str] | None = None) -> Decoded:
    raw = body(spans, resource)
    decoded = plain.decode(raw, RECEIVED, settings or DecodeSettings())
    again = fast.decode(raw, RECEIVED, settings or DecodeSettings())
    schemas = {table.name: table.schema for table in TABLES}
    assert decoded.lot.tables.keys() == again.lot.tables.keys() | {"requests", "spans"}
    for name, table in decoded.lot.tables.items():
        table.validate(full=True)
        assert [schemas[name].field(column) for column in table.schema.names] == list(table.schema)
        if table.num_rows:
            assert table.equals(again.lot.tables[name])
    return decoded


def row(table: str, *spans: Span, **options: Any) -> dict[str, Any]:
    (found,) = decode(*spans, **options).lot.tables[table].to_pylist()
    return dict(found)


@pytest.mark.parametrize("column", [c for c in REQUESTS.columns if c.name not in OF_THE_SPAN], ids=lambda c: c.name)
def test_every_column_of_a_request_has_its_attribute(column: Any) -> None:
    sent, held = EXAMPLES[column.type]
    found = row(
        "requests", span(records.ENGINE_REQUEST, "x", START, START, {attribute_key(column.name, column.type): sent})
    )
    assert found[column.name] == held
    assert found["attributes"] is None


@pytest.mark.parametrize(
    "column", [c for c in ENGINE_SAMPLES.columns if c.name not in OF_THE_SPAN], ids=lambda c: c.name
)
def test_every_column_of_a_sample_has_its_attribute(column: Any) -> None:
    sent, held = EXAMPLES[column.type]
    found = row(
        "engine_samples",
        span(records.ENGINE_SAMPLE, "x", START, START + 10**9, {attribute_key(column.name, column.type): sent}),
    )
    assert found[column.name] == held


def test_an_engine_record_is_a_row() -> None:
    found = row("requests", REQUEST.engine())
    assert (found["source"], found["records"], found["quality"]) == ("probe", "engine", None)
    assert (found["request_id"], found["engine_request_id"]) == ("cmpl-1-0", REQUEST.engine_request_id)
    assert (found["model"], found["shard"], found["service_instance_id"]) == ("m", "a", "a")
    assert found["queue_seconds"] == Decimal("0.02")
    assert found["prompt_tokens"] == 100
    assert found["start_time"].microsecond == 123456


def test_parts_that_are_left_out_are_zero_after_their_milestone_and_null_before_it() -> None:
    whole = row("requests", REQUEST.engine())
    assert sum(whole[f"{stem}_seconds"] for stem in records.QUEUE_PARTS) == whole["queue_seconds"]
    assert sum(whole[f"{stem}_seconds"] for stem in records.PREFILL_PARTS) == whole["prefill_seconds"]
    assert sum(whole[f"{stem}_seconds"] for stem in records.DECODE_PARTS) == whole["decode_seconds"]
    assert (whole["preempted_seconds"], whole["recompute_seconds"], whole["queue_behind_seconds"]) == (0, 0, 0)
    waiting = {records.key("finish_reason"): "abort", records.time_key("queued_time"): START}
    never = row("requests", span(records.ENGINE_REQUEST, "x", START, START, waiting))
    assert [never[f"{stem}_seconds"] for stem in records.QUEUE_PARTS] == [0] * 5
    assert {never[f"{stem}_seconds"] for stem in (*records.PREFILL_PARTS, *records.DECODE_PARTS)} == {None}
    assert never["preempted_seconds"] is None


def test_a_front_end_record_that_knows_the_http_side_says_so() -> None:
    assert row("requests", REQUEST.frontend())["records"] == "frontend+edge"
    offline = dict.fromkeys((records.key("http_status"), records.key("http_route"), records.key("client_disconnected")))
    without = REQUEST.frontend(**offline, **{records.duration_key("http_duration"): None})
    assert row("requests", without)["records"] == "frontend"


def test_a_request_that_never_reached_the_engine_is_a_row() -> None:
    found = row("requests", edge("r", START, 503, **{records.key("admission_rejection"): "max_num_queued_reqs"}))
    assert (found["records"], found["finish_reason"], found["http_status"]) == ("edge", "rejected", 503)
    assert json.loads(found["attributes"]) == {"vllm_slo.admission_rejection": "max_num_queued_reqs"}


def test_an_attribute_of_the_wrong_type_costs_itself_alone() -> None:
    wrong = {records.key("preemptions"): "many", records.duration_key("queue"): 10**18, records.key("lora"): 3}
    found = row("requests", REQUEST.engine(**wrong))
    assert (found["preemptions"], found["queue_seconds"], found["lora"]) == (None, None, None)
    assert json.loads(found["attributes"]) == wrong
    assert found["prefill_seconds"] == Decimal("0.05")
    later = row(
        "requests", REQUEST.engine(**{records.time_key("queued_time"): -1, records.key("client_disconnected"): 1})
    )
    assert (later["queued_time"], later["client_disconnected"]) == (None, None)


def test_a_sample_names_its_engine_and_the_second_it_covers() -> None:
    found = row("engine_samples", sample(START, requests_running=3, blocked_by="kv_blocks"))
    assert (found["source"], found["engine"], found["service_instance_id"]) == ("probe", "0", "a")
    assert (found["requests_running"], found["blocked_by"], found["interval_seconds"]) == (3.0, "kv_blocks", 1.0)
    assert found["time"] == datetime.fromtimestamp((START + 10**9) // 1000 / 1e6, UTC)
    assert found["requests_waiting"] is None
    assert row("engine_samples", sample(START), resource={})["service_instance_id"] == "vllm"


def test_an_event_has_a_stable_id() -> None:
    found = row("events", event(START, "started", detail='{"max_num_seqs": 2}'))
    assert found == row("events", event(START, "started", detail='{"max_num_seqs": 2}'))
    assert (found["kind"], found["title"], found["detail"]) == ("configuration", "started", '{"max_num_seqs": 2}')
    assert (found["source"], found["model"], found["end_time"]) == ("probe", "m", None)
    assert len(found["event_id"]) == 32
    assert row("events", event(START, "x", event_id="mine"))["event_id"] == "mine"
    assert {c.name for c in EVENTS.columns if c.required} <= {
        name for name, value in found.items() if value is not None
    }


@pytest.mark.parametrize(
    "other", [event(START, "t", kind="party"), event(START, ""), span("vllm_slo.news", "x", START, START, {})]
)
def test_what_the_contract_does_not_name_stays_an_ordinary_span(other: Span) -> None:
    decoded = decode(other)
    assert decoded.spans["name"].to_pylist() == [other.name]
    assert decoded.lot.tables.keys() == {"requests", "spans"}
    assert decoded.requests.num_rows == 0


def test_the_names_mean_nothing_in_another_scope() -> None:
    raw = body([REQUEST.engine()]).replace(records.SCOPE.encode(), b"vllm_slo.xxxxx")
    assert plain.decode(raw, RECEIVED, DecodeSettings()).spans.num_rows == 1


def test_stock_and_probe_spans_of_one_body_are_rows_of_one_table() -> None:
    decoded = decode(REQUEST.stock(), REQUEST.engine(), REQUEST.frontend(), sample(START))
    assert decoded.requests["records"].to_pylist() == ["stock", "engine", "frontend+edge"]
    assert decoded.requests["source"].to_pylist() == ["stock", "probe", "probe"]
    assert decoded.rows == 4
    assert len(set(decoded.requests["start_time"].to_pylist())) == 1


def test_stock_spans_of_a_server_with_the_probe_are_recognised_by_the_resource() -> None:
    assert decode(REQUEST.stock()).lot.probe
    assert not decode(REQUEST.stock(), resource={"service.name": "vllm"}).lot.probe
    assert RESOURCE[records.PROBE_VERSION]


def test_prompt_text_beside_what_the_probe_writes_never_stays() -> None:
    secret = {"gen_ai.prompt": "SECRET"}
    made = sample(START)
    made.attributes.add(key="gen_ai.prompt").value.string_value = "SECRET"
    told = event(START, "t")
    told.events.add(name="e").attributes.add(key="gen_ai.prompt").value.string_value = "SECRET"
    decoded = decode(REQUEST.engine(**secret), made, told)
    assert b"SECRET" not in decoded.clean_body
    assert "SECRET" not in repr([table.to_pylist() for table in decoded.lot.tables.values()])
    assert decoded.dropped_attributes == {"gen_ai.prompt*": 3}
    tenants = DecodeSettings(prompt_text_attributes=("vllm_slo.tenant",))
    frontend = REQUEST.frontend(**{records.key("tenant"): "SECRET"})
    assert row("requests", frontend, settings=tenants)["tenant"] is None


def test_implausible_times_are_marked() -> None:
    early = span(records.EDGE_REQUEST, "x", 5, 6, {})
    backwards = span(records.EDGE_REQUEST, "x", START, START - 1, {})
    assert row("requests", early)["quality"] == "clock_skew"
    assert row("requests", backwards)["quality"] == "end_before_start"


def test_beside_the_probe_stock_spans_keep_their_fast_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = body([REQUEST.stock()]) + body([REQUEST.engine(), sample(START)]) + body([REQUEST.stock()])
    raw += body([REQUEST.frontend(**{"gen_ai.prompt": "SECRET"})])
    expected = plain.decode(raw, RECEIVED, DecodeSettings())
    handed: list[bytes] = []
    whole = plain.decode

    def counted(given: bytes, received_ns: int, settings: DecodeSettings) -> Decoded:
        handed.append(given)
        return whole(given, received_ns, settings)

    monkeypatch.setattr(fast.plain, "decode", counted)
    found = fast.decode(raw, RECEIVED, DecodeSettings())
    assert len(handed) == 1
    assert len(ExportTraceServiceRequest.FromString(handed[0]).resource_spans) == 2
    for name in ("requests", "engine_samples"):
        assert found.lot.tables[name].equals(expected.lot.tables[name])
    assert (found.rows, found.lot.probe, found.dropped_attributes) == (5, True, {"gen_ai.prompt*": 1})
    assert b"SECRET" not in found.clean_body
    again = whole(found.clean_body, RECEIVED, DecodeSettings())
    assert again.requests.num_rows == 4
    refused = Request("cmpl-2-0", START).engine()
    refused.span_id = b""
    both = raw + body([refused])
    assert fast.decode(both, RECEIVED, DecodeSettings()).refused == whole(both, RECEIVED, DecodeSettings()).refused
    clean = body([REQUEST.stock()]) + body([REQUEST.engine()])
    assert fast.decode(clean, RECEIVED, DecodeSettings()).clean_body is clean
