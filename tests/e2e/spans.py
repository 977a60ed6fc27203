"""OTLP bodies in the shape of a stock vLLM's, from numbers that others measured."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class Request:
    """One finished request: its id, its start in epoch nanoseconds and the attributes of its span."""

    request_id: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, float | int]


def body(requests: Iterable[Request], resource: Mapping[str, str]) -> bytes:
    """One ExportTraceServiceRequest; trace and span ids are drawn from the request ids."""
    message = ExportTraceServiceRequest()
    spans = message.resource_spans.add()
    spans.resource.attributes.extend(
        KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in resource.items()
    )
    scope = spans.scope_spans.add()
    scope.scope.name = "vllm.tracing.otel"
    for request in requests:
        digest = hashlib.sha256(f"{resource} {request.request_id}".encode()).digest()
        span = scope.spans.add(
            trace_id=digest[:16],
            span_id=digest[16:24],
            name="llm_request",
            kind=Span.SPAN_KIND_SERVER,
            start_time_unix_nano=request.start_ns,
            end_time_unix_nano=request.end_ns,
        )
        span.attributes.add(key="gen_ai.request.id").value.string_value = request.request_id
        for key, value in request.attributes.items():
            if isinstance(value, int):
                span.attributes.add(key=key).value.int_value = value
            else:
                span.attributes.add(key=key).value.double_value = value
    return message.SerializeToString()
