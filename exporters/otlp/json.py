"""OTLP/JSON -> OTLP protobuf.

Rules of the OTLP specification: ids are hex, 64-bit integers may be text or numbers, enums names or numbers, unknown
fields are ignored, null means absent. Beyond it, because senders do so: snake_case field names, the names used before
OTLP 1.0 (`instrumentationLibrarySpans`), short enum names (`OK`, `SERVER`), and ids in base64 where they cannot be
mistaken for hex (24 characters for 16 bytes, 12 for 8: what protobuf's own JSON printer writes).

``google.protobuf.json_format`` must not read OTLP/JSON: it takes hex ids for base64 and gives 24-byte trace ids.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import orjson
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from vllm_slo.exporters.conventions import SPAN_KINDS, SPAN_STATUSES
from vllm_slo.exporters.otlp.decoded import BodyError, Refusal
from vllm_slo.exporters.otlp.refusals import Refusals

DEEPEST = 32
"""Levels of arrays and key-value lists in one attribute; protobuf itself stops at 100 messages."""

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
_ROOTS = ("resourceSpans", "resource_spans")
_SCOPE_SPANS = ("scopeSpans", "scope_spans", "instrumentationLibrarySpans", "instrumentation_library_spans")
_SCOPE = ("scope", "instrumentationLibrary", "instrumentation_library")

Object = dict[str, Any]


class _Wrong(Exception):
    """A part that cannot be read: ``reason`` is the counter label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def to_protobuf(body: bytes) -> tuple[bytes, list[Refusal]]:
    """The body as protobuf, without the spans that cannot be read, and the refusals of those.

    Ids of a wrong length that are valid hex or empty are refused here or by the decoder, always under the same reason.
    `{}` is a valid body without spans.

    Raises:
        BodyError: `malformed_json` (also nesting without end and invalid UTF-8), `wrong_type` (an object or a list was
            expected at the named place), `no_resource_spans` (a JSON object of another kind, such as logs).
    """
    try:
        root = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BodyError("malformed_json", f"body of {len(body)} bytes is not JSON: {error}") from error
    if not isinstance(root, dict):
        raise _body_error("the body", root, "an object with resourceSpans")
    if root and _field(root, *_ROOTS) is None and not any(name in root for name in _ROOTS):
        raise BodyError(
            "no_resource_spans",
            f"the body has no resourceSpans but {_shown(sorted(root)[:5])}; send traces to this endpoint",
        )
    refusals = Refusals()
    request = ExportTraceServiceRequest()
    for position, group in enumerate(_list(root, "the body", *_ROOTS)):
        _group(_body_object(group, f"resourceSpans[{position}]"), f"resourceSpans[{position}]", request, refusals)
    return request.SerializeToString(), refusals.list()


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
        resource = _resource(_object(_field(group, "resource"), f"{place}.resource"))
        schema = _string(group, f"{place}", "schemaUrl", "schema_url")
    except _Wrong as wrong:
        refusals.add(wrong.reason, str(wrong), sum(map(len, spans)))
        return
    kept = request.resource_spans.add(resource=resource, schema_url=schema)
    for (scope, scope_place), members in zip(scopes, spans, strict=True):
        try:
            named = _scope(_object(_field(scope, *_SCOPE), f"{scope_place}.scope"))
            schema = _string(scope, scope_place, "schemaUrl", "schema_url")
        except _Wrong as wrong:
            refusals.add(wrong.reason, str(wrong), len(members))
            continue
        into = kept.scope_spans.add(scope=named, schema_url=schema)
        for position, member in enumerate(members):
            try:
                into.spans.append(_span(_object(member, "the span", required=True)))
            except _Wrong as wrong:
                refusals.add(wrong.reason, f"{scope_place}.spans[{position}]{_name(member)}: {wrong}")


def _resource(value: Object) -> Any:
    resource = Resource(dropped_attributes_count=_count(value, "droppedAttributesCount", "dropped_attributes_count"))
    _attributes(value, resource.attributes)
    return resource


def _scope(value: Object) -> Any:
    scope = InstrumentationScope(
        name=_string(value, "scope", "name"),
        version=_string(value, "scope", "version"),
        dropped_attributes_count=_count(value, "droppedAttributesCount", "dropped_attributes_count"),
    )
    _attributes(value, scope.attributes)
    return scope


