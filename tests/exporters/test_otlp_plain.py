"""The complete decoder: what becomes a row, what is refused alone, what is taken out."""

from __future__ import annotations

import base64
import gzip
import json
import math
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from vllm_slo.exporters.conventions import PROMPT_TEXT_ATTRIBUTES
from vllm_slo.exporters.otlp import plain
from vllm_slo.exporters.otlp.decoded import BodyError, Decoded, DecodeSettings, ShardRule
from vllm_slo.exporters.otlp.lot import STOCK_REQUESTS
from vllm_slo.exporters.schema import SPANS

RECEIVED = 1_796_080_000_000_000_000
SETTINGS = DecodeSettings()
SECRET = "the patient is called Wilhelmina"


def any_value(value: Any) -> AnyValue:
    match value:
        case None:
            return AnyValue()
        case bool():
            return AnyValue(bool_value=value)
        case int():
            return AnyValue(int_value=value)
        case float():
            return AnyValue(double_value=value)
        case str():
            return AnyValue(string_value=value)
        case bytes():
            return AnyValue(bytes_value=value)
        case list():
            return AnyValue(array_value=ArrayValue(values=map(any_value, value)))
        case _:
            return AnyValue(kvlist_value=KeyValueList(values=attributes(value)))


def attributes(values: dict[str, Any]) -> list[KeyValue]:
    return [KeyValue(key=key, value=any_value(value)) for key, value in values.items()]


VLLM = {
    "gen_ai.latency.time_to_first_token": 0.25,
    "gen_ai.latency.e2e": 1.5,
    "gen_ai.latency.time_in_queue": 0.05,
    "gen_ai.usage.prompt_tokens": 100,
    "gen_ai.usage.completion_tokens": 20,
    "gen_ai.latency.time_in_model_prefill": 0.15,
    "gen_ai.latency.time_in_model_decode": 1.25,
    "gen_ai.latency.time_in_model_inference": 1.4,
    "gen_ai.request.id": "cmpl-1",
}


def span(number: int = 1, name: str = "llm_request", values: dict[str, Any] | None = None, **fields: Any) -> Span:
    given = {
        "trace_id": number.to_bytes(16),
        "span_id": number.to_bytes(8),
        "name": name,
        "kind": 2,
        "start_time_unix_nano": RECEIVED - 2_000_000_000,
        "end_time_unix_nano": RECEIVED - 500_000_000,
        "attributes": attributes(VLLM if values is None else values),
    }
    return Span(**(given | fields))


def body(*spans: Span, resource: dict[str, Any] | None = None, scope: str = "vllm.tracing.otel") -> bytes:
    request = ExportTraceServiceRequest()
    group = request.resource_spans.add()
    group.resource.attributes.extend(attributes(resource or {"service.name": "vllm", "service.instance.id": "a"}))
    into = group.scope_spans.add()
    into.scope.name = scope
    into.spans.extend(spans)
    return request.SerializeToString()


def decode(raw: bytes, settings: DecodeSettings = SETTINGS) -> Decoded:
    decoded = plain.decode(raw, RECEIVED, settings)
    for table, schema in ((decoded.requests, STOCK_REQUESTS), (decoded.spans, SPANS.schema)):
        assert table.schema == schema
        table.validate(full=True)
    return decoded


