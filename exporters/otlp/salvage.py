"""A protobuf body that does not parse as a whole: keep what does, span by span."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from vllm_slo.exporters.otlp.decoded import BodyError
from vllm_slo.exporters.otlp.proto import envelope
from vllm_slo.exporters.otlp.refusals import Refusals

MALFORMED_SPAN = "malformed_span"
MALFORMED_GROUP = "malformed_group"


def salvage(body: bytes, refusals: Refusals) -> Any:
    """An ``ExportTraceServiceRequest`` of every span that parses alone; the rest is refused by position.

    `malformed_span`: invalid UTF-8, a truncated field, attributes nested deeper than protobuf's limit of 100.
    `malformed_group`: the resource or the scope that the spans belong to is broken, so nobody can tell whose they are
    (counted as 1 where the number of spans cannot be read either).

    Raises:
        BodyError: `malformed_protobuf`, when the outermost level is not protobuf.
    """
    kinds = envelope()
    try:
        outer = kinds["Request"].FromString(body)
    except DecodeError as error:
        raise BodyError(
            "malformed_protobuf",
            f"body of {len(body)} bytes is not an OTLP ExportTraceServiceRequest ({error}); "
            "send protobuf to the protobuf endpoint, or JSON with content type application/json",
        ) from error
    request = ExportTraceServiceRequest()
    for position, raw in enumerate(outer.resource_spans):
        where = f"resource_spans[{position}]"
        try:
            group = kinds["ResourceSpans"].FromString(raw)
            scopes = [kinds["ScopeSpans"].FromString(scope) for scope in group.scope_spans]
        except DecodeError as error:
            _salvage_scopes(raw, where, request, refusals, error)
            continue
        _group(request, group, list(enumerate(scopes)), where, refusals)
    return request


def _salvage_scopes(raw: bytes, where: str, request: Any, refusals: Refusals, error: DecodeError) -> None:
    """The scopes of one resource, where at least one of them is broken."""
    kinds = envelope()
    try:
        group = kinds["ResourceSpans"].FromString(raw)
    except DecodeError:
        refusals.add(MALFORMED_GROUP, f"{where} is not valid protobuf: {error}")
        return
    scopes = []
    for position, scope in enumerate(group.scope_spans):
        try:
            scopes.append((position, kinds["ScopeSpans"].FromString(scope)))
        except DecodeError as inner:
            refusals.add(MALFORMED_GROUP, f"{where}.scope_spans[{position}] is not valid protobuf: {inner}")
    _group(request, group, scopes, where, refusals)


def _group(request: Any, group: Any, scopes: list[tuple[int, Any]], where: str, refusals: Refusals) -> None:
    try:
        resource = _parsed(resource=group.resource).resource
    except DecodeError as error:
        count = sum(len(scope.spans) for _, scope in scopes)
        refusals.add(MALFORMED_GROUP, f"{where}.resource is not valid protobuf: {error}", count)
        return
    kept = request.resource_spans.add(resource=resource, schema_url=_text(group.schema_url))
    for position, scope in scopes:
        place = f"{where}.scope_spans[{position}]"
        try:
            named = _parsed(scope=scope.scope).scope_spans[0].scope
        except DecodeError as error:
            refusals.add(MALFORMED_GROUP, f"{place}.scope is not valid protobuf: {error}", len(scope.spans))
            continue
        into = kept.scope_spans.add(scope=named, schema_url=_text(scope.schema_url))
        for number, raw in enumerate(scope.spans):
            try:
                into.spans.append(_parsed(spans=[raw]).scope_spans[0].spans[0])
            except DecodeError as error:
                refusals.add(MALFORMED_SPAN, f"{place}.spans[{number}] is not valid protobuf: {error}")


def _parsed(resource: Iterable[bytes] = (), scope: Iterable[bytes] = (), spans: Iterable[bytes] = ()) -> Any:
    """The ``ResourceSpans`` of one part, parsed at its depth in a body: protobuf's nesting limit stays the same."""
    kinds = envelope()
    inner = kinds["ScopeSpans"](scope=scope, spans=spans).SerializeToString()
    outer = kinds["ResourceSpans"](resource=resource, scope_spans=[inner]).SerializeToString()
    body = kinds["Request"](resource_spans=[outer]).SerializeToString()
    return ExportTraceServiceRequest.FromString(body).resource_spans[0]


def _text(value: bytes) -> str:
    """A schema URL; one that is not UTF-8 is left out, no row depends on it."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return ""
