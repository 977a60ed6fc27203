"""Records as spans: ids, kinds, resource, exact integers; the quick encoder says what OpenTelemetry's says."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from receiving import receiving
from vllm_slo import __version__
from vllm_slo.exporters import records
from vllm_slo.exporters.probe import ids
from vllm_slo.exporters.probe.encode import Encoder, varint
from vllm_slo.exporters.probe.settings import Settings
from vllm_slo.exporters.probe.spans import ExporterMissing, SpanData, Spans, resource_attributes, sender

START = 1_790_000_000_123_456_789
REQUEST = "cmpl-a-0-00112233"
CLIENT = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}
RESOURCE = {"service.name": "vllm", "vllm.shard": "general"}


def nothing() -> None:
    """No pause."""


def encoded(*given: SpanData) -> list[Span]:
    """The spans as the quick encoder writes them, which are OpenTelemetry's own to the last field."""
    spans = Spans(RESOURCE, "1.2").of(given)
    message = ExportTraceServiceRequest.FromString(Encoder().encode(spans, nothing))
    assert message == encode_spans(spans)
    (resource,) = message.resource_spans
    (scope,) = resource.scope_spans
    assert (scope.scope.name, scope.scope.version) == (records.SCOPE, "1.2")
    assert {each.key: each.value.string_value for each in resource.resource.attributes} == RESOURCE
    return list(scope.spans)


def record(name: str = records.ENGINE_REQUEST, **given: Any) -> SpanData:
    return SpanData(name, START, START + 5, **{"engine_request_id": REQUEST, **given})


def test_the_engines_span_hangs_below_the_front_ends_and_that_below_the_clients() -> None:
    engine, front = encoded(record(trace_headers=CLIENT), record(records.FRONTEND_REQUEST, trace_headers=CLIENT))
    assert engine.trace_id == front.trace_id == bytes.fromhex("4bf92f3577b34da6a3ce929d0e0e4736")
    assert engine.parent_span_id == front.span_id == ids.frontend_span_id(REQUEST, START).to_bytes(8, "big")
    assert front.parent_span_id == bytes.fromhex("00f067aa0ba902b7")
    assert engine.span_id == ids.engine_span_id(REQUEST, START).to_bytes(8, "big")


def test_without_a_client_the_front_end_is_the_root_of_a_trace_of_its_own() -> None:
    engine, front = encoded(record(), record(records.FRONTEND_REQUEST))
    assert engine.trace_id == front.trace_id == ids.trace_id(None, REQUEST, START).to_bytes(16, "big")
    assert (engine.parent_span_id, front.parent_span_id) == (front.span_id, b"")


def test_what_belongs_to_no_request_of_the_engine_has_random_ids_and_the_clients_parent() -> None:
    given = [record(name, engine_request_id=None) for name in (records.ENGINE_SAMPLE, records.EVENT) * 20]
    spans = encoded(*given, record(records.EDGE_REQUEST, engine_request_id=None, trace_headers=CLIENT))
    assert len({span.span_id for span in spans}) == len({span.trace_id for span in spans}) == 41
    assert spans[-1].parent_span_id == bytes.fromhex("00f067aa0ba902b7")
    assert {span.parent_span_id for span in spans[:-1]} == {b""}


def test_a_seeded_random_module_gives_no_two_processes_the_same_ids() -> None:
    import random

    state = random.getstate()
    try:
        found = []
        for _ in range(2):
            random.seed(0)  # as vLLM does in every process
            found += encoded(record(records.ENGINE_SAMPLE, engine_request_id=None))
        assert found[0].span_id != found[1].span_id
    finally:
        random.setstate(state)


def test_the_front_end_serves_and_the_others_are_internal_and_errors_are_marked() -> None:
    kinds = {name: encoded(record(name))[0].kind for name in (*records.REQUEST_RECORDS, records.ENGINE_SAMPLE)}
    assert kinds == {
        records.ENGINE_REQUEST: Span.SPAN_KIND_INTERNAL,
        records.FRONTEND_REQUEST: Span.SPAN_KIND_SERVER,
        records.EDGE_REQUEST: Span.SPAN_KIND_SERVER,
        records.ENGINE_SAMPLE: Span.SPAN_KIND_INTERNAL,
    }
    good, bad = encoded(record(), record(error=True))
    assert (good.status.code, bad.status.code) == (Status.STATUS_CODE_UNSET, Status.STATUS_CODE_ERROR)


def test_integers_stay_integers_and_nulls_are_left_out() -> None:
    big = 2**63 - 1
    attributes = {
        "ns": 9_007_199_254_740_993,
        "big": big,
        "negative": -5,
        "zero": 0,
        "flag": True,
        "off": False,
        "real": 0.1,
        "text": "ü",
        "none": None,
        "numpy": np.int64(7),
        "numpy_real": np.float32(0.5),
        "other": Path("x"),
    }
    (span,) = encoded(record(attributes=attributes))
    found = {
        each.key: (each.value.WhichOneof("value"), getattr(each.value, each.value.WhichOneof("value")))
        for each in span.attributes
    }
    assert found == {
        "ns": ("int_value", 9_007_199_254_740_993),
        "big": ("int_value", big),
        "negative": ("int_value", -5),
        "zero": ("int_value", 0),
        "flag": ("bool_value", True),
        "off": ("bool_value", False),
        "real": ("double_value", 0.1),
        "text": ("string_value", "ü"),
        "numpy": ("int_value", 7),
        "numpy_real": ("double_value", 0.5),
        "other": ("string_value", "x"),
    }


