"""Packs a recorded run of a real vLLM into what `vllm-slo demo` loads. The same input gives the same bytes.

    python benchmarks/demo_data.py lakes LAKE [LAKE]       lakes that took the run of servers with the probe
    python benchmarks/demo_data.py recordings FOLDER       stock servers: the recordings light and lightshard

A second lake is the run after a change, which `--change` names. A recording is a folder with `otlp/*.pb.gz` (bodies as
they were received) and `metrics-<instance>/<epoch>.txt.gz` (saved `/metrics` pages).
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from vllm_slo.analytics import events
from vllm_slo.analytics.lake import Lake
from vllm_slo.exporters.schema import ENGINE_SAMPLES, EVENTS, REQUESTS, Table
from vllm_slo.exporters.vllm.recorded import samples_from_folder

TARGET = Path(__file__).resolve().parent.parent / "src" / "vllm_slo" / "demo_data"
RUNS = {"before": "light", "after": "lightshard"}
CHANGE = "Medium and long prompts on a server of their own"
MOST_BYTES = 600_000
"""The files travel in the package."""
SAMPLE_SECONDS = 5
ORDER: dict[str, tuple[str, ...]] = {
    "requests": ("start_time", "span_id"),
    "engine_samples": ("time", "service_instance_id", "engine", "source"),
    "events": ("time", "event_id"),
}


def of_lakes(lakes: Sequence[Lake], change: str, every: int) -> dict[str, bytes]:
    """The files of one run, or of a run before and one after a change: rows as they are in the lakes, none changed.

    Of the engine samples, the first that each engine has in every so many seconds.
    """
    requests, samples, seen = ([_stored(lake, table) for lake in lakes] for table in (REQUESTS, ENGINE_SAMPLES, EVENTS))
    if len(lakes) > 1:
        began: datetime = pc.min(pa.concat_tables(requests[1:])["start_time"]).as_py()
        deployed = events.row("deploy", change, began.replace(microsecond=0), source="import")
        seen.append(events.table([deployed]))
    thin = _thinned(_ordered(ENGINE_SAMPLES, samples), timedelta(seconds=every))
    return {
        "requests.parquet.gz": packed(_filled(_ordered(REQUESTS, requests))),
        "engine_samples.parquet.gz": packed(_filled(thin)),
        "events.parquet.gz": packed(_filled(_ordered(EVENTS, seen))),
    }


def _stored(lake: Lake, table: Table) -> pa.Table:
    """Every live row of a table."""
    lake.refresh(table.name)
    return lake.read(table.name, lake.data_files(table.name), table.schema.names)


def _ordered(table: Table, parts: Sequence[pa.Table]) -> pa.Table:
    """All rows in one order, however they were committed."""
    rows = pa.concat_tables([part.select(table.schema.names) for part in parts])
    return rows.take(pc.sort_indices(rows, [(name, "ascending") for name in ORDER[table.name]]))


def _thinned(samples: pa.Table, every: timedelta) -> pa.Table:
    """The first sample of each engine and source in every stretch of time."""
    width = every // timedelta(microseconds=1)
    stretch = [time // width for time in samples["time"].cast(pa.int64()).to_pylist()]
    keys = zip(stretch, *(samples[name].to_pylist() for name in ORDER["engine_samples"][1:]), strict=True)
    first: dict[object, int] = {}
    for position, key in enumerate(keys):
        first.setdefault(key, position)
    return samples.take(pa.array(sorted(first.values()), pa.int64()))


def _filled(rows: pa.Table) -> pa.Table:
    """The columns that hold anything."""
    return rows.select([name for name in rows.column_names if rows[name].null_count < rows.num_rows])


def of_recordings(folder: Path) -> dict[str, bytes]:
    """The files of the two recordings of stock servers."""
    tables: list[pa.Table] = []
    rows: list[dict[str, object]] = []
    files: dict[str, bytes] = {}
    for name, run in RUNS.items():
        files[f"{name}.pb.gz"] = gzip.compress(spans(folder / run), 9, mtime=0)
        new, seen = samples(folder / run)
        tables += new
        rows += seen
        if name == "after":
            began = min(event["time"] for event in seen)
            rows.append(events.row("deploy", CHANGE, began, source="import"))
    every = pa.concat_tables(tables).select(ENGINE_SAMPLES.schema.names).sort_by([("time", "ascending")])
    files["engine_samples.parquet.gz"] = packed(every)
    files["events.parquet.gz"] = packed(events.table(sorted(rows, key=lambda row: (row["time"], row["event_id"]))))
    return files


def spans(recording: Path) -> bytes:
    """All bodies of a recording as one: bodies joined are again a body."""
    return b"".join(gzip.decompress(path.read_bytes()) for path in sorted((recording / "otlp").glob("*.pb.gz")))


def samples(recording: Path) -> tuple[list[pa.Table], list[dict[str, object]]]:
    """(rows of engine_samples, rows of events) of a recording; each server is a shard of its own."""
    tables, found = [], []
    for folder in sorted(recording.glob("metrics-*")):
        instance = folder.name.removeprefix("metrics-")
        rows, seen = samples_from_folder(folder, instance, instance)
        tables.append(rows)
        found += seen
    return tables, found


def packed(rows: pa.Table) -> bytes:
    """Rows as a gzipped Parquet file, encoded so that gzip finds little left to do.

    Nanoseconds are integers whose high bytes repeat: split by byte they shrink by a third.
    """
    split = {field.name: "BYTE_STREAM_SPLIT" for field in rows.schema if pa.types.is_decimal(field.type)}
    sink = io.BytesIO()
    pq.write_table(
        rows,
        sink,
        compression="none",
        store_decimal_as_integer=True,
        use_dictionary=[name for name in rows.column_names if name not in split],
        column_encoding=split,
    )
    return gzip.compress(sink.getvalue(), 9, mtime=0)


def main() -> None:
    """Write the files of the demo."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("kind", choices=("lakes", "recordings"))
    parser.add_argument("sources", nargs="+", metavar="PATH", help="one or two lakes, or the folder of the recordings")
    parser.add_argument("--change", default=CHANGE, help="what was changed between two lakes")
    parser.add_argument("--every", type=int, default=SAMPLE_SECONDS, help="seconds between the samples that are kept")
    parser.add_argument("--output", type=Path, default=TARGET, help="folder to write to")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    if options.kind == "lakes":
        lakes = [Lake.open(path, create=False) for path in options.sources]
        files = of_lakes(lakes, options.change, options.every)
    else:
        files = of_recordings(Path(options.sources[0]))
    whole = sum(map(len, files.values()))
    if whole > MOST_BYTES:
        raise SystemExit(
            f"{whole} bytes, more than {MOST_BYTES}: record fewer requests, or keep fewer samples with --every"
        )
    for stale in set(options.output.glob("*.gz")) - {options.output / name for name in files}:
        stale.unlink()
    for name, content in files.items():
        (options.output / name).write_bytes(content)
    if options.json:
        options.json.write_text(json.dumps({"bytes": {name: len(content) for name, content in files.items()}}) + "\n")
    print(f"{whole} bytes in {len(files)} files in {options.output}")


if __name__ == "__main__":
    main()
