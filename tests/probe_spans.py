"""OTLP bodies in the shape of the probe's and of a stock vLLM's beside it, from columns of the schema."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from vllm_slo.exporters import records
from vllm_slo.exporters.conventions import REQUEST_ID

SECOND = 10**9
RESOURCE = {"service.name": "vllm", "service.instance.id": "a", "vllm.model": "m", records.PROBE_VERSION: "0.3"}


@dataclass(frozen=True)
class Request:
    """One request of a server with the probe; its records share id and start. Times are epoch ns, parts ns."""

    name: str
    start: int
    child: int | None = None
    finish_reason: str = "stop"
    parts: Mapping[str, int] = field(default_factory=lambda: {"queue_step": 3_000_000, "queue_kv_blocks": 17_000_000})

    @property
    def engine_request_id(self) -> str:
        """As vLLM makes it: a child's number in front, eight digits behind."""
        front = "" if self.child is None else f"{self.child}_"
        return f"{front}{self.name}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"

    @property
    def queue(self) -> int:
        """Nanoseconds in the queue."""
        return sum(size for stem, size in self.parts.items() if stem in records.QUEUE_PARTS)

    def engine(self, **more: Any) -> Span:
        """The engine core's record."""
        queued = self.start + 2_000_000
        scheduled = queued + self.queue
        first, last = scheduled + 50_000_000, scheduled + 950_000_000
        values = {
            REQUEST_ID: self.name,
            records.key("engine_request_id"): self.engine_request_id,
            records.key("finish_reason"): self.finish_reason,
            records.key("engine"): "0",
            records.key("priority"): 0,
            records.key("preemptions"): 0,
            records.key("kv_blocks_peak"): 12,
            "gen_ai.usage.prompt_tokens": 100,
            "gen_ai.usage.completion_tokens": 10,
            records.time_key("queued_time"): queued,
            records.time_key("scheduled_time"): scheduled,
            records.time_key("first_token_time"): first,
            records.time_key("engine_end_time"): last,
            records.duration_key("queue"): self.queue,
            records.duration_key("prefill"): 50_000_000,
            records.duration_key("prefill_own"): 40_000_000,
            records.duration_key("prefill_other"): 10_000_000,
            records.duration_key("decode"): 900_000_000,
            records.duration_key("decode_work"): 700_000_000,
            records.duration_key("decode_slowdown"): 200_000_000,
            **{records.duration_key(stem): size for stem, size in self.parts.items()},
            **more,
        }
        return self._span(records.ENGINE_REQUEST, "e", last, values)

    def frontend(self, **more: Any) -> Span:
        """The front end's record, HTTP side included."""
        last = self.start + self.queue + 960_000_000
        values = {
            REQUEST_ID: self.name,
            records.key("engine_request_id"): self.engine_request_id,
            records.key("finish_reason"): self.finish_reason,
            "gen_ai.usage.prompt_tokens": 100,
            "gen_ai.usage.completion_tokens": 10,
            "gen_ai.request.max_tokens": 512,
            records.duration_key("time_to_first_token"): self.queue + 55_000_000,
            records.duration_key("request_duration"): last - self.start,
            records.key("http_status"): 200,
            records.key("http_route"): "/v1/completions",
            records.key("client_disconnected"): False,
            records.duration_key("http_duration"): last - self.start + 1_000_000,
            **more,
        }
        return self._span(records.FRONTEND_REQUEST, "f", last, values)

    def stock(self, **more: Any) -> Span:
        """vLLM's own span of the same request."""
        last = self.start + self.queue + 960_000_000
        values: dict[str, Any] = {
            REQUEST_ID: self.name,
            "gen_ai.usage.prompt_tokens": 100,
            "gen_ai.usage.completion_tokens": 10,
            "gen_ai.latency.time_to_first_token": (self.queue + 55_000_000) / SECOND,
            "gen_ai.latency.e2e": (last - self.start) / SECOND,
            "gen_ai.latency.time_in_queue": self.queue / SECOND,
            "gen_ai.latency.time_in_model_prefill": 0.05,
            "gen_ai.latency.time_in_model_decode": 0.9,
            "gen_ai.latency.time_in_model_inference": 0.95,
            "gen_ai.request.max_tokens": 512,
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.n": 1,
            **more,
        }
        return self._span("llm_request", "s", last, values)

    def _span(self, name: str, what: str, end: int, values: Mapping[str, Any]) -> Span:
        return span(name, f"{self.engine_request_id} {self.start} {what}", self.start, end, values)


def edge(name: str, start: int, status: int, **more: Any) -> Span:
    """A request that never reached the engine."""
    reason = "rejected" if status == 503 else "invalid" if status < 500 else "failed"
    values = {
        REQUEST_ID: name,
        records.key("finish_reason"): reason,
        records.key("http_status"): status,
        records.key("http_route"): "/v1/completions",
        records.key("client_disconnected"): False,
        records.duration_key("http_duration"): 2_000_000,
        **more,
    }
    return span(records.EDGE_REQUEST, f"{name} {start} edge", start, start + 2_000_000, values)


def sample(start: int, **columns: float | str) -> Span:
    """One second of an engine."""
    values = {records.key("engine"): "0", **{records.key(name): value for name, value in columns.items()}}
    return span(records.ENGINE_SAMPLE, f"sample {start}", start, start + SECOND, values)


def event(start: int, title: str, kind: str = "configuration", **columns: str) -> Span:
    """Something that happened to an engine."""
    values = {"kind": kind, "title": title, **columns}
    return span(records.EVENT, f"event {start} {title}", start, start, {records.key(k): v for k, v in values.items()})


def span(name: str, identity: str, start: int, end: int, values: Mapping[str, Any]) -> Span:
    """A span whose ids are drawn from its identity; null values are left out."""
    digest = hashlib.sha256(identity.encode()).digest()
    made = Span(
        trace_id=digest[:16],
        span_id=digest[16:24],
        name=name,
        kind=Span.SPAN_KIND_SERVER,
        start_time_unix_nano=start,
        end_time_unix_nano=end,
    )
    for key, value in values.items():
        into = made.attributes.add(key=key).value
        match value:
            case bool():
                into.bool_value = value
            case int():
                into.int_value = value
            case float():
                into.double_value = value
            case str():
                into.string_value = value
            case _:
                del made.attributes[-1]
    return made


def body(spans: Iterable[Span], resource: Mapping[str, str] | None = None) -> bytes:
    """One ExportTraceServiceRequest of one process: the probe's spans in its scope, stock ones in vLLM's."""
    message = ExportTraceServiceRequest()
    group = message.resource_spans.add()
    for key, value in (RESOURCE if resource is None else resource).items():
        group.resource.attributes.add(key=key).value.string_value = value
    scopes: dict[str, Any] = {}
    for one in spans:
        scope = "vllm.tracing.otel" if one.name == "llm_request" else records.SCOPE
        if scope not in scopes:
            scopes[scope] = group.scope_spans.add()
            scopes[scope].scope.name = scope
        scopes[scope].spans.append(one)
    return message.SerializeToString()
