"""Records as OpenTelemetry spans, and the exporter of OpenTelemetry that sends them."""

from __future__ import annotations

import importlib.util
import operator
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from vllm_slo import __version__
from vllm_slo.exporters.conventions import MODEL, PROCESS_KIND
from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.probe import ids
from vllm_slo.exporters.probe.encode import PAUSE_EVERY, Encoder
from vllm_slo.exporters.probe.settings import Settings
from vllm_slo.exporters.records import EDGE_REQUEST, FRONTEND_REQUEST, PROBE_VERSION, SCOPE

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import SpanContext

EXPORT_TIMEOUT_SECONDS = 5.0
"""For one export with the exporter's own retries; it runs in a thread that nothing waits for."""
HTTP_BATCH = 64
"""OpenTelemetry encodes these in one go, at 60 us each, and who waits for the interpreter gets it after 5 ms only."""

Value = str | int | float | bool
_PLAIN = frozenset((str, int, float, bool))


class ExporterMissing(SloError):
    """OpenTelemetry's OTLP exporter cannot be imported."""


@dataclass(slots=True)
class SpanData:
    """A record on its way out: times in epoch ns, attributes by the keys of ``records``, those that are null left out.

    A record of a request carries its ``engine_request_id`` and, when the client sent any, its ``trace_headers``; all
    records of one request have one ``start_ns``.
    """

    name: str
    start_ns: int
    end_ns: int
    attributes: Mapping[str, Any] = field(default_factory=dict)
    trace_headers: Mapping[str, str] | None = None
    engine_request_id: str | None = None
    error: bool = False
    drawn: tuple[int, int] = field(init=False, default=(0, 0))
    """Trace and span id of a record of no request: drawn once, so that sending it again does not make it another."""

    def __post_init__(self) -> None:
        if self.engine_request_id is None:
            # Not the module `random`: vLLM seeds it alike in every process.
            self.drawn = secrets.randbits(128) or 1, secrets.randbits(64) or 1


def resource_attributes(settings: Settings, version: str, process_kind: str, model: str | None) -> dict[str, str]:
    """What every span of this process carries; what the environment says is never overwritten."""
    found = {PROBE_VERSION: version, PROCESS_KIND: process_kind}
    if model:
        found[MODEL] = model
    return {**found, **settings.resource, PROBE_VERSION: version}


class Spans:
    """Turns records into spans of the SDK; whatever can be shared between them is made once."""

    def __init__(self, resource: Mapping[str, str], version: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        self._resource: Resource = Resource(resource)
        self._scope = InstrumentationScope(SCOPE, version)
        self._readable, self._context = ReadableSpan, SpanContext
        self._kinds = {FRONTEND_REQUEST: SpanKind.SERVER, EDGE_REQUEST: SpanKind.SERVER}
        self._internal = SpanKind.INTERNAL
        self._unset, self._error = Status(StatusCode.UNSET), Status(StatusCode.ERROR)
        self._sampled = TraceFlags(TraceFlags.SAMPLED)

    def of(self, records: Iterable[SpanData]) -> list[ReadableSpan]:
        """One span a record, in order."""
        return [self._span(record) for record in records]

    def _span(self, record: SpanData) -> ReadableSpan:
        attributes = record.attributes
        if any(type(value) not in _PLAIN for value in attributes.values()):
            attributes = _cleaned(attributes)
        trace, span, parent = _ids(record)
        return self._readable(
            record.name,
            context=self._context(trace, span, False, self._sampled),
            parent=self._parent(trace, parent),
            resource=self._resource,
            attributes=attributes,
            kind=self._kinds.get(record.name, self._internal),
            status=self._error if record.error else self._unset,
            start_time=record.start_ns,
            end_time=max(record.end_ns, record.start_ns),
            instrumentation_scope=self._scope,
        )

    def _parent(self, trace: int, span: int) -> SpanContext | None:
        return self._context(trace, span, True, self._sampled) if span else None


def _ids(record: SpanData) -> tuple[int, int, int]:
    """Trace, span and parent; the parent of a root is 0."""
    request, start = record.engine_request_id, record.start_ns
    client = ids.client_context(record.trace_headers)
    if request is None:
        trace, span = record.drawn
        return (client[0], span, client[1]) if client else (trace, span, 0)
    trace = client[0] if client else ids.trace_id(None, request, start)
    front_end = ids.frontend_span_id(request, start)
    if record.name in (FRONTEND_REQUEST, EDGE_REQUEST):
        return trace, front_end, client[1] if client else 0
    return trace, ids.engine_span_id(request, start), front_end


def _cleaned(attributes: Mapping[str, Any]) -> dict[str, Value]:
    """Without nulls; integers of other types (numpy's) as integers, whatever else is neither as text of its type's."""
    found: dict[str, Value] = {}
    for key, value in attributes.items():
        if type(value) in _PLAIN:
            found[key] = value
        elif value is not None:
            try:
                found[key] = operator.index(value)
            except TypeError:
                found[key] = float(value) if hasattr(value, "__float__") else str(value)
    return found


class Sender:
    """Sends records by OpenTelemetry's exporter for ``grpc`` or ``http/protobuf``.

    Its other settings (headers, certificates, compression) are those of the environment. Made in the thread that uses
    it: a gRPC channel does not survive a fork.
    """

    def __init__(self, endpoint: str, protocol: str, resource: Mapping[str, str], version: str) -> None:
        self._spans = Spans(resource, version)
        self._exporter = _exporter(endpoint, protocol)
        self.batch = 512 if protocol == "grpc" else HTTP_BATCH

    def send(self, records: Sequence[SpanData]) -> bool:
        """Whether the receiver has them; may take EXPORT_TIMEOUT_SECONDS."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans: list[ReadableSpan] = []
        for first in range(0, len(records), PAUSE_EVERY):
            spans += self._spans.of(records[first : first + PAUSE_EVERY])
            pause()
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        """Ends an export that is under way."""
        self._exporter.shutdown()


def sender(settings: Settings, vllm_config: Any, process_kind: str) -> Callable[[], Sender]:
    """Makes the sender of this process when called; ExporterMissing at once where OpenTelemetry has no exporter."""
    module = f"opentelemetry.exporter.otlp.proto.{settings.protocol.partition('/')[0]}.trace_exporter"
    try:
        missing = importlib.util.find_spec(module) is None
    except ModuleNotFoundError:
        missing = True
    if missing:
        raise ExporterMissing(f"{module} is not installed; pip install opentelemetry-exporter-otlp")
    resource = resource_attributes(settings, __version__, process_kind, settings.model_for(vllm_config))
    return partial(Sender, settings.endpoint_for(vllm_config), settings.protocol, resource, __version__)


def pause() -> None:
    """Lets the other threads of the process have the interpreter; sleep(0) would take it back before they wake."""
    time.sleep(20e-6)


def _exporter(endpoint: str, protocol: str) -> SpanExporter:
    if protocol != "grpc":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

        return Http(endpoint=endpoint, timeout=EXPORT_TIMEOUT_SECONDS)

    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    class QuickGrpc(Grpc):
        """With the probe's encoder. Were this method no longer called, OpenTelemetry's would do the same."""

        _encoder = Encoder()

        def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
            return ExportTraceServiceRequest.FromString(self._encoder.encode(data, pause))

    secure = urlsplit(endpoint).scheme == "https"
    return QuickGrpc(endpoint=endpoint, insecure=not secure, timeout=EXPORT_TIMEOUT_SECONDS)
