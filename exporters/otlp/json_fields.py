"""Fields of OTLP/JSON objects, checked and as Python values; `null` is absent everywhere."""

from __future__ import annotations

import base64
import binascii
import math
import re
from typing import Any

Object = dict[str, Any]

_INTEGER = re.compile(r"-?[0-9]{1,20}")
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Wrong(Exception):
    """A part that cannot be read: ``reason`` is the counter label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def field(owner: Object, *names: str) -> Any:
    """The first field that is there and not null."""
    for name in names:
        value = owner.get(name)
        if value is not None:
            return value
    return None


def items(owner: Object, name: str) -> list[Any]:
    """The items of a list field, none when it is absent."""
    value = owner.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise wrong_type(name, value, "a list")
    return value


def object_of(value: Any, name: str, required: bool = False) -> Object:
    """An object; absent is empty unless ``required``."""
    if value is None and not required:
        return {}
    if not isinstance(value, dict):
        raise wrong_type(name, value, "an object")
    return value


def string(owner: Object, place: str, *names: str) -> str:
    """Text, "" when absent; ``names`` are the spellings of one field."""
    value = field(owner, *names)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise wrong_type(f"{names[0]} of {place}", value, "text")
    return value


def count(owner: Object, *names: str) -> int:
    """An unsigned 32-bit integer, 0 when absent."""
    value = field(owner, *names)
    return 0 if value is None else integer(value, names[0], 0, 2**32 - 1)


def nanoseconds(owner: Object, *names: str) -> int:
    """A time in epoch nanoseconds (unsigned 64 bits), 0 when absent."""
    value = field(owner, *names)
    return 0 if value is None else integer(value, names[0], 0, 2**64 - 1)


def integer(value: Any, name: str, least: int, most: int) -> int:
    """An integer given as number or text; 1.0 and 1e3 are integers in JSON."""
    number = None
    if isinstance(value, str) and _INTEGER.fullmatch(value):
        number = int(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        number = value
    elif isinstance(value, float) and value.is_integer():
        number = int(value)
    if number is None or not least <= number <= most:
        raise wrong_type(name, value, f"an integer from {least} to {most}")
    return number


def double(text: str) -> float:
    """A number given as text; NaN, Infinity and -Infinity are written so."""
    if text in _NOT_FINITE:
        return _NOT_FINITE[text]
    try:
        number = float(text) if len(text) <= 400 and "_" not in text else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise wrong_type("doubleValue", text, "a number, NaN, Infinity or -Infinity")
    return number


def enum(owner: Object, names: tuple[str, ...], prefix: str, name: str) -> Any:
    """Number of an enum value; numbers unknown to this version pass, names unknown to it do not."""
    value = field(owner, name)
    if value is None:
        return 0
    if isinstance(value, str) and not _INTEGER.fullmatch(value):
        short = value.removeprefix(prefix).lower()
        if short not in names:
            raise Wrong("unknown_enum", f"{name} {shown(value)} is not one of {prefix}{', '.join(names).upper()}")
        return names.index(short)
    return integer(value, name, -(2**31), 2**31 - 1)


def id_bytes(owner: Object, size: int, reason: str, *names: str) -> bytes:
    """An id of ``size`` bytes from hex (or base64, see ``json``); absent and empty give no bytes."""
    value = field(owner, *names)
    if value is None or value == "":
        return b""
    if isinstance(value, str) and value.isascii():
        if len(value) == 2 * size:
            try:
                return binascii.unhexlify(value)
            except binascii.Error:
                pass
        elif len(value) == -(-size // 3) * 4:
            decoded = base64_bytes(value)
            if decoded is not None and len(decoded) == size:
                return decoded
    raise Wrong(reason, f"{names[0]} {shown(value)} is not {2 * size} hex digits")


def base64_bytes(text: str) -> bytes | None:
    """Bytes of base64 text, also of the URL-safe alphabet and without padding; None when it is neither."""
    try:
        standard = text.replace("-", "+").replace("_", "/")
        return base64.b64decode(standard + "=" * (-len(standard) % 4), validate=True)
    except ValueError:
        return None


def shown(value: Any) -> str:
    """A value short enough for a message."""
    text = repr(value) if isinstance(value, str | int | float | bool | list) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


def wrong_type(name: str, value: Any, allowed: str) -> Wrong:
    """What to raise for a value of another kind."""
    return Wrong("wrong_type", f"{name} is {kind_of(value)}; {allowed} is needed")


def kind_of(value: Any) -> str:
    """What kind of JSON value this is; never its content, which may be prompt text."""
    if value is None:
        return "null"
    kinds = ((bool, "a boolean"), (int, "a number"), (float, "a number"), (str, "text"), (list, "a list"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "an object")