def test_a_span_never_ends_before_it_starts() -> None:
    (span,) = encoded(SpanData("x", 10, 5))
    assert (span.start_time_unix_nano, span.end_time_unix_nano) == (10, 10)


VALUES = st.one_of(
    st.integers(-(2**63), 2**63 - 1), st.booleans(), st.floats(allow_nan=False), st.text(st.characters(codec="utf-8"))
)


@given(
    st.lists(st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), VALUES, max_size=40), max_size=4),
    st.integers(0, 2**64 - 1),
    st.sampled_from([None, CLIENT]),
)
def test_the_quick_encoder_writes_what_opentelemetrys_writes(
    attributes: list[dict[str, Any]], start: int, headers: dict[str, str] | None
) -> None:
    given = [SpanData("vllm_slo.x", start, start, each, headers, REQUEST, bool(each)) for each in attributes]
    spans = Spans(RESOURCE, "1.2").of(given)
    message = ExportTraceServiceRequest.FromString(Encoder().encode(spans, nothing))
    assert message == encode_spans(spans)


@pytest.mark.parametrize(
    "value", [0, 1, 127, 128, 16383, 16384, 2**21 - 1, 2**21, 2**28, 2**35, 2**63 - 1, -1, -(2**63)]
)
def test_varints_are_those_of_protobuf(value: int) -> None:
    from opentelemetry.proto.common.v1.common_pb2 import AnyValue

    assert b"\x18" + varint(value) == AnyValue(int_value=value).SerializeToString()


def test_one_absurd_number_or_text_does_not_spoil_an_export() -> None:
    (span,) = Spans(RESOURCE, "1").of([record(attributes={"a": 2**70, "b": -(2**70), "c": "\ud800", "d": math.nan})])
    message = ExportTraceServiceRequest.FromString(Encoder().encode([span], nothing))
    a, b, c, d = message.resource_spans[0].scope_spans[0].spans[0].attributes
    assert (a.value.int_value, b.value.int_value, c.value.string_value) == (2**63 - 1, -(2**63), "?")
    assert math.isnan(d.value.double_value)


def test_other_threads_get_the_interpreter_while_many_spans_are_encoded() -> None:
    pauses: list[int] = []
    Encoder().encode(Spans(RESOURCE, "1").of([record()] * 100), lambda: pauses.append(1))
    assert len(pauses) == 6


def test_the_resource_is_the_environments_with_model_probe_and_kind() -> None:
    environ = {"OTEL_RESOURCE_ATTRIBUTES": "vllm.shard=general,service.instance.id=general-0,vllm_slo.probe=9"}
    settings = Settings.from_environment(environ)
    assert resource_attributes(settings, "1.2", "engine_core", "tiny") == {
        "service.name": "vllm",
        "vllm.shard": "general",
        "service.instance.id": "general-0",
        "vllm.model": "tiny",
        "vllm_slo.probe": "1.2",
        "vllm.process_kind": "engine_core",
    }
    assert "vllm.model" not in resource_attributes(settings, "1.2", "worker", None)
    named = Settings.from_environment({"OTEL_RESOURCE_ATTRIBUTES": "vllm.model=mine"})
    assert resource_attributes(named, "1", "worker", "tiny")["vllm.model"] == "mine"


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_records_reach_a_real_receiver_over_both_protocols(tmp_path: Path, protocol: str) -> None:
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="tiny"))
    with receiving(tmp_path) as running:
        address = f"http://{running.grpc_address}" if protocol == "grpc" else running.url
        settings = Settings.from_environment({"VLLM_SLO_OTLP_ENDPOINT": address, "VLLM_SLO_OTLP_PROTOCOL": protocol})
        sending = sender(settings, config, "engine_core")()
        try:
            given = [record(attributes={"vllm_slo.n": number}, engine_request_id=f"r-{number}") for number in range(3)]
            assert sending.send(given) is True
        finally:
            sending.close()
        (body,) = running.spooled()
    message = ExportTraceServiceRequest.FromString(body)
    (resource,) = message.resource_spans
    assert {each.key: each.value.string_value for each in resource.resource.attributes} == {
        "service.name": "vllm",
        "vllm.model": "tiny",
        "vllm_slo.probe": __version__,
        "vllm.process_kind": "engine_core",
    }
    spans = resource.scope_spans[0].spans
    assert [span.attributes[0].value.int_value for span in spans] == [0, 1, 2]


def test_a_missing_exporter_is_told_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ExporterMissing, match="pip install opentelemetry-exporter-otlp"):
        sender(Settings.from_environment({}), None, "worker")


def test_a_record_of_no_request_keeps_its_ids_when_it_is_sent_again() -> None:
    made = Spans({}, "1")
    record, other = (SpanData(records.ENGINE_SAMPLE, 1, 2) for _ in range(2))
    first, again, another = (made.of([each])[0].context for each in (record, record, other))
    assert (first.trace_id, first.span_id) == (again.trace_id, again.span_id)
    assert first.span_id != another.span_id
