"""A file of any form -> its items; the edge that opens files."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO, cast
from zoneinfo import ZoneInfo

import pyarrow as pa

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.importers import documents, tables
from vllm_slo.exporters.importers.forms import FORMS, GZIP, HEAD_BYTES, Form, form_of
from vllm_slo.exporters.importers.items import Body, Item, Unreadable
from vllm_slo.exporters.otlp.decoded import DecodeSettings

UTC = ZoneInfo("UTC")
BLOCK_BYTES = 1024 * 1024
WHOLE_BYTES = 1024 * 1024 * 1024
"""Largest file that has to be read whole: protobuf and JSON over many lines."""


class ImportFileError(SloError):
    """A file that cannot be opened."""


def digest(path: Path) -> str:
    """SHA-256 of the bytes of the file, hex."""
    with _open(path) as file:
        return hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest()


def read(
    path: Path,
    settings: DecodeSettings,
    zone: ZoneInfo = UTC,
    progress: Callable[[int], None] = lambda position: None,
) -> Iterator[Item]:
    """The items of a file in order, always the same ones for the same bytes.

    ``progress`` is told the position in the file, in bytes as they are on disk.
    What cannot be read is an ``Unreadable``; a file that cannot be opened raises ImportFileError.
    """
    with _open(path) as raw:
        packed = raw.read(2) == GZIP
        raw.seek(0)
        plain = cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if packed else raw
        try:
            for item in _items(plain, form_of(_head(plain)), settings, zone):
                progress(raw.tell())
                yield item
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            yield Unreadable("malformed_gzip", str(error), f"byte {raw.tell()}")
        progress(raw.tell())


def _items(file: BinaryIO, form: Form | None, settings: DecodeSettings, zone: ZoneInfo) -> Iterator[Item]:
    match form:
        case "empty":
            return
        case "json_lines":
            yield from documents.documents(file, settings, zone)
        case "delimited":
            yield from documents.records(file)
        case "parquet":
            whole = isinstance(file, gzip.GzipFile)  # Parquet is read from its end; gzip only from its start
            yield from tables.read(pa.BufferReader(file.read()) if whole else file, settings)
        case "json" | "protobuf":
            text = file.read(WHOLE_BYTES + 1)
            if len(text) > WHOLE_BYTES:
                yield Unreadable("too_large", f"more than {WHOLE_BYTES} bytes in one document; split it", "file")
            elif form == "protobuf":
                yield Body(text, "file")
            else:
                yield from documents.document(text, "file", settings, zone)
        case None:
            yield Unreadable("unknown_form", f"not one of: {FORMS}", "file")


def _head(file: BinaryIO) -> bytes:
    """The first bytes; the position stays at the start."""
    head = file.read(HEAD_BYTES)
    file.seek(0)
    return head


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb", buffering=BLOCK_BYTES)
    except OSError as error:
        raise ImportFileError(f"{path}: {error.strerror}; name a file that can be read") from error
