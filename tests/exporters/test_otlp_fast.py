"""The fast decoder gives the rows of the complete one, and hands over what it does not read itself."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue, KeyValueList
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from vllm_slo.exporters.otlp import fast, plain
from vllm_slo.exporters.otlp.decoded import Decoded, DecodeSettings, ShardRule

RECEIVED = 1_796_080_000_000_000_000
SETTINGS = DecodeSettings()

pytestmark = pytest.mark.skipif(not fast.available(), reason="ptars is not installed (extra `fast`)")


@dataclass
class HandOver:
    """Counts the bodies that were handed to the complete decoder."""

    count: int = 0
    decode: Callable[[bytes, int, DecodeSettings], Decoded] = field(default=plain.decode)

    def __call__(self, body: bytes, received_ns: int, settings: DecodeSettings) -> Decoded:
        self.count += 1
        return self.decode(body, received_ns, settings)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> HandOver:
    counter = HandOver()
    monkeypatch.setattr(fast.plain, "decode", counter)
    return counter


@pytest.fixture(scope="module")
def vllm_body(public_data: Path) -> bytes:
    return (public_data / "2_otlp/vllm033-derived/rtxpro-llama8b-tp1/batch-000.pb").read_bytes()


def bodies(captures: Path, name: str) -> Iterator[bytes]:
    for path in sorted((captures / name / "otlp").glob("*.pb.gz")):
        yield gzip.decompress(path.read_bytes())


def same(body: bytes, handed: HandOver, settings: DecodeSettings = SETTINGS) -> Decoded:
    expected = handed.decode(body, RECEIVED, settings)
    actual = fast.decode(body, RECEIVED, settings)
    assert actual.requests.schema == expected.requests.schema
    for column in expected.requests.column_names:
        assert actual.requests.column(column).equals(expected.requests.column(column)), column
    for column in expected.spans.column_names:
        assert actual.spans.column(column).equals(expected.spans.column(column)), column
    actual.requests.validate(full=True)
    assert (actual.refused, actual.dropped_attributes) == (expected.refused, expected.dropped_attributes)
    assert actual.clean_body == expected.clean_body
    return actual


@pytest.mark.parametrize("name", ["baseline", "prio"])
def test_recordings_give_the_same_rows_and_only_start_up_is_handed_over(
    captures: Path, handed: HandOver, name: str
) -> None:
    startup = requests = 0
    for body in bodies(captures, name):
        decoded = same(body, handed)
        startup += decoded.spans.num_rows > 0
        requests += decoded.requests.num_rows
        if not decoded.spans.num_rows:
            assert decoded.clean_body is body
    assert handed.count == startup > 0
    assert requests > 2000


def test_many_small_bodies_joined_give_the_same_rows(captures: Path, handed: HandOver) -> None:
    requests_only = [body for body in bodies(captures, "seqs4") if not plain_spans(body)]
    joined = b"".join(requests_only)
    decoded = same(joined, handed)
    assert decoded.requests.num_rows > 2000
    assert set(decoded.requests.column("shard").to_pylist()) == {"general-0", "general-1"}
    assert handed.count == 0


def plain_spans(body: bytes) -> bool:
    request = ExportTraceServiceRequest.FromString(body)
    return any(s.name != "llm_request" for g in request.resource_spans for c in g.scope_spans for s in c.spans)


def test_settings_reach_the_resources(vllm_body: bytes, handed: HandOver) -> None:
    settings = DecodeSettings(
        shard_rules=(ShardRule("service.instance.id", "rtxpro-*", "workstation"),),
        models=(("rtxpro-llama8b-tp1", "llama"),),
    )
    (shard,) = set(same(vllm_body, handed, settings).requests.column("shard").to_pylist())
    (model,) = set(same(vllm_body, handed, settings).requests.column("model").to_pylist())
    assert (shard, model, handed.count) == ("workstation", "llama", 0)


def test_spans_with_different_attributes_are_not_handed_over(vllm_body: bytes, handed: HandOver) -> None:
    request = ExportTraceServiceRequest.FromString(vllm_body)
    spans = request.resource_spans[0].scope_spans[0].spans
    del spans[1].attributes[3:]
    del spans[2].attributes[:]
    spans[3].attributes.reverse()
    spans[4].parent_span_id = b"parentid"
    spans[5].attributes[0].value.int_value = 3
    spans[6].trace_state = "a=b"
    spans[7].end_time_unix_nano = 0
    spans[8].start_time_unix_nano = 2**64 - 1
    decoded = same(request.SerializeToString(), handed)
    assert decoded.requests.column("quality").to_pylist()[1:3] == ["missing_milestone"] * 2
    assert handed.count == 0


def attribute(key: str, **value: Any) -> Callable[[Span], None]:
    return lambda span: span.attributes.append(KeyValue(key=key, value=AnyValue(**value)))


def known(**value: Any) -> Callable[[Span], None]:
    """The queue time with another kind of value."""

    def change(span: Span) -> None:
        for item in span.attributes:
            if item.key == "gen_ai.latency.time_in_queue":
                item.value.CopyFrom(AnyValue(**value))

    return change


UNUSUAL: dict[str, Callable[[Span], Any]] = {
    "another name": lambda s: setattr(s, "name", "llm_requesT"),
    "no name": lambda s: setattr(s, "name", ""),
    "no trace id": lambda s: setattr(s, "trace_id", b""),
    "a trace id of zeros": lambda s: setattr(s, "trace_id", bytes(16)),
    "a short span id": lambda s: setattr(s, "span_id", b"x"),
    "a span id of zeros": lambda s: setattr(s, "span_id", bytes(8)),
    "a short parent": lambda s: setattr(s, "parent_span_id", b"x"),
    "a parent of zeros": lambda s: setattr(s, "parent_span_id", bytes(8)),
    "an event": lambda s: s.events.add(name="e"),
    "a link": lambda s: s.links.add(trace_id=b"t" * 16, span_id=b"s" * 8),
    "a status": lambda s: setattr(s.status, "code", 2),
    "an unknown attribute": attribute("lora", string_value="x"),
    "an attribute without a key": attribute("", string_value="x"),
    "prompt text": attribute("gen_ai.prompt", string_value="secret"),
    "a repeated attribute": attribute("gen_ai.request.id", string_value="again"),
    "text as a number": known(string_value="0.5"),
    "no text": known(string_value=""),
    "a boolean": known(bool_value=False),
    "a list": known(array_value=ArrayValue()),
    "a map": known(kvlist_value=KeyValueList()),
    "bytes": known(bytes_value=b""),
    "nothing": known(),
    "not a number": known(double_value=float("nan")),
    "infinity": known(double_value=float("inf")),
    "31.7 years": known(double_value=1e9),
    "a fraction where an integer belongs": lambda s: setattr(s.attributes[3].value, "double_value", 1.5),
    "an inference that is not prefill and decode": lambda s: [
        setattr(a.value, "double_value", 1e6) for a in s.attributes if a.key == "gen_ai.latency.time_in_model_inference"
    ],
}


@pytest.mark.parametrize("change", list(UNUSUAL.values()), ids=list(UNUSUAL))
def test_one_unusual_span_hands_the_body_over(
    vllm_body: bytes, handed: HandOver, change: Callable[[Span], Any]
) -> None:
    request = ExportTraceServiceRequest.FromString(vllm_body)
    change(request.resource_spans[0].scope_spans[0].spans[7])
    assert request.SerializeToString() != vllm_body
    same(request.SerializeToString(), handed)
    assert handed.count == 1


def group_changed(body: bytes, change: Callable[[Any], Any]) -> bytes:
    request = ExportTraceServiceRequest.FromString(body)
    change(request.resource_spans[0])
    return request.SerializeToString()


@pytest.mark.parametrize(
    "change",
    [
        lambda g: setattr(g.scope_spans[0].scope, "name", "proxy"),
        lambda g: g.scope_spans[0].scope.attributes.add(key="gen_ai.prompt"),
        lambda g: g.resource.attributes.add(key="input.value"),
        lambda g: g.ClearField("resource"),
        lambda g: g.scope_spans[0].ClearField("scope"),
        lambda g: g.scope_spans[0].ClearField("spans"),
    ],
    ids=["foreign scope", "prompt in scope", "prompt in resource", "no resource", "no scope", "no spans"],
)
def test_an_unusual_group_hands_the_body_over(vllm_body: bytes, handed: HandOver, change: Callable[[Any], Any]) -> None:
    same(group_changed(vllm_body, change), handed)
    assert handed.count == 1


def test_schema_urls_are_usual(vllm_body: bytes, handed: HandOver) -> None:
    same(group_changed(vllm_body, lambda g: setattr(g, "schema_url", "https://x/ü")), handed)
    same(group_changed(vllm_body, lambda g: setattr(g.scope_spans[0], "schema_url", "https://x")), handed)
    assert handed.count == 0


@pytest.mark.parametrize("text", ["bench-0", "vllm.tracing.otel", "llm_request", "rtxpro-llama8b-tp1"])
def test_invalid_utf8_is_seen(vllm_body: bytes, handed: HandOver, text: str) -> None:
    raw = text.encode()
    same(vllm_body.replace(raw, b"\xff" + raw[1:]), handed)
    assert handed.count == 1


def test_without_ptars_the_complete_decoder_serves(
    vllm_body: bytes, handed: HandOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast, "_INSTALLED", False)
    assert not fast.available()
    assert same(vllm_body, handed).requests.num_rows == 300
    assert handed.count == 1


def test_patterns_over_known_attributes_hand_over(vllm_body: bytes, handed: HandOver) -> None:
    same(vllm_body, handed, DecodeSettings(prompt_text_attributes=("gen_ai.*",)))
    assert handed.count == 1


@pytest.mark.parametrize("body", [b"", b"\x0a\x00", b"\x0a\x02\x12\x00"])
def test_bodies_without_spans_are_handed_over(handed: HandOver, body: bytes) -> None:
    assert same(body, handed).rows == 0
    assert handed.count == 1


def test_a_malformed_unknown_field_is_the_one_thing_only_the_complete_decoder_refuses(vllm_body: bytes) -> None:
    request = ExportTraceServiceRequest.FromString(vllm_body)
    group = request.resource_spans[0]
    del group.scope_spans[0].spans[1:]
    span = group.scope_spans[0].spans[0].SerializeToString() + b"\xfa\xff\xff\xff\xff\x01\x00"
    scope = b"\x0a\x06\x0a\x04vllm\x12" + _varint(len(span)) + span
    raw_group = group.resource.SerializeToString()
    raw = b"\x0a" + _varint(len(raw_group)) + raw_group + b"\x12" + _varint(len(scope)) + scope
    body = b"\x0a" + _varint(len(raw)) + raw
    assert [r.reason for r in plain.decode(body, RECEIVED, SETTINGS).refused] == ["malformed_span"]
    accepted = fast.decode(body, RECEIVED, SETTINGS)
    reference = plain.decode(request.SerializeToString(), RECEIVED, SETTINGS)
    assert accepted.requests.equals(reference.requests)


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def test_rows_keep_nothing_of_the_decoder_alive(vllm_body: bytes, handed: HandOver) -> None:
    before = pa.total_allocated_bytes()
    rows = fast.decode(vllm_body * 10, RECEIVED, SETTINGS).requests
    assert not handed.count
    ids = [rows[name] for name in ("trace_id", "span_id")]
    count = rows.num_rows
    del rows
    assert count >= 1000
    assert pa.total_allocated_bytes() - before >= count * (16 + 8), "memory that pyarrow did not allocate is ptars'"
    assert len(ids[0]) == count
