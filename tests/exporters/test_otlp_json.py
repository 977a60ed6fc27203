"""OTLP/JSON: the rules of the specification, what is allowed beyond them, and what is refused."""

from __future__ import annotations

import base64
import json
import math
from io import BytesIO
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from vllm_slo.exporters.otlp import plain
from vllm_slo.exporters.otlp.decoded import BodyError, DecodeSettings, Refusal
from vllm_slo.exporters.otlp.json import lines, to_protobuf
from vllm_slo.exporters.otlp.json_values import DEEPEST

RECEIVED = 1_796_080_000_000_000_000
GOOD = {"traceId": "5B8EFFF798038103D269B633813FC60C", "spanId": "eee19b7ec3c1b174", "name": "good"}


def body(*spans: Any, **resource_spans: Any) -> bytes:
    group = {"scopeSpans": [{"scope": {"name": "s"}, "spans": list(spans)}]} | resource_spans
    return json.dumps({"resourceSpans": [group]}).encode()


def converted(raw: bytes) -> tuple[list[Span], list[Refusal]]:
    protobuf, refused = to_protobuf(raw)
    request = ExportTraceServiceRequest.FromString(protobuf)
    return [s for g in request.resource_spans for c in g.scope_spans for s in c.spans], refused


def one(**fields: Any) -> Span:
    """The span with these fields, which must be accepted."""
    (span,), refused = converted(body(GOOD | fields))
    assert refused == []
    return span


def refusal(**fields: Any) -> Refusal:
    """The refusal of the span with these fields; its neighbours on both sides must stay."""
    spans, refused = converted(body(GOOD, GOOD | {"name": "bad"} | fields, GOOD))
    assert [span.name for span in spans] == ["good", "good"]
    (only,) = refused
    assert only.count == 1
    assert only.detail.startswith("resourceSpans[0].scopeSpans[0].spans[1]")
    return only


def value(**any_value: Any) -> AnyValue:
    return one(attributes=[{"key": "k", "value": any_value}]).attributes[0].value


def test_hex_ids_of_either_case_become_their_bytes() -> None:
    span = one(parentSpanId="EEE19B7EC3C1B173")
    assert span.trace_id == bytes.fromhex(GOOD["traceId"])
    assert span.span_id == bytes.fromhex(GOOD["spanId"])
    assert span.parent_span_id == bytes.fromhex("EEE19B7EC3C1B173")


def test_base64_ids_that_cannot_be_hex_become_their_bytes() -> None:
    trace_id, span_id = bytes(range(240, 256)), bytes(range(248, 256))
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        span = one(traceId=encode(trace_id).decode(), spanId=encode(span_id).decode())
        assert (span.trace_id, span.span_id) == (trace_id, span_id)


@pytest.mark.parametrize(
    "trace_id",
    ["1234", "0" * 31, "0" * 33, "0" * 31 + "G", "0" * 24, "!" * 24, "é" * 32, " " * 32, "0x" + "0" * 30, 5, [], True],
)
def test_other_trace_ids_are_refused(trace_id: Any) -> None:
    assert refusal(traceId=trace_id).reason == "invalid_trace_id"


@pytest.mark.parametrize(
    ("field", "reason"), [("spanId", "invalid_span_id"), ("parentSpanId", "invalid_parent_span_id")]
)
@pytest.mark.parametrize("text", ["1234", "0" * 15, "000000000000000G", "A" * 12, "A" * 24])
def test_other_span_ids_are_refused(field: str, reason: str, text: str) -> None:
    assert refusal(**{field: text}).reason == reason


@pytest.mark.parametrize("absent", [None, ""])
def test_a_null_or_empty_parent_is_absent(absent: str | None) -> None:
    assert one(parentSpanId=absent).parent_span_id == b""


def test_snake_case_and_the_names_before_1_0_are_read() -> None:
    span = {"trace_id": GOOD["traceId"], "span_id": GOOD["spanId"], "start_time_unix_nano": "5", "kind": 2}
    span["attributes"] = [{"key": "k", "value": {"int_value": "7"}}]
    old = {
        "resource_spans": [
            {"instrumentation_library_spans": [{"instrumentation_library": {"name": "l"}, "spans": [span]}]}
        ]
    }
    protobuf, refused = to_protobuf(json.dumps(old).encode())
    scope = ExportTraceServiceRequest.FromString(protobuf).resource_spans[0].scope_spans[0]
    assert refused == []
    assert scope.scope.name == "l"
    assert (scope.spans[0].start_time_unix_nano, scope.spans[0].attributes[0].value.int_value) == (5, 7)
    camel = {
        "resourceSpans": [{"instrumentationLibrarySpans": [{"instrumentationLibrary": {"name": "l"}, "spans": [span]}]}]
    }
    assert to_protobuf(json.dumps(camel).encode())[0] == protobuf


