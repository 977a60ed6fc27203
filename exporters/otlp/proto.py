"""OTLP trace messages under other declarations: same field numbers and wire format, other Python or Arrow types.

``envelope``: each level keeps the next one as bytes, so that a broken part leaves its neighbours readable.
``slim``: what a request span of vLLM needs; parts that it must not have are kept as bytes, so that they are seen.
Field numbers: opentelemetry-proto 1.x, ``trace/v1/trace.proto`` and ``common/v1/common.proto``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "vllm_slo.otlp"
_SCALARS = {
    "bytes": _Field.TYPE_BYTES,
    "bool": _Field.TYPE_BOOL,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "fixed64": _Field.TYPE_FIXED64,
    "double": _Field.TYPE_DOUBLE,
}

Message = tuple[tuple[str, int, str], ...]
"""(field, number, type) each; ``*`` before the type for a repeated field, ``|`` for a member of the one oneof."""

ENVELOPE: dict[str, Message] = {
    "Request": (("resource_spans", 1, "*bytes"),),
    "ResourceSpans": (("resource", 1, "*bytes"), ("scope_spans", 2, "*bytes"), ("schema_url", 3, "bytes")),
    "ScopeSpans": (("scope", 1, "*bytes"), ("spans", 2, "*bytes"), ("schema_url", 3, "bytes")),
}

SLIM: dict[str, Message] = {
    "Request": (("resource_spans", 1, "*ResourceSpans"),),
    "ResourceSpans": (("resource", 1, "*bytes"), ("scope_spans", 2, "*ScopeSpans"), ("schema_url", 3, "*bytes")),
    "ScopeSpans": (("scope", 1, "*bytes"), ("spans", 2, "*Span"), ("schema_url", 3, "*bytes")),
    "Span": (
        ("trace_id", 1, "bytes"),
        ("span_id", 2, "bytes"),
        ("trace_state", 3, "*bytes"),
        ("parent_span_id", 4, "bytes"),
        ("name", 5, "bytes"),
        ("start", 7, "fixed64"),
        ("end", 8, "fixed64"),
        ("attributes", 9, "*KeyValue"),
        ("events", 11, "*bytes"),
        ("links", 13, "*bytes"),
        ("status", 15, "*bytes"),
    ),
    "KeyValue": (("key", 1, "bytes"), ("value", 2, "AnyValue")),
    "AnyValue": (
        ("string", 1, "|bytes"),
        ("boolean", 2, "|bool"),
        ("integer", 3, "|int64"),
        ("double", 4, "|double"),
        ("array", 5, "|bytes"),
        ("list", 6, "|bytes"),
        ("bytes", 7, "|bytes"),
        ("string_index", 8, "|int32"),
    ),
}


def _file(name: str, messages: dict[str, Message]) -> Any:
    package = f"{_PACKAGE}.{name}"
    file = descriptor_pb2.FileDescriptorProto(name=f"vllm_slo/{name}.proto", package=package, syntax="proto3")
    for title, fields in messages.items():
        message = file.message_type.add(name=title)
        for field, number, kind in fields:
            declared = message.field.add(name=field, number=number, label=_Field.LABEL_OPTIONAL)
            if kind.startswith("*"):
                declared.label = _Field.LABEL_REPEATED
            if kind.startswith("|"):
                if not message.oneof_decl:
                    message.oneof_decl.add(name="value")
                declared.oneof_index = 0
            bare = kind.lstrip("*|")
            if bare in _SCALARS:
                declared.type = _SCALARS[bare]
            else:
                declared.type = _Field.TYPE_MESSAGE
                declared.type_name = f".{package}.{bare}"
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    return pool.FindFileByName(file.name)


@lru_cache(maxsize=1)
def envelope() -> dict[str, Any]:
    """Message classes of the envelope by name."""
    types = _file("envelope", ENVELOPE).message_types_by_name
    return {name: message_factory.GetMessageClass(types[name]) for name in ENVELOPE}


@lru_cache(maxsize=1)
def slim() -> Any:
    """File descriptor of the slim form; ``message_types_by_name["Request"]`` is its root."""
    return _file("slim", SLIM)