def request_row(values: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    (row,) = decode(body(span(values=values, **fields))).requests.to_pylist()
    return dict(row)


def span_row(values: dict[str, Any], **fields: Any) -> dict[str, Any]:
    (row,) = decode(body(span(name="GET /", values=values, **fields), scope="http")).spans.to_pylist()
    return dict(row)


def test_a_stock_request_span_fills_its_columns() -> None:
    raw = body(span(parent_span_id=b"parentid"))
    decoded = decode(raw)
    (row,) = decoded.requests.to_pylist()
    assert decoded.clean_body is raw
    assert decoded.spans.num_rows == 0
    assert row["request_id"] == "cmpl-1"
    assert row["parent_span_id"] == b"parentid"
    assert (row["prompt_tokens"], row["completion_tokens"]) == (100, 20)
    assert row["time_to_first_token_seconds"] == Decimal("0.25")
    assert row["decode_seconds"] == Decimal("1.25")
    assert (row["source"], row["status"], row["quality"], row["attributes"]) == ("stock", "unset", None, None)


@pytest.mark.parametrize("captured", ["light", "smallkv"])
def test_recordings_of_a_real_vllm_decode_without_a_refusal(captures: Path, captured: str) -> None:
    requests = startup = 0
    for path in sorted((captures / captured / "otlp").glob("*.pb.gz")):
        raw = gzip.decompress(path.read_bytes())
        decoded = decode(raw)
        assert decoded.refused == []
        assert decoded.dropped_attributes == {}
        assert decoded.clean_body is raw
        assert set(decoded.requests.column("quality").to_pylist()) <= {None}
        assert set(decoded.spans.column("quality").to_pylist()) <= {"startup"}
        assert set(decoded.requests.column("shard").to_pylist()) <= {"general-0", "general-1"}
        assert decoded.requests.column("attributes").null_count == decoded.requests.num_rows
        requests += decoded.requests.num_rows
        startup += decoded.spans.num_rows
    assert requests == {"light": 1503, "smallkv": 2381}[captured]
    assert startup > 0


@pytest.mark.parametrize("value", [3, 3.0, "3", "3.0", "3e0"])
def test_numbers_are_read_from_ints_doubles_and_text(value: Any) -> None:
    row = request_row(VLLM | dict.fromkeys(("gen_ai.usage.prompt_tokens", "gen_ai.latency.e2e"), value))
    assert row["prompt_tokens"] == 3
    assert row["request_duration_seconds"] == 3
    assert row["attributes"] is None


@pytest.mark.parametrize("value", [math.nan, math.inf, "abc", "", "1_0", " 1", True, b"1", [1], {"a": 1}, 1e9, None])
def test_what_is_no_duration_stays_among_the_attributes(value: Any) -> None:
    row = request_row(VLLM | {"gen_ai.latency.time_in_queue": value})
    assert row["queue_seconds"] is None
    assert row["quality"] == "missing_milestone"
    assert list(json.loads(row["attributes"])) == ["gen_ai.latency.time_in_queue"]


@pytest.mark.parametrize("value", [1.5, 1e300, "99999999999999999999", "x", math.nan])
def test_what_is_no_integer_stays_among_the_attributes(value: Any) -> None:
    row = request_row(VLLM | {"gen_ai.request.max_tokens": value})
    assert row["max_tokens"] is None
    assert "gen_ai.request.max_tokens" in json.loads(row["attributes"])


@pytest.mark.parametrize("value", [2**63 - 1, -(2**63), str(2**63 - 1), "0", 0])
def test_integers_of_64_bits_fit(value: Any) -> None:
    assert request_row(VLLM | {"gen_ai.request.max_tokens": value})["max_tokens"] == int(value)


def test_an_attribute_without_a_column_is_kept_and_the_rest_is_not_repeated() -> None:
    row = request_row(VLLM | {"lora": "x", "deep": {"list": [1, 2.5, None, True], "raw": b"\0\xff"}})
    assert json.loads(row["attributes"]) == {
        "lora": "x",
        "deep": {"list": [1, 2.5, None, True], "raw": base64.b64encode(b"\0\xff").decode()},
    }


def test_inference_is_kept_only_where_prefill_and_decode_do_not_give_it() -> None:
    inference = "gen_ai.latency.time_in_model_inference"
    assert request_row(VLLM | {inference: 1.4000001})["attributes"] is None
    assert json.loads(request_row(VLLM | {inference: 1.5})["attributes"]) == {inference: 1.5}
    without = {key: value for key, value in VLLM.items() if key != "gen_ai.latency.time_in_model_decode"}
    assert json.loads(request_row(without)["attributes"]) == {inference: 1.4}


def test_of_a_repeated_attribute_the_last_counts() -> None:
    twice = span()
    twice.attributes.extend(attributes({"gen_ai.usage.prompt_tokens": 7}))
    (row,) = decode(body(twice)).requests.to_pylist()
    assert row["prompt_tokens"] == 7


def test_an_llm_request_of_another_scope_needs_a_request_id_or_a_latency() -> None:
    ours = decode(body(span(values={"gen_ai.latency.e2e": 1.0}), scope="proxy"))
    foreign = decode(body(span(values={"gen_ai.system": "other"}), scope="proxy"))
    assert (ours.requests.num_rows, foreign.spans.num_rows) == (1, 1)


def test_every_kind_of_attribute_is_json_text_in_spans() -> None:
    values = {
        "text": "ü\0\n",
        "no": False,
        "int": -(2**63),
        "double": 0.1,
        "nan": math.nan,
        "inf": math.inf,
        "minus": -math.inf,
        "raw": b"abc",
        "list": ["a", 1, [2, {"k": b""}]],
        "map": {"x": {"y": None}},
        "nothing": None,
        "": "empty key",
    }
    expected = values | {"nan": "NaN", "inf": "Infinity", "minus": "-Infinity", "raw": "YWJj"}
    expected["list"] = ["a", 1, [2, {"k": ""}]]
    assert json.loads(span_row(values)["attributes"]) == expected


def test_events_links_and_status_are_kept() -> None:
    row = span_row(
        {},
        kind=3,
        status={"code": 2, "message": "boom"},
        events=[Span.Event(name="retry", time_unix_nano=7, attributes=attributes({"n": 1}))],
        links=[Span.Link(trace_id=b"t" * 16, span_id=b"s" * 8, trace_state="a=b", attributes=attributes({"l": 2}))],
    )
    assert (row["kind"], row["status"], row["status_message"], row["attributes"]) == ("client", "error", "boom", None)
    assert json.loads(row["events"]) == [{"time_unix_nano": 7, "name": "retry", "attributes": {"n": 1}}]
    assert json.loads(row["links"]) == [
        {"trace_id": "74" * 16, "span_id": "73" * 8, "trace_state": "a=b", "attributes": {"l": 2}}
    ]


def test_unknown_kind_and_status_numbers_become_the_neutral_names() -> None:
    row = span_row({}, kind=77, status={"code": -5})
    assert (row["kind"], row["status"]) == ("unspecified", "unset")


def test_vllms_start_up_spans_are_marked() -> None:
    def marked(scope: str, kind: int, values: dict[str, Any], resource: dict[str, Any] | None = None) -> str | None:
        raw = body(span(name="Load model", kind=kind, values=values), scope=scope, resource=resource)
        (quality,) = decode(raw).spans.column("quality").to_pylist()
        assert quality is None or isinstance(quality, str)
        return quality

    code = {"code.function": "load_model"}
    assert marked("vllm.v1.worker", 1, code) == "startup"
    assert marked("other", 1, code, {"vllm.instrumenting_module_name": "vllm.worker"}) == "startup"
    assert marked("other", 1, code) is None
    assert marked("vllm.v1.worker", 2, code) is None
    assert marked("vllm.v1.worker", 1, {}) is None


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"trace_id": b""}, "invalid_trace_id"),
        ({"trace_id": b"x" * 15}, "invalid_trace_id"),
        ({"trace_id": b"x" * 24}, "invalid_trace_id"),
        ({"trace_id": bytes(16)}, "invalid_trace_id"),
        ({"span_id": b"x" * 12}, "invalid_span_id"),
        ({"span_id": bytes(8)}, "invalid_span_id"),
        ({"parent_span_id": b"x"}, "invalid_parent_span_id"),
        ({"links": [Span.Link(trace_id=b"x" * 16, span_id=b"x")]}, "invalid_link_span_id"),
        ({"links": [Span.Link(trace_id=b"x" * 8, span_id=b"x" * 8)]}, "invalid_link_trace_id"),
    ],
)
def test_a_span_with_a_wrong_id_is_refused_alone(fields: dict[str, Any], reason: str) -> None:
    raw = body(span(1), span(2, **fields), span(3), span(4, **fields))
    decoded = decode(raw)
    assert [row["trace_id"][-1] for row in decoded.requests.to_pylist()] == [1, 3]
    (refusal,) = decoded.refused
    assert (refusal.reason, refusal.count) == (reason, 2)
    assert "resource_spans[0].scope_spans[0].spans[1] ('llm_request')" in refusal.detail
    assert decoded.clean_body == body(span(1), span(3))