@pytest.mark.parametrize("given_value", ["1640000000000000001", 1640000000000000001])
def test_times_may_be_text_or_numbers_and_keep_every_nanosecond(given_value: Any) -> None:
    assert one(startTimeUnixNano=given_value).start_time_unix_nano == 1640000000000000001


def test_the_largest_times_fit() -> None:
    assert one(endTimeUnixNano=str(2**64 - 1)).end_time_unix_nano == 2**64 - 1


@pytest.mark.parametrize("time", [-1, "-1", str(2**64), "1" * 400, "1e400", "abc", "", 1.5, True, [], {}])
def test_other_times_are_refused(time: Any) -> None:
    assert refusal(startTimeUnixNano=time).reason == "wrong_type"


@pytest.mark.parametrize("kind", [3, "3", 3.0, "SPAN_KIND_CLIENT", "CLIENT", "client"])
def test_kinds_are_names_or_numbers(kind: Any) -> None:
    assert one(kind=kind).kind == 3


@pytest.mark.parametrize("code", [2, "STATUS_CODE_ERROR", "ERROR"])
def test_status_codes_are_names_or_numbers(code: Any) -> None:
    status = one(status={"code": code, "message": "m"}).status
    assert (status.code, status.message) == (2, "m")


def test_enum_numbers_of_the_future_pass_and_names_do_not() -> None:
    assert one(kind=99).kind == 99
    assert refusal(kind="SPAN_KIND_FUTURE").reason == "unknown_enum"
    assert refusal(status={"code": "NOT_A_STATUS"}).reason == "unknown_enum"
    assert refusal(kind=2**31).reason == "wrong_type"


@pytest.mark.parametrize(
    ("given_value", "number"),
    [(0.1, 0.1), (1, 1.0), ("2.5", 2.5), ("Infinity", math.inf), ("-Infinity", -math.inf), ("1e3", 1000.0)],
)
def test_doubles_are_numbers_or_text(given_value: Any, number: float) -> None:
    assert value(doubleValue=given_value).double_value == number


def test_nan_is_text() -> None:
    assert math.isnan(value(doubleValue="NaN").double_value)


def test_every_other_kind_of_value_is_read() -> None:
    assert value(stringValue="ü").string_value == "ü"
    assert value(boolValue=False).WhichOneof("value") == "bool_value"
    assert value(intValue="-9223372036854775808").int_value == -(2**63)
    assert value(bytesValue="AP8=").bytes_value == b"\0\xff"
    assert value(arrayValue={}).WhichOneof("value") == "array_value"
    assert value(arrayValue={"values": [{"intValue": 1}, {}]}).array_value.values[0].int_value == 1
    assert value(kvlistValue={"values": [{"key": "a", "value": {"boolValue": True}}]}).kvlist_value.values[0].key == "a"
    assert value().WhichOneof("value") is None
    assert value(stringValue=None).WhichOneof("value") is None
    assert value(futureValue=1, intValue=2).int_value == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"stringValue": 1},
        {"boolValue": "true"},
        {"intValue": 1.5},
        {"intValue": "9223372036854775808"},
        {"intValue": True},
        {"doubleValue": "1_0"},
        {"doubleValue": "inf"},
        {"doubleValue": True},
        {"bytesValue": "!"},
        {"bytesValue": "é"},
        {"bytesValue": 1},
        {"arrayValue": []},
        {"arrayValue": {"values": {}}},
        {"kvlistValue": {"values": [1]}},
        {"intValue": 1, "stringValue": "x"},
        [],
        "text",
    ],
)
def test_other_values_are_refused(wrong: Any) -> None:
    assert refusal(attributes=[{"key": "k", "value": wrong}]).reason == "wrong_type"


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": 1},
        {"attributes": {}},
        {"attributes": [None]},
        {"attributes": [{"key": 1}]},
        {"events": {}},
        {"events": [1]},
        {"events": [{"timeUnixNano": "x"}]},
        {"links": [1]},
        {"status": []},
        {"flags": -1},
        {"droppedEventsCount": 2**32},
        {"traceState": {}},
    ],
)
def test_fields_of_another_type_are_refused(wrong: dict[str, Any]) -> None:
    assert refusal(**wrong).reason == "wrong_type"


