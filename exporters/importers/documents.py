"""JSON documents and protobuf records -> items."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import IO
from zoneinfo import ZoneInfo

import orjson
import pyarrow as pa

from vllm_slo.exporters.importers import bench
from vllm_slo.exporters.importers.forms import LARGEST_RECORD, ZSTD
from vllm_slo.exporters.importers.items import Body, Item, Unreadable
from vllm_slo.exporters.otlp import json as otlp_json
from vllm_slo.exporters.otlp.decoded import BodyError, DecodeSettings


def document(text: bytes, place: str, settings: DecodeSettings, zone: ZoneInfo) -> Iterator[Item]:
    """The items of one JSON document: a benchmark result, or else an OTLP body."""
    if bench.MARK in text:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            yield Unreadable("malformed_json", str(error), place)
            return
        if bench.is_result(value):
            yield bench.read(value, text, place, settings, zone)
            return
    try:
        payload, refused = otlp_json.to_protobuf(text)
    except BodyError as error:
        yield Unreadable(error.reason, str(error), place)
        return
    yield Body(payload, place, tuple(refused))


def documents(lines: Iterable[bytes], settings: DecodeSettings, zone: ZoneInfo) -> Iterator[Item]:
    """The items of a JSON Lines file, one document a line."""
    for number, line in otlp_json.lines(lines):
        yield from document(line, f"line {number}", settings, zone)


def records(file: IO[bytes]) -> Iterator[Item]:
    """The bodies of length-delimited protobuf: four bytes big-endian, then the message, plain or zstd.

    That is what the Collector's file exporter writes with `format: proto` or with compression.
    A length that cannot be right ends the reading: nothing behind it can be found.
    """
    number = 0
    while head := file.read(4):
        number += 1
        place = f"record {number}"
        size = int.from_bytes(head, "big")
        if len(head) < 4 or size > LARGEST_RECORD:
            yield Unreadable("malformed_length", f"a record of {size} bytes; the rest of the file is not read", place)
            return
        record = file.read(size)
        if len(record) < size:
            yield Unreadable("truncated", f"the file ends after {len(record)} of {size} bytes", place)
            return
        if record.startswith(ZSTD):
            try:
                record = pa.input_stream(pa.BufferReader(record), compression="zstd").read(LARGEST_RECORD + 1)
            except OSError as error:
                yield Unreadable("malformed_zstd", str(error), place)
                continue
            if len(record) > LARGEST_RECORD:
                yield Unreadable("too_large", f"it unpacks to more than {LARGEST_RECORD} bytes", place)
                continue
        yield Body(record, place)
