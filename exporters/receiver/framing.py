"""Which bodies may be decoded together: those whose every top-level field ends inside themselves."""

from __future__ import annotations

_RESOURCE_SPANS = 0x0A
"""Tag of ``ExportTraceServiceRequest.resource_spans``: field 1, length-delimited."""


def joinable(body: bytes) -> bool:
    """Whether ``body`` is nothing but whole ``resource_spans`` fields.

    Such bodies, concatenated, mean exactly what they mean apart. One that ends inside a field would swallow the start
    of its successor, so it must be decoded alone.
    """
    position, end = 0, len(body)
    while position < end:
        if body[position] != _RESOURCE_SPANS:
            return False
        position += 1
        length = shift = 0
        while True:
            if position >= end or shift > 28:
                return False
            byte = body[position]
            position += 1
            length |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        position += length
    return position == end