@pytest.mark.parametrize("member", [None, 1, "text", []])
def test_a_span_that_is_no_object_is_refused_alone(member: Any) -> None:
    spans, (refused,) = converted(body(GOOD, member, GOOD))
    assert len(spans) == 2
    assert (refused.reason, refused.count) == ("wrong_type", 1)


def test_refusals_never_repeat_the_value_of_an_attribute() -> None:
    secret = "the patient is called Wilhelmina"
    for wrong in ({"intValue": secret}, {"doubleValue": secret}, {"bytesValue": secret}, secret):
        assert secret not in refusal(attributes=[{"key": "k", "value": wrong}]).detail


def deep(levels: int, kind: str) -> Any:
    nested: Any = {"stringValue": "bottom"}
    for _ in range(levels):
        item = nested if kind == "arrayValue" else {"key": "k", "value": nested}
        nested = {kind: {"values": [item]}}
    return nested


@pytest.mark.parametrize("kind", ["arrayValue", "kvlistValue"])
def test_nesting_has_an_end(kind: str) -> None:
    deepest = [{"key": "k", "value": deep(DEEPEST, kind)}]
    spans, refused = converted(body(GOOD | {"attributes": deepest, "events": [{"attributes": deepest}]}))
    assert refused == []
    assert plain.decode(to_protobuf(body(GOOD | {"attributes": deepest}))[0], RECEIVED, DecodeSettings()).rows == 1
    assert len(spans) == 1
    assert refusal(attributes=[{"key": "k", "value": deep(DEEPEST + 1, kind)}]).reason == "too_deep"


@pytest.mark.parametrize("bomb", [b"[" * 100_000, b'{"resourceSpans":' + b"[" * 50_000 + b"]" * 50_000 + b"}"])
def test_a_nesting_bomb_is_a_body_error(bomb: bytes) -> None:
    with pytest.raises(BodyError) as raised:
        to_protobuf(bomb)
    assert raised.value.reason == "malformed_json"


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", "malformed_json"),
        (b"{", "malformed_json"),
        (b'{"resourceSpans": [NaN]}', "malformed_json"),
        (b'{"resourceSpans": "\xff"}', "malformed_json"),
        (b"[]", "wrong_type"),
        (b"null", "wrong_type"),
        (b'"text"', "wrong_type"),
        (b'{"resourceSpans": {}}', "wrong_type"),
        (b'{"resourceSpans": [[]]}', "wrong_type"),
        (b'{"resourceSpans": [{"scopeSpans": 1}]}', "wrong_type"),
        (b'{"resourceSpans": [{"scopeSpans": [null]}]}', "wrong_type"),
        (b'{"resourceSpans": [{"scopeSpans": [{"spans": "x"}]}]}', "wrong_type"),
        (b'{"resourceLogs": []}', "no_resource_spans"),
    ],
)
def test_bodies_of_another_kind_are_refused_whole(raw: bytes, reason: str) -> None:
    with pytest.raises(BodyError) as raised:
        to_protobuf(raw)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    "raw", [b"{}", b'{"resourceSpans": null}', b'{"resourceSpans": []}', b'{"resourceSpans": [{}]}']
)
def test_bodies_without_spans_are_valid(raw: bytes) -> None:
    assert converted(raw) == ([], [])


