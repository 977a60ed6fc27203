"""OTLP/JSON attributes -> protobuf attributes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_slo.exporters.otlp.json_fields import (
    Object,
    Wrong,
    base64_bytes,
    double,
    field,
    integer,
    items,
    object_of,
    shown,
    string,
    wrong_type,
)

DEEPEST = 24
"""Levels of arrays and key-value lists in an attribute. Protobuf allows 100 messages; a key-value list takes three."""


def attributes(owner: Object, into: Any, depth: int = 0, name: str = "attributes") -> None:
    """Add the attributes of an object; ``Wrong`` names the first that cannot be read (`too_deep`, `wrong_type`)."""
    for position, item in enumerate(items(owner, name)):
        pair = object_of(item, f"{name}[{position}]", required=True)
        added = into.add(key=string(pair, f"{name}[{position}]", "key"))
        value = field(pair, "value")
        if value is not None:
            added.value.SetInParent()
            _any_value(value, added.value, depth)


def _any_value(value: Any, into: Any, depth: int) -> None:
    if depth > DEEPEST:
        raise Wrong("too_deep", f"an attribute is nested deeper than {DEEPEST} levels")
    given = [(kind, item) for kind, item in object_of(value, "value").items() if item is not None and kind in _KINDS]
    if len(given) > 1:
        raise Wrong("wrong_type", f"an attribute value has {shown([kind for kind, _ in given])}; one is allowed")
    for kind, item in given:
        _KINDS[kind](item, into, depth)


def _string_value(item: Any, into: Any, depth: int) -> None:
    if not isinstance(item, str):
        raise wrong_type("stringValue", item, "text")
    into.string_value = item


def _bool_value(item: Any, into: Any, depth: int) -> None:
    if not isinstance(item, bool):
        raise wrong_type("boolValue", item, "true or false")
    into.bool_value = item


def _int_value(item: Any, into: Any, depth: int) -> None:
    into.int_value = integer(item, "intValue", -(2**63), 2**63 - 1)


def _double_value(item: Any, into: Any, depth: int) -> None:
    if isinstance(item, str):
        into.double_value = double(item)
    elif isinstance(item, int | float) and not isinstance(item, bool):
        into.double_value = float(item)
    else:
        raise wrong_type("doubleValue", item, "a number")


def _array_value(item: Any, into: Any, depth: int) -> None:
    into.array_value.SetInParent()
    for member in items(object_of(item, "arrayValue"), "values"):
        added = into.array_value.values.add()
        if member is not None:
            _any_value(member, added, depth + 1)


def _kvlist_value(item: Any, into: Any, depth: int) -> None:
    into.kvlist_value.SetInParent()
    attributes(object_of(item, "kvlistValue"), into.kvlist_value.values, depth + 1, "values")


def _bytes_value(item: Any, into: Any, depth: int) -> None:
    decoded = base64_bytes(item) if isinstance(item, str) else None
    if decoded is None:
        raise wrong_type("bytesValue", item, "base64 text")
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
