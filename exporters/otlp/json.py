"""OTLP/JSON -> OTLP protobuf.

Rules of the OTLP specification: ids are hex, 64-bit integers may be text or numbers, enums names or numbers, unknown
fields are ignored, null means absent. Beyond it, because senders do so: snake_case field names, the names used before
OTLP 1.0 (`instrumentationLibrarySpans`), short enum names (`OK`, `SERVER`), and ids in base64 where they cannot be
mistaken for hex (24 characters for 16 bytes, 12 for 8: what protobuf's own JSON printer writes).

``google.protobuf.json_format`` must not read OTLP/JSON: it takes hex ids for base64 and gives 24-byte trace ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import orjson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from vllm_slo.exporters.conventions import SPAN_KINDS, SPAN_STATUSES
from vllm_slo.exporters.otlp.decoded import BodyError, Refusal
from vllm_slo.exporters.otlp.json_fields import (
    Object,
    Wrong,
    count,
    enum,
    field,
    id_bytes,
    items,
    kind_of,
    nanoseconds,
    object_of,
    shown,
    string,
)
from vllm_slo.exporters.otlp.json_values import attributes
from vllm_slo.exporters.otlp.refusals import Refusals, named

_ROOTS = ("resourceSpans", "resource_spans")
_SCOPE_SPANS = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans", "instrumentation_library_spans")
_SCOPE = ("scope", "instrumentationLibrary", "instrumentation_library")

_ESCAPE = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>u[dD][89a-fA-F][0-9a-fA-F]{2})|.)",
    re.DOTALL,
)
"""One escape of a JSON text; ``lone`` is half a surrogate pair."""


def to_protobuf(body: bytes) -> tuple[bytes, list[Refusal]]:
    """The body as protobuf, without the spans that cannot be read, and the refusals of those.

    Ids of a wrong length that are valid hex or empty are refused here or by the decoder, always under the same reason.
    `{}` is a valid body without spans.

    Raises:
        BodyError: `malformed_json` (also nesting without end and invalid UTF-8), `wrong_type` (an object or a list was
            expected at the named place), `no_resource_spans` (a JSON object of another kind, such as logs).
    """
    root = _parsed(body)
    if not isinstance(root, dict):
        raise _body_error("the body", root, "an object with resourceSpans")
    if root and field(root, *_ROOTS) is None and not any(name in root for name in _ROOTS):
        raise BodyError(
            "no_resource_spans",
            f"the body has no resourceSpans but {shown(sorted(root)[:5])}; send traces to this endpoint",
        )
    refusals = Refusals()
    request = ExportTraceServiceRequest()
    for position, group in enumerate(_list(root, "the body", *_ROOTS)):
        _group(_body_object(group, f"resourceSpans[{position}]"), f"resourceSpans[{position}]", request, refusals)
    return request.SerializeToString(), refusals.list()


def _parsed(body: bytes) -> Any:
    """The JSON value. Half a surrogate pair (JavaScript writes one where it cuts an emoji) becomes U+FFFD."""
    try:
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError:
            if b"\\ud" not in body and b"\\uD" not in body:
                raise
            return orjson.loads(_ESCAPE.sub(lambda escape: b"\\ufffd" if escape["lone"] else escape[0], body))
    except orjson.JSONDecodeError as error:
        raise BodyError("malformed_json", f"body of {len(body)} bytes is not JSON: {error}") from error


def lines(stream: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """(line number from 1, line) of each body in JSON Lines; blank lines and a byte order mark are skipped."""
    for number, line in enumerate(stream, start=1):
        text = line.strip()
        if number == 1:
            text = text.removeprefix(b"\xef\xbb\xbf")
        if text:
            yield number, text


def _group(group: Object, place: str, request: Any, refusals: Refusals) -> None:
    scopes = [
        (_body_object(scope, f"{place}.scopeSpans[{position}]"), f"{place}.scopeSpans[{position}]")
        for position, scope in enumerate(_list(group, place, *_SCOPE_SPANS))
    ]
    spans = [_list(scope, scope_place, "spans") for scope, scope_place in scopes]
    try:
        resource = _resource(object_of(field(group, "resource"), f"{place}.resource"))
        schema = string(group, f"{place}", "schemaUrl", "schema_url")
    except Wrong as wrong:
        refusals.add(wrong.reason, str(wrong), sum(map(len, spans)))
        return
    kept = request.resource_spans.add(resource=resource, schema_url=schema)
    for (scope, scope_place), members in zip(scopes, spans, strict=True):
        try:
            named = _scope(object_of(field(scope, *_SCOPE), f"{scope_place}.scope"))
            schema = string(scope, scope_place, "schemaUrl", "schema_url")
        except Wrong as wrong:
            refusals.add(wrong.reason, str(wrong), len(members))
            continue
        into = kept.scope_spans.add(scope=named, schema_url=schema)
        for position, member in enumerate(members):
            try:
                into.spans.append(_span(object_of(member, "the span", required=True)))
            except Wrong as wrong:
                refusals.add(wrong.reason, f"{scope_place}.spans[{position}]{_name(member)}: {wrong}")


def _resource(value: Object) -> Any:
    resource = Resource(dropped_attributes_count=count(value, "droppedAttributesCount", "dropped_attributes_count"))
    attributes(value, resource.attributes)
    return resource


def _scope(value: Object) -> Any:
    scope = InstrumentationScope(
        name=string(value, "scope", "name"),
        version=string(value, "scope", "version"),
        dropped_attributes_count=count(value, "droppedAttributesCount", "dropped_attributes_count"),
    )
    attributes(value, scope.attributes)
    return scope


def _span(value: Object) -> Any:
    span = Span(
        trace_id=id_bytes(value, 16, "invalid_trace_id", "traceId", "trace_id"),
        span_id=id_bytes(value, 8, "invalid_span_id", "spanId", "span_id"),
        parent_span_id=id_bytes(value, 8, "invalid_parent_span_id", "parentSpanId", "parent_span_id"),
        trace_state=string(value, "span", "traceState", "trace_state"),
        flags=count(value, "flags"),
        name=string(value, "span", "name"),
        kind=enum(value, SPAN_KINDS, "SPAN_KIND_", "kind"),
        start_time_unix_nano=nanoseconds(value, "startTimeUnixNano", "start_time_unix_nano"),
        end_time_unix_nano=nanoseconds(value, "endTimeUnixNano", "end_time_unix_nano"),
        dropped_attributes_count=count(value, "droppedAttributesCount", "dropped_attributes_count"),
        dropped_events_count=count(value, "droppedEventsCount", "dropped_events_count"),
        dropped_links_count=count(value, "droppedLinksCount", "dropped_links_count"),
    )
    attributes(value, span.attributes)
    for position, item in enumerate(items(value, "events")):
        event = object_of(item, f"events[{position}]", required=True)
        added = span.events.add(
            time_unix_nano=nanoseconds(event, "timeUnixNano", "time_unix_nano"),
            name=string(event, f"events[{position}]", "name"),
            dropped_attributes_count=count(event, "droppedAttributesCount", "dropped_attributes_count"),
        )
        attributes(event, added.attributes)
    for position, item in enumerate(items(value, "links")):
        link = object_of(item, f"links[{position}]", required=True)
        linked = span.links.add(
            trace_id=id_bytes(link, 16, "invalid_link_trace_id", "traceId", "trace_id"),
            span_id=id_bytes(link, 8, "invalid_link_span_id", "spanId", "span_id"),
            trace_state=string(link, f"links[{position}]", "traceState", "trace_state"),
            flags=count(link, "flags"),
            dropped_attributes_count=count(link, "droppedAttributesCount", "dropped_attributes_count"),
        )
        attributes(link, linked.attributes)
    status = field(value, "status")
    if status is not None:
        fields = object_of(status, "status")
        span.status.code = enum(fields, SPAN_STATUSES, "STATUS_CODE_", "code")
        span.status.message = string(fields, "status", "message")
    return span


def _list(owner: Object, place: str, *names: str) -> list[Any]:
    """A list on the way to the spans; without it no span can be told from another."""
    value = field(owner, *names)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _body_error(f"{names[0]} of {place}", value, "a list")
    return value


def _body_object(value: Any, place: str) -> Object:
    if not isinstance(value, dict):
        raise _body_error(place, value, "an object")
    return value


def _body_error(place: str, value: Any, allowed: str) -> BodyError:
    return BodyError("wrong_type", f"{place} is {kind_of(value)}; {allowed} is needed")


def _name(member: Any) -> str:
    name = member.get("name") if isinstance(member, dict) else None
    return named(name) if isinstance(name, str) else ""