def test_a_parent_of_zeros_is_no_parent() -> None:
    assert request_row(parent_span_id=bytes(8))["parent_span_id"] is None


def test_links_to_no_valid_span_are_allowed() -> None:
    assert json.loads(span_row({}, links=[Span.Link(trace_id=bytes(16), span_id=bytes(8))])["links"])


def test_invalid_utf8_in_one_span_leaves_the_others() -> None:
    raw = body(span(1), span(2, values=VLLM | {"gen_ai.request.id": "marker"}), span(3)).replace(
        b"marker", b"mar\xffer"
    )
    decoded = decode(raw)
    assert [row["trace_id"][-1] for row in decoded.requests.to_pylist()] == [1, 3]
    (refusal,) = decoded.refused
    assert (refusal.reason, refusal.count) == ("malformed_span", 1)
    assert "resource_spans[0].scope_spans[0].spans[1]" in refusal.detail
    assert decode(decoded.clean_body).requests.equals(decoded.requests)


def test_a_truncated_attribute_in_one_span_leaves_the_others() -> None:
    raw = body(span(1), span(2, values={"cut": "12345678"}), span(3))
    broken = raw.replace(b"\x0a\x0812345678", b"\x0a\x0912345678")
    assert broken != raw
    decoded = decode(broken)
    assert decoded.requests.num_rows == 2
    assert [refusal.reason for refusal in decoded.refused] == ["malformed_span"]


