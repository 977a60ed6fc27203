"""Which form a file has, from its first bytes; never from its name."""

from __future__ import annotations

import re
from typing import Literal

import orjson

Form = Literal["empty", "parquet", "json", "json_lines", "protobuf", "delimited"]

GZIP = b"\x1f\x8b"
PARQUET = b"PAR1"
ZSTD = b"\x28\xb5\x2f\xfd"
BOM = b"\xef\xbb\xbf"
REQUEST_TAG = 0x0A
"""First byte of every OTLP request that is not empty: field 1, length-delimited."""
LARGEST_RECORD = 256 * 1024 * 1024

HEAD_BYTES = 64 * 1024
"""How much of the (decompressed) start of a file tells its form."""

FORMS = (
    "OTLP protobuf, OTLP JSON, JSON Lines or length-delimited protobuf of the OpenTelemetry Collector's file exporter, "
    "Parquet of a lake or of `vllm-slo export`, JSON of `vllm bench serve --save-result --save-detailed`; each plain "
    "or gzip"
)


def form_of(head: bytes) -> Form | None:
    """The form of a file that starts with ``head`` (decompressed); None for none that is read.

    Blank files are `empty`.
    A JSON file whose first line is a whole JSON object, or whose first line does not end within ``head``, has one
    document a line; another starts one document over many lines.
    """
    text = head.removeprefix(BOM).lstrip()
    if not text:
        return "empty"
    if head.startswith(PARQUET):
        return "parquet"
    if text[:1] in (b"{", b"["):
        line, newline, _ = text.partition(b"\n")
        whole = not newline or (re.match(rb"\{.*\}\s*$", line, re.DOTALL) is not None) or _is_json(line)
        return "json_lines" if whole else "json"
    if head[0] == REQUEST_TAG:
        return "protobuf"
    size = int.from_bytes(head[:4], "big")
    if len(head) > 4 and 0 < size <= LARGEST_RECORD and (head[4] == REQUEST_TAG or head[4:8] == ZSTD):
        return "delimited"
    return None


def _is_json(line: bytes) -> bool:
    try:
        orjson.loads(line)
    except orjson.JSONDecodeError:
        return False
    return True
