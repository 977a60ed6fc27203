"""Saved ``/metrics`` pages -> rows and events: one file, or a folder of ``<epoch seconds>.txt`` (``.gz``)."""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.schema import ENGINE_SAMPLES
from vllm_slo.exporters.vllm.changes import Event, Seen, observe
from vllm_slo.exporters.vllm.metrics import Target, read

_EPOCH_NAME = re.compile(r"^(?P<seconds>\d{9,10}(?:\.\d+)?)\.(?:txt|prom)(?:\.gz)?$")


def pages(path: Path, after: datetime | None = None) -> Iterator[tuple[datetime, str]]:
    """The saved pages in order of time, each with its moment; with ``after`` only later ones.

    The moment is the epoch second in the file's name; for a single file with another name, when it was last written.
    In a folder, files with other names are passed over.
    Raises SloError for an unreadable file and for a folder without pages.
    """
    if not path.exists():
        raise SloError(f"{path}: absent; give a saved /metrics page or a folder of <epoch seconds>.txt or .txt.gz")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    dated: list[tuple[datetime, Path]] = []
    for file in files:
        if match := _EPOCH_NAME.match(file.name):
            dated.append((datetime.fromtimestamp(float(match["seconds"]), UTC), file))
        elif not path.is_dir():
            dated.append((datetime.fromtimestamp(file.stat().st_mtime, UTC), file))
    if not dated:
        raise SloError(f"{path}: no file named <epoch seconds>.txt or <epoch seconds>.txt.gz; rename the pages so")
    for when, file in sorted(dated):
        if after is None or when > after:
            yield when, _text(file)


def samples_from_folder(path: Path, instance: str, shard: str | None = None) -> tuple[pa.Table, list[Event]]:
    """(rows of ENGINE_SAMPLES, rows of EVENTS) of a recording; the same input gives the same rows and event ids.

    ``path`` may be a single page too. The vLLM version is not on the page and stays null.
    """
    target = Target(str(path), instance, shard)
    tables: list[pa.Table] = []
    events: list[Event] = []
    seen: Seen | None = None
    for when, text in pages(path):
        scrape = read(text, when, target)
        seen, new = observe(seen, scrape, when, target)
        tables.append(scrape.rows)
        events += [event | {"source": "import"} for event in new]
    rows = pa.concat_tables(tables) if tables else ENGINE_SAMPLES.schema.empty_table()
    return rows.combine_chunks(), events


def _text(file: Path) -> str:
    try:
        body = file.read_bytes()
        return (gzip.decompress(body) if file.suffix == ".gz" else body).decode("utf-8", errors="replace")
    except (OSError, EOFError, zlib.error) as error:
        raise SloError(f"{file}: cannot be read ({error}); save the page again or remove the file") from error