def _span(value: Object) -> Any:
    span = Span(
        trace_id=_id(value, 16, "invalid_trace_id", "traceId", "trace_id"),
        span_id=_id(value, 8, "invalid_span_id", "spanId", "span_id"),
        parent_span_id=_id(value, 8, "invalid_parent_span_id", "parentSpanId", "parent_span_id"),
        trace_state=_string(value, "span", "traceState", "trace_state"),
        flags=_count(value, "flags"),
        name=_string(value, "span", "name"),
        kind=_enum(value, SPAN_KINDS, "SPAN_KIND_", "kind"),
        start_time_unix_nano=_nanoseconds(value, "startTimeUnixNano", "start_time_unix_nano"),
        end_time_unix_nano=_nanoseconds(value, "endTimeUnixNano", "end_time_unix_nano"),
        dropped_attributes_count=_count(value, "droppedAttributesCount", "dropped_attributes_count"),
        dropped_events_count=_count(value, "droppedEventsCount", "dropped_events_count"),
        dropped_links_count=_count(value, "droppedLinksCount", "dropped_links_count"),
    )
    _attributes(value, span.attributes)
    for position, item in enumerate(_items(value, "events")):
        event = _object(item, f"events[{position}]", required=True)
        added = span.events.add(
            time_unix_nano=_nanoseconds(event, "timeUnixNano", "time_unix_nano"),
            name=_string(event, f"events[{position}]", "name"),
            dropped_attributes_count=_count(event, "droppedAttributesCount", "dropped_attributes_count"),
        )
        _attributes(event, added.attributes)
    for position, item in enumerate(_items(value, "links")):
        link = _object(item, f"links[{position}]", required=True)
        added = span.links.add(
            trace_id=_id(link, 16, "invalid_link_trace_id", "traceId", "trace_id"),
            span_id=_id(link, 8, "invalid_link_span_id", "spanId", "span_id"),
            trace_state=_string(link, f"links[{position}]", "traceState", "trace_state"),
            flags=_count(link, "flags"),
            dropped_attributes_count=_count(link, "droppedAttributesCount", "dropped_attributes_count"),
        )
        _attributes(link, added.attributes)
    status = _field(value, "status")
    if status is not None:
        fields = _object(status, "status")
        span.status.code = _enum(fields, SPAN_STATUSES, "STATUS_CODE_", "code")
        span.status.message = _string(fields, "status", "message")
    return span


def _attributes(owner: Object, into: Any, depth: int = 0, name: str = "attributes") -> None:
    for position, item in enumerate(_items(owner, name)):
        pair = _object(item, f"{name}[{position}]", required=True)
        added = into.add(key=_string(pair, f"{name}[{position}]", "key"))
        value = _field(pair, "value")
        if value is not None:
            added.value.SetInParent()
            _any_value(value, added.value, depth)


def _any_value(value: Any, into: Any, depth: int) -> None:
    if depth > DEEPEST:
        raise _Wrong("too_deep", f"an attribute is nested deeper than {DEEPEST} levels")
    given = [(kind, item) for kind, item in _object(value, "value").items() if item is not None and kind in _KINDS]
    if len(given) > 1:
        raise _Wrong("wrong_type", f"an attribute value has {_shown([kind for kind, _ in given])}; one is allowed")
    for kind, item in given:
        _KINDS[kind](item, into, depth)


def _string_value(item: Any, into: Any, depth: int) -> None:
    if not isinstance(item, str):
        raise _wrong_type("stringValue", item, "text")
    into.string_value = item


def _bool_value(item: Any, into: Any, depth: int) -> None:
    if not isinstance(item, bool):
        raise _wrong_type("boolValue", item, "true or false")
    into.bool_value = item


def _int_value(item: Any, into: Any, depth: int) -> None:
    into.int_value = _integer(item, "intValue", -(2**63), 2**63 - 1)


def _double_value(item: Any, into: Any, depth: int) -> None:
    if isinstance(item, str):
        into.double_value = _double(item)
    elif isinstance(item, int | float) and not isinstance(item, bool):
        into.double_value = float(item)
    else:
        raise _wrong_type("doubleValue", item, "a number")


def _double(text: str) -> float:
    if text in _NOT_FINITE:
        return _NOT_FINITE[text]
    try:
        number = float(text) if len(text) <= 400 and "_" not in text else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise _wrong_type("doubleValue", text, "a number, NaN, Infinity or -Infinity")
    return number


def _array_value(item: Any, into: Any, depth: int) -> None:
    into.array_value.SetInParent()
    for member in _items(_object(item, "arrayValue"), "values"):
        added = into.array_value.values.add()
        if member is not None:
            _any_value(member, added, depth + 1)


def _kvlist_value(item: Any, into: Any, depth: int) -> None:
    into.kvlist_value.SetInParent()
    _attributes(_object(item, "kvlistValue"), into.kvlist_value.values, depth + 1, "values")


def _bytes_value(item: Any, into: Any, depth: int) -> None:
    decoded = _base64(item) if isinstance(item, str) else None
    if decoded is None:
        raise _wrong_type("bytesValue", item, "base64 text")
    into.bytes_value = decoded


