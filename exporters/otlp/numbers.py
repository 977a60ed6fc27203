"""Attribute values -> numbers of the columns. Senders write ints, doubles or numeric text; None: not such a number."""

from __future__ import annotations

import math
from typing import Any

INT64 = range(-(2**63), 2**63)
NUMERIC = frozenset("0123456789.eE+-")
LONGEST_NUMBER = 64
"""Characters of the longest text read as a number."""


def real(value: Any) -> float | None:
    """A finite float; None for NaN, the infinities and what is no number."""
    kind = value.WhichOneof("value")
    if kind == "double_value":
        number = value.double_value
    elif kind == "int_value":
        number = float(value.int_value)
    elif kind == "string_value":
        number = _parsed(value.string_value)
    else:
        return None
    return number if math.isfinite(number) else None


def integer(value: Any) -> int | None:
    """A 64-bit integer; None for a fraction, for what does not fit and for what is no number."""
    number: int = value.int_value
    if number:
        return number
    kind = value.WhichOneof("value")
    if kind == "int_value":
        return 0
    if kind == "string_value" and value.string_value.isdecimal() and len(value.string_value) <= 19:
        return _fitting(int(value.string_value))
    fraction = real(value)
    if fraction is None or not fraction.is_integer():
        return None
    return _fitting(int(fraction))


def seconds(value: Any) -> float | None:
    """Seconds that fit decimal(18, 9), so below 1e9 either way; else None."""
    number = value.double_value or real(value)
    return number if number is not None and -1e9 < number < 1e9 else None


def text(value: Any) -> str | None:
    """Text; None for every other kind."""
    return str(value.string_value) if value.WhichOneof("value") == "string_value" else None


def _parsed(text: str) -> float:
    if not text or len(text) > LONGEST_NUMBER or not NUMERIC.issuperset(text):
        return math.nan
    try:
        return float(text)
    except ValueError:
        return math.nan


def _fitting(number: int) -> int | None:
    return number if number in INT64 else None