@pytest.mark.parametrize(
    ("written", "kept"),
    [
        (r"cut \ud83d", "cut \ufffd"),
        (r"\uDE00 first", "\ufffd first"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
        (r"\\ud83d \ud83d", r"\ud83d " + "\ufffd"),
    ],
)
def test_half_an_emoji_costs_neither_its_span_nor_the_others(written: str, kept: str) -> None:
    raw = (
        '{"resourceSpans":[{"scopeSpans":[{"spans":['
        f'{{"traceId":"{"1" * 32}","spanId":"{"2" * 16}","name":"{written}"}},'
        f'{{"traceId":"{"1" * 32}","spanId":"{"3" * 16}","name":"other"}}]}}]}}]}}'
    )
    payload, refused = to_protobuf(raw.encode())
    (scope,) = ExportTraceServiceRequest.FromString(payload).resource_spans[0].scope_spans
    assert [span.name for span in scope.spans] == [kept, "other"]
    assert not refused


def test_unknown_fields_are_ignored_everywhere() -> None:
    span = GOOD | {"future": {"x": 1}, "attributes": [{"key": "k", "value": {"intValue": 1}, "more": 2}]}
    spans, refused = converted(body(span, future=1, resource={"attributes": [], "entityRefs": [{"type": "x"}]}))
    assert (len(spans), refused) == (1, [])


def test_a_broken_resource_or_scope_takes_only_its_own_spans_along() -> None:
    bad = {"resource": {"attributes": 1}, "scopeSpans": [{"spans": [GOOD, GOOD]}, {"spans": [GOOD]}]}
    scopes = [{"scope": {"name": 1}, "spans": [GOOD]}, {"spans": [GOOD]}]
    raw = json.dumps({"resourceSpans": [bad, {"scopeSpans": scopes}]}).encode()
    spans, (refused,) = converted(raw)
    assert len(spans) == 1
    assert (refused.reason, refused.count) == ("wrong_type", 4)


def test_lines_are_numbered_and_blank_ones_skipped() -> None:
    stream = BytesIO(b'\xef\xbb\xbf{}\n\n  \r\n{"a":1}\r\n\t\nlast')
    assert list(lines(stream)) == [(1, b"{}"), (4, b'{"a":1}'), (6, b"last")]


WITHOUT_SHRINKING = (Phase.explicit, Phase.reuse, Phase.generate)
"""A failing body is small enough as it comes; shrinking it takes minutes."""
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT32 = st.integers(0, 2**32 - 1)
UINT64 = st.integers(0, 2**64 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=8)
KEYS = st.one_of(TEXT, st.sampled_from(list(plain.KEYS)))
SCALARS = st.one_of(
    st.builds(AnyValue, string_value=TEXT),
    st.builds(AnyValue, bool_value=st.booleans()),
    st.builds(AnyValue, int_value=INT64),
    st.builds(AnyValue, double_value=st.one_of(st.floats(allow_nan=False), st.just(math.nan))),
    st.builds(AnyValue, bytes_value=st.binary(max_size=5)),
    st.just(AnyValue()),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.builds(AnyValue, array_value=st.builds(ArrayValue, values=st.lists(inner, max_size=3))),
        st.builds(
            AnyValue,
            kvlist_value=st.builds(
                KeyValueList, values=st.lists(st.builds(KeyValue, key=KEYS, value=inner), max_size=3)
            ),
        ),
    ),
    max_leaves=5,
)
ATTRIBUTES = st.lists(st.builds(KeyValue, key=KEYS, value=VALUES), max_size=4)
TRACE_IDS, SPAN_IDS = st.binary(min_size=16, max_size=16), st.binary(min_size=8, max_size=8)
EVENTS = st.builds(Span.Event, time_unix_nano=UINT64, name=TEXT, attributes=ATTRIBUTES, dropped_attributes_count=UINT32)
LINKS = st.builds(
    Span.Link, trace_id=TRACE_IDS, span_id=SPAN_IDS, trace_state=TEXT, attributes=ATTRIBUTES, flags=UINT32
)
SPANS = st.builds(
    Span,
    trace_id=TRACE_IDS,
    span_id=SPAN_IDS,
    parent_span_id=st.one_of(st.just(b""), SPAN_IDS),
    trace_state=TEXT,
    flags=UINT32,
    name=st.one_of(TEXT, st.just("llm_request")),
    kind=st.integers(0, 5),
    start_time_unix_nano=UINT64,
    end_time_unix_nano=UINT64,
    attributes=ATTRIBUTES,
    events=st.lists(EVENTS, max_size=2),
    links=st.lists(LINKS, max_size=2),
    status=st.builds(Status, code=st.integers(0, 2), message=TEXT),
    dropped_attributes_count=UINT32,
    dropped_events_count=UINT32,
    dropped_links_count=UINT32,
)
SCOPES = st.builds(
    ScopeSpans,
    scope=st.builds(
        InstrumentationScope, name=st.sampled_from(["vllm.x", "http"]), version=TEXT, attributes=ATTRIBUTES
    ),
    spans=st.lists(SPANS, max_size=3),
    schema_url=TEXT,
)
GROUPS = st.builds(
    ResourceSpans,
    resource=st.builds(Resource, attributes=ATTRIBUTES, dropped_attributes_count=UINT32),
    scope_spans=st.lists(SCOPES, max_size=2),
    schema_url=TEXT,
)
BODIES = st.builds(ExportTraceServiceRequest, resource_spans=st.lists(GROUPS, max_size=2))