def test_a_broken_resource_takes_only_its_own_spans_along() -> None:
    good, bad = (
        body(span(1)),
        body(span(2), span(3), resource={"service.name": "marker"}).replace(b"marker", b"mar\xffer"),
    )
    decoded = decode(good + bad + good)
    assert decoded.requests.num_rows == 2
    (refusal,) = decoded.refused
    assert (refusal.reason, refusal.count) == ("malformed_group", 2)
    assert "resource_spans[1].resource" in refusal.detail


def test_a_broken_scope_takes_only_its_own_spans_along() -> None:
    good, bad = body(span(1)), body(span(2), scope="vllm.marker").replace(b"marker", b"mar\xffer")
    decoded = decode(good + bad)
    assert decoded.requests.num_rows == 1
    assert [(r.reason, r.count) for r in decoded.refused] == [("malformed_group", 1)]


def test_a_group_that_cannot_be_read_at_all_counts_once() -> None:
    decoded = decode(body(span(1)) + b"\x0a\x03\x12\x7f\x00")
    assert decoded.requests.num_rows == 1
    assert [(r.reason, r.count) for r in decoded.refused] == [("malformed_group", 1)]


@pytest.mark.parametrize("raw", [b"{}", b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05abc", b"\xff", b"<html>"])
def test_what_is_no_protobuf_is_refused_whole(raw: bytes) -> None:
    with pytest.raises(BodyError, match="not an OTLP ExportTraceServiceRequest") as raised:
        decode(raw)
    assert raised.value.reason == "malformed_protobuf"


def test_an_empty_body_has_no_rows() -> None:
    decoded = decode(b"")
    assert (decoded.rows, decoded.refused, decoded.clean_body) == (0, [], b"")


def nested(levels: int) -> bytes:
    """A serialised ``AnyValue``: arrays in arrays, built by hand because protobuf will not."""
    value = AnyValue(string_value="bottom").SerializeToString()
    for _ in range(levels):
        array = b"\x0a" + varint(len(value)) + value
        value = b"\x2a" + varint(len(array)) + array
    return value


def varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + varint(rest) if rest else bytes([low])


def with_attribute(raw_span: Span, raw_value: bytes) -> bytes:
    """A body of three spans, the second with one more attribute."""
    pair = b"\x0a\x04deep\x12" + varint(len(raw_value)) + raw_value
    second = raw_span.SerializeToString() + b"\x4a" + varint(len(pair)) + pair
    spans = b"".join(
        b"\x12" + varint(len(s)) + s for s in (span(1).SerializeToString(), second, span(3).SerializeToString())
    )
    scope = b"\x0a\x06\x0a\x04vllm" + spans
    group = b"\x12" + varint(len(scope)) + scope
    return b"\x0a" + varint(len(group)) + group


@pytest.mark.parametrize("levels", range(40, 56))
def test_deep_nesting_is_kept_or_refused_alone(levels: int) -> None:
    decoded = decode(with_attribute(span(2), nested(levels)))
    kept = [row["trace_id"][-1] for row in decoded.requests.to_pylist()]
    assert kept == ([1, 2, 3] if not decoded.refused else [1, 3])
    assert decode(decoded.clean_body).requests.equals(decoded.requests)
    assert decode(decoded.clean_body).clean_body is decoded.clean_body


def test_nesting_without_end_is_refused_alone() -> None:
    decoded = decode(with_attribute(span(2), nested(20_000)))
    assert decoded.requests.num_rows == 2
    assert [r.reason for r in decoded.refused] == ["malformed_span"]
    assert not decode(with_attribute(span(2), nested(40))).refused


def test_ten_thousand_attributes_and_a_megabyte_of_text_are_kept() -> None:
    many = {f"key-{number}": number for number in range(10_000)} | {"long": "x" * 1_000_000}
    assert json.loads(span_row(many)["attributes"]) == many
    assert json.loads(request_row(VLLM | many)["attributes"]) == many


def test_a_flood_of_prompt_text_is_removed_and_the_rest_kept() -> None:
    flood = {f"{prefix}.{number}": "x" for number in range(150_000) for prefix in ("gen_ai.prompt", "kept")}
    decoded = decode(body(span(values=flood)))
    assert decoded.dropped_attributes == {"gen_ai.prompt*": 150_000}
    (kept,) = decoded.requests.column("attributes").to_pylist()
    assert len(json.loads(kept)) == 150_000


def test_a_flood_of_wrong_ids_leaves_the_good_spans() -> None:
    one = [span(number + 1, values={}, span_id=b"" if number % 2 else b"x" * 8) for number in range(2_000)]
    decoded = decode(body(*one * 100))
    assert decoded.rows == 100_000
    assert [(refusal.reason, refusal.count) for refusal in decoded.refused] == [("invalid_span_id", 100_000)]


def test_a_flood_of_resources_and_scopes_without_spans_takes_no_time_and_is_not_kept() -> None:
    sent = ExportTraceServiceRequest.FromString(body(span()))
    sent.resource_spans[0].scope_spans.add().scope.attributes.add(key="gen_ai.prompt").value.string_value = "secret"
    sent.resource_spans.add().resource.attributes.add(key="gen_ai.prompt").value.string_value = "secret"
    scopes = ExportTraceServiceRequest(resource_spans=[{"scope_spans": [{}] * 200_000}])
    start = time.process_time()
    decoded = decode(scopes.SerializeToString() + sent.SerializeToString() + b"\x0a\x00" * 500_000)
    assert time.process_time() - start < 3
    assert decoded.rows == 1
    assert decoded.clean_body == body(span())
    assert not decoded.refused


def test_a_refusal_names_the_place_that_the_sender_knows() -> None:
    sent = b"\x0a\x00" + body(span(), span(2, span_id=b"x"))
    (refusal,) = decode(sent).refused
    assert refusal.detail.startswith("resource_spans[1].scope_spans[0].spans[1]")


def shard(resource: dict[str, Any], *rules: ShardRule, models: tuple[tuple[str, str], ...] = ()) -> tuple[Any, Any]:
    settings = DecodeSettings(shard_rules=rules, models=models)
    (row,) = decode(body(span(), resource=resource), settings).requests.to_pylist()
    return row["shard"], row["model"]


def test_the_shard_is_named_then_ruled_then_the_instance_then_the_service() -> None:
    rule = ShardRule("host.name", "gpu-1?", "rack-one")
    everything = {"vllm.shard": "s", "host.name": "gpu-12", "service.instance.id": "i", "service.name": "n"}
    assert shard(everything, rule)[0] == "s"
    assert shard({k: v for k, v in everything.items() if k != "vllm.shard"}, rule)[0] == "rack-one"
    assert shard({"host.name": "gpu-2", "service.instance.id": "i", "service.name": "n"}, rule)[0] == "i"
    assert shard({"service.instance.id": "", "service.name": "n"}, rule)[0] == "n"
    assert shard({"other": 1}, rule)[0] is None
    assert shard({"host.name": 12}, ShardRule("host.name", "1*", "by-number"))[0] == "by-number"


def test_the_first_rule_that_matches_wins() -> None:
    assert shard({"a": "x"}, ShardRule("a", "*", "first"), ShardRule("a", "x", "second"))[0] == "first"


def test_the_model_is_the_resources_then_that_of_the_instance() -> None:
    models = (("i", "llama"),)
    assert shard({"vllm.model": "qwen", "service.instance.id": "i"}, models=models)[1] == "qwen"
    assert shard({"service.instance.id": "i"}, models=models)[1] == "llama"
    assert shard({"service.instance.id": "j"}, models=models)[1] is None


@pytest.mark.parametrize("pattern", PROMPT_TEXT_ATTRIBUTES)
@pytest.mark.parametrize("name", ["llm_request", "chat"])
def test_prompt_text_leaves_no_trace_anywhere(pattern: str, name: str) -> None:
    key = pattern.replace("*", ".0.content")
    hidden = {key: SECRET}
    nested = {"outer": {"kept": 1, key: SECRET, "list": [{key: SECRET}]}}
    request = ExportTraceServiceRequest.FromString(
        body(
            span(
                name=name,
                values=VLLM | hidden | nested,
                events=[Span.Event(name="gen_ai.content.prompt", attributes=attributes(hidden | nested))],
                links=[Span.Link(trace_id=b"t" * 16, span_id=b"s" * 8, attributes=attributes(hidden))],
            ),
            resource={"service.name": "vllm"} | hidden | nested,
        )
    )
    request.resource_spans[0].scope_spans[0].scope.attributes.extend(attributes(hidden))
    decoded = decode(request.SerializeToString())
    assert decoded.dropped_attributes == {pattern: 11}
    rows = str(decoded.requests.to_pylist() + decoded.spans.to_pylist())
    assert "Wilhelmina" not in rows
    assert b"Wilhelmina" not in decoded.clean_body
    assert "kept" in rows
    cleaned = ExportTraceServiceRequest.FromString(decoded.clean_body).resource_spans[0].scope_spans[0].spans[0]
    assert cleaned.events[0].name == "gen_ai.content.prompt"
    again = decode(decoded.clean_body)
    assert again.requests.equals(decoded.requests)
    assert again.spans.equals(decoded.spans)
    assert again.clean_body is decoded.clean_body


def test_counts_and_latencies_are_not_prompt_text() -> None:
    assert decode(body(span())).dropped_attributes == {}


def test_a_pattern_over_known_attributes_removes_them_too() -> None:
    settings = DecodeSettings(prompt_text_attributes=("gen_ai.request.*",))
    decoded = decode(body(span()), settings)
    assert decoded.requests.column("request_id").to_pylist() == [None]
    assert decoded.dropped_attributes == {"gen_ai.request.*": 1}
    assert b"cmpl-1" not in decoded.clean_body


def test_prompt_text_inside_a_known_attribute_is_removed() -> None:
    values = VLLM | {"gen_ai.request.max_tokens": {"gen_ai.prompt": SECRET, "kept": 1}}
    decoded = decode(body(span(values=values)))
    (row,) = decoded.requests.to_pylist()
    assert json.loads(row["attributes"]) == {"gen_ai.request.max_tokens": {"kept": 1}}
    assert b"Wilhelmina" not in decoded.clean_body


def test_without_patterns_everything_is_kept() -> None:
    raw = body(span(values=VLLM | {"gen_ai.prompt": SECRET}))
    decoded = decode(raw, DecodeSettings(prompt_text_attributes=()))
    assert decoded.clean_body is raw
    assert SECRET in decoded.requests.column("attributes").to_pylist()[0]
