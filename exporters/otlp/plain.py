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
from vllm_slo.exporters.otlp.lot import Lot, concatenated
from vllm_slo.exporters.otlp.probe import KEYS as PROBE_KEYS
from vllm_slo.exporters.otlp.probe import ProbeRows
from vllm_slo.exporters.otlp.refusals import Refusals, bad_id, named
from vllm_slo.exporters.otlp.resources import Resource, is_vllm_scope, resource_of
from vllm_slo.exporters.otlp.rows import Gathered, measure, requests_table, spans_table
from vllm_slo.exporters.otlp.salvage import salvage
from vllm_slo.exporters.otlp.values import json_text, object_text, plain_object, plain_value
from vllm_slo.exporters.records import SCOPE
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
class _Requests(Gathered):
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
class _Spans(Gathered):
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
    requests, spans, probe = _Requests(), _Spans(), ProbeRows(resources)

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
            from_probe = scope_name == SCOPE
            clean_first = always_clean or (from_probe and not prompts.harmless(PROBE_KEYS))
            for span in scope.spans:
                if clean_first:
                    clean(span)
                if from_probe and probe.add(span, index, clean):
                    continue
                if span.name == REQUEST_SPAN_NAME and (vllm_scope or _has_latencies(span)):
                    requests.add_request(span, index, clean)
                else:
                    clean(span)
                    spans.add_span(span, index, scope_name, vllm_scope or resource.is_vllm)
    refused = refusals.list()
    if spanless:
        _remove_spanless(request)
    tables = {"requests": requests.table(resources, received_ns), "spans": spans.table(resources, received_ns)}
    for name, rows in probe.tables(received_ns).items():
        tables[name] = concatenated([tables[name], rows]) if name in tables else rows
    return Decoded(
        lot=Lot(tables, any(resource.probe for resource in resources)),
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