def json_value(any_value: AnyValue) -> dict[str, Any]:
    match any_value.WhichOneof("value"):
        case "string_value":
            return {"stringValue": any_value.string_value}
        case "bool_value":
            return {"boolValue": any_value.bool_value}
        case "int_value":
            return {"intValue": str(any_value.int_value)}
        case "double_value":
            number = any_value.double_value
            special = "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
            return {"doubleValue": number if math.isfinite(number) else special}
        case "bytes_value":
            return {"bytesValue": base64.b64encode(any_value.bytes_value).decode()}
        case "array_value":
            return {"arrayValue": {"values": [json_value(item) for item in any_value.array_value.values]}}
        case "kvlist_value":
            return {"kvlistValue": {"values": json_attributes(any_value.kvlist_value.values)}}
        case _:
            return {}


def json_attributes(attributes: Any) -> list[dict[str, Any]]:
    return [{"key": a.key, "value": json_value(a.value)} for a in attributes]


def json_link(link: Span.Link) -> dict[str, Any]:
    return {
        "traceId": link.trace_id.hex(),
        "spanId": link.span_id.hex(),
        "traceState": link.trace_state,
        "attributes": json_attributes(link.attributes),
        "flags": link.flags,
    }


def json_event(event: Span.Event) -> dict[str, Any]:
    return {
        "timeUnixNano": str(event.time_unix_nano),
        "name": event.name,
        "attributes": json_attributes(event.attributes),
        "droppedAttributesCount": event.dropped_attributes_count,
    }


def json_span(span: Span) -> dict[str, Any]:
    return {
        "traceId": span.trace_id.hex(),
        "spanId": span.span_id.hex(),
        "parentSpanId": span.parent_span_id.hex(),
        "traceState": span.trace_state,
        "flags": span.flags,
        "name": span.name,
        "kind": Span.SpanKind.Name(span.kind),
        "startTimeUnixNano": str(span.start_time_unix_nano),
        "endTimeUnixNano": str(span.end_time_unix_nano),
        "attributes": json_attributes(span.attributes),
        "events": [json_event(event) for event in span.events],
        "links": [json_link(link) for link in span.links],
        "status": {"code": Status.StatusCode.Name(span.status.code), "message": span.status.message},
        "droppedAttributesCount": span.dropped_attributes_count,
        "droppedEventsCount": span.dropped_events_count,
        "droppedLinksCount": span.dropped_links_count,
    }


def json_body(request: ExportTraceServiceRequest) -> bytes:
    """The body as the specification writes JSON."""
    groups = [
        {
            "resource": {
                "attributes": json_attributes(group.resource.attributes),
                "droppedAttributesCount": group.resource.dropped_attributes_count,
            },
            "schemaUrl": group.schema_url,
            "scopeSpans": [
                {
                    "scope": {
                        "name": scope.scope.name,
                        "version": scope.scope.version,
                        "attributes": json_attributes(scope.scope.attributes),
                    },
                    "schemaUrl": scope.schema_url,
                    "spans": [json_span(span) for span in scope.spans],
                }
                for scope in group.scope_spans
            ],
        }
        for group in request.resource_spans
    ]
    return json.dumps({"resourceSpans": groups}).encode()


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow], phases=WITHOUT_SHRINKING)
@given(BODIES)
def test_a_body_as_json_and_as_protobuf_is_the_same(request_message: ExportTraceServiceRequest) -> None:
    protobuf, refused = to_protobuf(json_body(request_message))
    assert refused == []
    back = ExportTraceServiceRequest.FromString(protobuf)
    assert back.SerializeToString(deterministic=True) == request_message.SerializeToString(deterministic=True)
    from_json = plain.decode(protobuf, RECEIVED, DecodeSettings())
    from_protobuf = plain.decode(request_message.SerializeToString(), RECEIVED, DecodeSettings())
    assert from_json.requests.equals(from_protobuf.requests)
    assert from_json.spans.equals(from_protobuf.spans)
    assert from_json.refused == from_protobuf.refused
    from_json.requests.validate(full=True)
    from_json.spans.validate(full=True)
