"""OTLP attribute values -> plain Python values and JSON text."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable
from typing import Any

import orjson

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]

NOT_FINITE = {math.inf: "Infinity", -math.inf: "-Infinity"}


def plain_value(value: Any) -> Json:
    """The Python value of an ``AnyValue``.

    Bytes become base64 text; NaN and the infinities become the texts of OTLP/JSON (JSON has no numbers for them).
    A value without content, and one that refers to a string table (profiles only), is None.
    """
    kind = value.WhichOneof("value")
    match kind:
        case "string_value":
            return str(value.string_value)
        case "int_value":
            return int(value.int_value)
        case "double_value":
            number = float(value.double_value)
            return number if math.isfinite(number) else NOT_FINITE.get(number, "NaN")
        case "bool_value":
            return bool(value.bool_value)
        case "array_value":
            return [plain_value(item) for item in value.array_value.values]
        case "kvlist_value":
            return plain_object(value.kvlist_value.values)
        case "bytes_value":
            return base64.b64encode(value.bytes_value).decode()
        case _:
            return None


def plain_object(attributes: Iterable[Any]) -> dict[str, Json]:
    """Attributes as a dict in the order of arrival; of two with one key the last counts."""
    return {attribute.key: plain_value(attribute.value) for attribute in attributes}


def json_text(value: Json) -> str:
    """Compact JSON."""
    return orjson.dumps(value).decode()


def object_text(attributes: Any) -> str | None:
    """Attributes as a JSON object, None when there are none."""
    return json_text(plain_object(attributes)) if len(attributes) else None


def label(value: Json) -> str | None:
    """A scalar as text for a label column: text as it is, numbers and booleans as JSON; else (and for "") None."""
    if isinstance(value, str):
        return value or None
    if isinstance(value, bool | int | float):
        return json_text(value)
    return None