_Setter = Callable[[Any, Any, int], None]
_KINDS: dict[str, _Setter] = {
    name: setter
    for names, setter in (
        (("stringValue", "string_value"), _string_value),
        (("boolValue", "bool_value"), _bool_value),
        (("intValue", "int_value"), _int_value),
        (("doubleValue", "double_value"), _double_value),
        (("arrayValue", "array_value"), _array_value),
        (("kvlistValue", "kvlist_value"), _kvlist_value),
        (("bytesValue", "bytes_value"), _bytes_value),
    )
    for name in names
}


def _field(owner: Object, *names: str) -> Any:
    """The first field that is there and not null."""
    for name in names:
        value = owner.get(name)
        if value is not None:
            return value
    return None


def _list(owner: Object, place: str, *names: str) -> list[Any]:
    """A list on the way to the spans; without it no span can be told from another."""
    value = _field(owner, *names)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _body_error(f"{names[0]} of {place}", value, "a list")
    return value


def _body_object(value: Any, place: str) -> Object:
    if not isinstance(value, dict):
        raise _body_error(place, value, "an object")
    return value


def _items(owner: Object, name: str) -> list[Any]:
    value = owner.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise _wrong_type(name, value, "a list")
    return value


def _object(value: Any, name: str, required: bool = False) -> Object:
    if value is None and not required:
        return {}
    if not isinstance(value, dict):
        raise _wrong_type(name, value, "an object")
    return value


def _string(owner: Object, place: str, *names: str) -> str:
    value = _field(owner, *names)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _wrong_type(f"{names[0]} of {place}", value, "text")
    return value


def _count(owner: Object, *names: str) -> int:
    value = _field(owner, *names)
    return 0 if value is None else _integer(value, names[0], 0, 2**32 - 1)


def _nanoseconds(owner: Object, *names: str) -> int:
    value = _field(owner, *names)
    return 0 if value is None else _integer(value, names[0], 0, 2**64 - 1)


def _integer(value: Any, name: str, least: int, most: int) -> int:
    """An integer given as number or text; 1.0 and 1e3 are integers in JSON."""
    number = None
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        number = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    if number is None or not least <= number <= most:
        raise _wrong_type(name, value, f"an integer from {least} to {most}")
    return number


def _enum(owner: Object, names: tuple[str, ...], prefix: str, field: str) -> int:
    """Number of an enum value; numbers unknown to this version pass, names unknown to it do not."""
    value = _field(owner, field)
    if value is None:
        return 0
    if isinstance(value, str) and not _INTEGER.fullmatch(value):
        short = value.removeprefix(prefix).lower()
        if short not in names:
            raise _Wrong("unknown_enum", f"{field} {_shown(value)} is not one of {prefix}{', '.join(names).upper()}")
        return names.index(short)
    return _integer(value, field, -(2**31), 2**31 - 1)


def _id(owner: Object, size: int, reason: str, *names: str) -> bytes:
    value = _field(owner, *names)
    if value is None or value == "":
        return b""
    if isinstance(value, str) and value.isascii():
        if len(value) == 2 * size:
            try:
                return binascii.unhexlify(value)
            except binascii.Error:
                pass
        elif len(value) == -(-size // 3) * 4:
            decoded = _base64(value)
            if decoded is not None and len(decoded) == size:
                return decoded
    raise _Wrong(reason, f"{names[0]} {_shown(value)} is not {2 * size} hex digits")


def _base64(text: str) -> bytes | None:
    """Bytes of base64 text, also of the URL-safe alphabet and without padding; None when it is neither."""
    try:
        standard = text.replace("-", "+").replace("_", "/")
        return base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
    except ValueError:
        return None


def _name(member: Any) -> str:
    name = member.get("name") if isinstance(member, dict) else None
    return f" ({name[:80]!r})" if isinstance(name, str) else ""


def _shown(value: Any) -> str:
    """A value short enough for a message."""
    text = repr(value) if isinstance(value, str | int | float | bool | list) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


def _wrong_type(name: str, value: Any, allowed: str) -> _Wrong:
    return _Wrong("wrong_type", f"{name} is {_kind(value)}; {allowed} is needed")


def _body_error(place: str, value: Any, allowed: str) -> BodyError:
    return BodyError("wrong_type", f"{place} is {_kind(value)}; {allowed} is needed")


def _kind(value: Any) -> str:
    """What kind of JSON value this is; never its content, which may be prompt text."""
    if value is None:
        return "null"
    names = ((bool, "a boolean"), (int, "a number"), (float, "a number"), (str, "text"), (list, "a list"))
    return next((name for kind, name in names if isinstance(value, kind)), "an object")
