"""The ``resource_spans`` of an OTLP body taken apart as bytes."""

from __future__ import annotations

from collections.abc import Collection

_RESOURCE_SPANS = 0x0A
"""Tag of ``ExportTraceServiceRequest.resource_spans``: field 1, length-delimited."""


def parted(body: bytes, chosen: Collection[int]) -> tuple[bytes, bytes] | None:
    """The ``resource_spans`` at the chosen positions as a body, and all others as one; null for a body that holds
    anything else or does not end with a whole one."""
    ends = bounds(body)
    if ends is None:
        return None
    view, start = memoryview(body), 0
    taken: list[memoryview] = []
    rest: list[memoryview] = []
    for position, end in enumerate(ends):
        (taken if position in chosen else rest).append(view[start:end])
        start = end
    return b"".join(taken), b"".join(rest)


def bounds(body: bytes) -> list[int] | None:
    """Where each ``resource_spans`` field ends; null for a body that is not just such fields, whole ones."""
    ends: list[int] = []
    position, end = 0, len(body)
    while position < end:
        if body[position] != _RESOURCE_SPANS:
            return None
        position += 1
        length = shift = 0
        while True:
            if position >= end or shift > 28:
                return None
            byte = body[position]
            position += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        position += length
        ends.append(position)
    return ends if position == end else None
