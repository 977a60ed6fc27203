"""How records lie in a spool segment: bytes in, records out; pure.

A segment is a header of 16 bytes and records back to back, all little endian:

    header   magic "VLLMSLO\\n" (8), version u32, CRC32 of the 12 bytes before it u32
    record   length of the body u32, CRC32 of received_ns and body u32, received_ns u64, body
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from zlib import crc32

from vllm_slo.exporters.errors import SloError

MAGIC = b"VLLMSLO\n"
VERSION = 1
_HEADER = struct.Struct("<8sII")
_FRAME = struct.Struct("<IIQ")
_TIME = struct.Struct("<Q")
HEADER_BYTES = _HEADER.size
FRAME_BYTES = _FRAME.size


class SegmentError(SloError):
    """The file is not a segment of a version that this program reads."""


@dataclass(frozen=True)
class Record:
    """One OTLP protobuf body, free of prompt text, and when it came (epoch nanoseconds)."""

    received_ns: int
    body: bytes


@dataclass(frozen=True)
class Extent:
    """What a segment holds: ``end`` of the last good record, records damaged before it, bytes torn after it."""

    end: int
    records: int
    damaged: int
    torn_bytes: int


def header() -> bytes:
    """The first bytes of a new segment."""
    start = _HEADER.pack(MAGIC, VERSION, 0)[:12]
    return _HEADER.pack(MAGIC, VERSION, crc32(start))


def encode(records: Iterable[Record]) -> list[bytes]:
    """Frames and bodies in order, ready for one gathered write."""
    parts: list[bytes] = []
    for record in records:
        check = crc32(record.body, crc32(_TIME.pack(record.received_ns)))
        parts.append(_FRAME.pack(len(record.body), check, record.received_ns))
        parts.append(record.body)
    return parts


def check_header(data: bytes | memoryview, name: str) -> None:
    """Raise SegmentError unless ``data`` begins with the header of a version this program reads."""
    if len(data) < HEADER_BYTES:
        raise SegmentError(f"{name}: {len(data)} bytes, less than the header of {HEADER_BYTES}; it was never begun")
    magic, version, check = _HEADER.unpack_from(data)
    if magic != MAGIC or check != crc32(bytes(data[:12])):
        found = bytes(data[:8])
        raise SegmentError(f"{name}: begins with {found!r}, which no segment does; keep other files out of the spool")
    if version != VERSION:
        raise SegmentError(f"{name}: version {version}, this program reads {VERSION}; drain it with its own")


def extent(data: bytes | memoryview) -> Extent:
    """Where the good records of a segment (header included) end.

    A bad record that is followed by a good one is damage (counted, skipped); what follows the last good record is a
    torn tail: a write that was never acknowledged.
    """
    end, records = HEADER_BYTES, 0
    damaged = pending = 0
    for start, stop, good in _frames(data):
        if good:
            end, records = stop, records + 1
            damaged, pending = damaged + pending, 0
        elif start >= end:
            pending += 1
    return Extent(end, records, damaged, len(data) - end)


def records(data: bytes | memoryview) -> Iterator[Record]:
    """The good records of a segment, header included, in the order written."""
    for start, stop, good in _frames(data):
        if good:
            _, _, received_ns = _FRAME.unpack_from(data, start)
            yield Record(received_ns, bytes(data[start + FRAME_BYTES : stop]))


def _frames(data: bytes | memoryview) -> Iterator[tuple[int, int, bool]]:
    view = memoryview(data)
    offset = HEADER_BYTES
    while offset + FRAME_BYTES <= len(view):
        length, check, received_ns = _FRAME.unpack_from(view, offset)
        stop = offset + FRAME_BYTES + length
        if stop > len(view):
            return
        body = view[offset + FRAME_BYTES : stop]
        yield offset, stop, check == crc32(body, crc32(_TIME.pack(received_ns)))
        offset = stop
