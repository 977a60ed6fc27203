"""OTLP protobuf -> rows with Google's protobuf: complete, and what the faster decoder is measured against."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from vllm_slo.exporters.conventions import (
    DECODE,
    INFERENCE,
    INTEGER_ATTRIBUTES,
    PREFILL,
    REAL_ATTRIBUTES,
    REQUEST_ID,
    REQUEST_SPAN_NAME,
    SECONDS_ATTRIBUTES,
    SPAN_KINDS,
    SPAN_STATUSES,
    TEXT_ATTRIBUTES,
)
from vllm_slo.exporters.otlp import numbers
from vllm_slo.exporters.otlp.clean import prompt_text, remove
from vllm_slo.exporters.otlp.decoded import Decoded, DecodeSettings
from vllm_slo.exporters.otlp.refusals import NO_SPAN, Refusals, bad_id, named
from vllm_slo.exporters.otlp.resources import Resource, is_vllm_scope, resource_of
from vllm_slo.exporters.otlp.rows import Common, ids_array, measure, requests_table, spans_table
from vllm_slo.exporters.otlp.salvage import salvage
from vllm_slo.exporters.otlp.values import json_text, object_text, plain_object, plain_value
from vllm_slo.exporters.schema import INTEGER, REAL, TEXT

Reader = Callable[[Any], Any]

COLUMN_OF: dict[str, str] = {**SECONDS_ATTRIBUTES, **INTEGER_ATTRIBUTES, **REAL_ATTRIBUTES, **TEXT_ATTRIBUTES}
READERS: dict[str, Reader] = {
    **dict.fromkeys(SECONDS_ATTRIBUTES, numbers.seconds),
    **dict.fromkeys(INTEGER_ATTRIBUTES, numbers.integer),
    **dict.fromkeys(REAL_ATTRIBUTES, numbers.real),
    **dict.fromkeys(TEXT_ATTRIBUTES, numbers.text),
    INFERENCE: numbers.seconds,
}
KEYS = (*COLUMN_OF, INFERENCE)
SLOTS = {key: position for position, key in enumerate(KEYS)}
PREFILL_SLOT, DECODE_SLOT, INFERENCE_SLOT = (SLOTS[key] for key in (PREFILL, DECODE, INFERENCE))
READ = tuple(READERS[key] for key in KEYS)
TELLTALE_PREFIX = "gen_ai.latency."
CODE_FUNCTION = "code.function"
INTERNAL = SPAN_KINDS.index("internal")
SAME = 1e-6
"""Seconds within which inference counts as prefill + decode and is not kept apart."""


@dataclass
class _Rows:
    """What the rows of one table share, span by span."""

    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    trace_id: list[bytes] = field(default_factory=list)
    span_id: list[bytes] = field(default_factory=list)
    parent_span_id: list[bytes | None] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)

    def add(self, span: Any, resource: int) -> None:
        self.start.append(span.start_time_unix_nano)
        self.end.append(span.end_time_unix_nano)
        self.trace_id.append(span.trace_id)
        self.span_id.append(span.span_id)
        parent = span.parent_span_id
        self.parent_span_id.append(parent if parent and parent != NO_SPAN else None)
        self.resource.append(resource)

    def common(self, resources: list[Resource], received_ns: int) -> Common:
        return Common(
            start=np.array(self.start, dtype=np.uint64),
            end=np.array(self.end, dtype=np.uint64),
            trace_id=ids_array(self.trace_id),
            span_id=ids_array(self.span_id),
            parent_span_id=ids_array(self.parent_span_id),
            resource=np.array(self.resource, dtype=np.int64),
            resources=resources,
            received_ns=received_ns,
        )


@dataclass
class _Requests(_Rows):
    columns: dict[str, list[Any]] = field(default_factory=lambda: {column: [] for column in COLUMN_OF.values()})
    status: list[str] = field(default_factory=list)
    attributes: list[str | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._appends = [self.columns[column].append for column in COLUMN_OF.values()]

    def add_request(self, span: Any, resource: int, clean: Callable[[Any], None]) -> None:
        """One row; ``clean`` takes prompt text out of the span and is called only for a span that could have any."""
        values, unusual = _read(span)
        if unusual or span.events or span.links:
            clean(span)
            values, unusual = _read(span)
        self.add(span, resource)
        self.status.append(_named(SPAN_STATUSES, span.status.code))
        self.attributes.append(_left_over(span, values) if unusual else None)
        for append, value in zip(self._appends, values, strict=False):
            append(value)

    def table(self, resources: list[Resource], received_ns: int) -> pa.Table:
        measures = {c: measure(np.array(self.columns[c], dtype=np.float64)) for c in SECONDS_ATTRIBUTES.values()}
        columns = {c: pa.array(self.columns[c], INTEGER) for c in INTEGER_ATTRIBUTES.values()}
        columns |= {c: pa.array(self.columns[c], REAL) for c in REAL_ATTRIBUTES.values()}
        columns |= {c: pa.array(self.columns[c], TEXT) for c in TEXT_ATTRIBUTES.values()}
        columns |= {"status": pa.array(self.status, TEXT), "attributes": pa.array(self.attributes, TEXT)}
        return requests_table(self.common(resources, received_ns), measures, columns)


@dataclass
class _Spans(_Rows):
    name: list[str] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    status: list[str] = field(default_factory=list)
    status_message: list[str | None] = field(default_factory=list)
    scope_name: list[str | None] = field(default_factory=list)
    attributes: list[str | None] = field(default_factory=list)
    events: list[str | None] = field(default_factory=list)
    links: list[str | None] = field(default_factory=list)
    startup: list[bool] = field(default_factory=list)

    def add_span(self, span: Any, resource: int, scope: str, is_vllm: bool) -> None:
        self.add(span, resource)
        self.name.append(span.name)
        self.kind.append(_named(SPAN_KINDS, span.kind))
        self.status.append(_named(SPAN_STATUSES, span.status.code))
        self.status_message.append(span.status.message or None)
        self.scope_name.append(scope or None)
        self.attributes.append(object_text(span.attributes))
        self.events.append(json_text([_event(event) for event in span.events]) if span.events else None)
        self.links.append(json_text([_link(link) for link in span.links]) if span.links else None)
        self.startup.append(is_vllm and span.kind == INTERNAL and any(a.key == CODE_FUNCTION for a in span.attributes))

    def table(self, resources: list[Resource], received_ns: int) -> pa.Table:
        texts = ("name", "kind", "status", "status_message", "scope_name", "attributes", "events", "links")
        columns = {column: pa.array(getattr(self, column), TEXT) for column in texts}
        return spans_table(self.common(resources, received_ns), np.array(self.startup, dtype=np.bool_), columns)


def decode(body: bytes, received_ns: int, settings: DecodeSettings) -> Decoded:
    """Rows of an ``ExportTraceServiceRequest``; see ``decoded.Decoded``.

    A span is refused alone when an id is unusable or when it does not parse; its neighbours stay.
    An unknown span kind counts as `unspecified`, an unknown status as `unset`.
    Resources and scopes without spans are passed over.

    Raises:
        BodyError: `malformed_protobuf`, when not even the outermost level can be read.
    """
    refusals = Refusals()
    try:
        request, salvaged = ExportTraceServiceRequest.FromString(body), False
    except DecodeError:
        request, salvaged = salvage(body, refusals), True
    prompts = prompt_text(settings.prompt_text_attributes)
    dropped: dict[str, int] = {}
    always_clean = not prompts.harmless(KEYS)
    resources: list[Resource] = []
    requests, spans = _Requests(), _Spans()

    def clean(span: Any) -> None:
        prompts.clean_span(span, dropped)

    spanless = False
    for position, group in enumerate(request.resource_spans):
        scopes = [(number, scope) for number, scope in enumerate(group.scope_spans) if scope.spans]
        spanless |= len(scopes) < max(len(group.scope_spans), 1)
        if not scopes:
            continue
        prompts.clean_attributes(group.resource.attributes, dropped)
        resource = resource_of(group.resource, settings)
        resources.append(resource)
        index = len(resources) - 1
        for number, scope in scopes:
            prompts.clean_attributes(scope.scope.attributes, dropped)
            scope_name = scope.scope.name
            vllm_scope = is_vllm_scope(scope_name)
            _refuse(scope, f"resource_spans[{position}].scope_spans[{number}]", refusals)
            for span in scope.spans:
                if always_clean:
                    clean(span)
                if span.name == REQUEST_SPAN_NAME and (vllm_scope or _has_latencies(span)):
                    requests.add_request(span, index, clean)
                else:
                    clean(span)
                    spans.add_span(span, index, scope_name, vllm_scope or resource.is_vllm)
    refused = refusals.list()
    if spanless:
        _remove_spanless(request)
    return Decoded(
        requests=requests.table(resources, received_ns),
        spans=spans.table(resources, received_ns),
        clean_body=request.SerializeToString() if salvaged or refused or dropped or spanless else body,
        refused=refused,
        dropped_attributes=dropped,
    )


def _remove_spanless(request: Any) -> None:
    """Take out resources and scopes without spans: no row needs them, and nothing has cleaned them."""
    for group in request.resource_spans:
        remove(group.scope_spans, [number for number, scope in enumerate(group.scope_spans) if not scope.spans])
    remove(
        request.resource_spans,
        [position for position, group in enumerate(request.resource_spans) if not group.scope_spans],
    )


def _refuse(scope: Any, place: str, refusals: Refusals) -> None:
    """Take spans with unusable ids out of a scope."""
    refused = []
    for position, span in enumerate(scope.spans):
        bad = bad_id(span)
        if bad:
            reason, wrong = bad
            refusals.add(reason, f"{place}.spans[{position}]{named(span.name)}: {wrong}")
            refused.append(position)
    remove(scope.spans, refused)


def _read(span: Any) -> tuple[list[Any], bool]:
    """Values by slot (see ``KEYS``), and whether an attribute is left over: unknown, or unreadable for its column."""
    found: list[Any] = [None] * len(KEYS)
    unusual = False
    for attribute in span.attributes:
        slot = SLOTS.get(attribute.key)
        if slot is None:
            unusual = True
        else:
            value = READ[slot](attribute.value)
            found[slot] = value
            if value is None:
                unusual = True
    inference = found[INFERENCE_SLOT]
    if inference is not None and not _derivable(inference, found[PREFILL_SLOT], found[DECODE_SLOT]):
        unusual = True
    return found, unusual


def _derivable(inference: float, prefill: float | None, decode: float | None) -> bool:
    return prefill is not None and decode is not None and abs(inference - (prefill + decode)) <= SAME


def _left_over(span: Any, values: list[Any]) -> str | None:
    """The attributes that no column holds, as a JSON object; None when there are none."""
    kept = {attribute.key: attribute.value for attribute in span.attributes}
    for key, value in zip(KEYS, values, strict=True):
        if value is not None and (key != INFERENCE or _derivable(value, values[PREFILL_SLOT], values[DECODE_SLOT])):
            del kept[key]
    return json_text({key: plain_value(value) for key, value in kept.items()}) if kept else None


def _has_latencies(span: Any) -> bool:
    return any(a.key == REQUEST_ID or a.key.startswith(TELLTALE_PREFIX) for a in span.attributes)


def _named(names: tuple[str, ...], number: int) -> str:
    return names[number] if 0 <= number < len(names) else names[0]


def _event(event: Any) -> dict[str, Any]:
    return {"time_unix_nano": event.time_unix_nano, "name": event.name, "attributes": plain_object(event.attributes)}


def _link(link: Any) -> dict[str, Any]:
    return {
        "trace_id": link.trace_id.hex(),
        "span_id": link.span_id.hex(),
        "trace_state": link.trace_state,
        "attributes": plain_object(link.attributes),
    }
