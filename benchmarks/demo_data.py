"""Packs two recordings of a real vLLM into what `vllm-slo demo` loads.

A recording is a folder with `otlp/*.pb.gz` (bodies as they were received) and `metrics-<instance>/<epoch>.txt.gz`
(saved `/metrics` pages). The same recordings give the same bytes.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from vllm_slo.analytics import events
from vllm_slo.exporters.schema import ENGINE_SAMPLES
from vllm_slo.exporters.vllm.recorded import samples_from_folder

TARGET = Path(__file__).resolve().parent.parent / "src" / "vllm_slo" / "demo_data"
RUNS = {"before": "light", "after": "lightshard"}
CHANGE = "Medium and long prompts on a server of their own"


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
    """Rows as a gzipped Parquet file."""
    sink = io.BytesIO()
    pq.write_table(rows, sink, compression="none")
    return gzip.compress(sink.getvalue(), 9, mtime=0)


def main() -> None:
    """Write the files of the demo."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("recordings", type=Path, help="folder with the recordings light and lightshard")
    parser.add_argument("--output", type=Path, default=TARGET, help="folder to write to")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    tables: list[pa.Table] = []
    rows: list[dict[str, object]] = []
    files: dict[str, bytes] = {}
    for name, folder in RUNS.items():
        files[f"{name}.pb.gz"] = gzip.compress(spans(options.recordings / folder), 9, mtime=0)
        new, seen = samples(options.recordings / folder)
        tables += new
        rows += seen
        if name == "after":
            began = min(event["time"] for event in seen)
            rows.append(events.row("deploy", CHANGE, began, source="import"))
    every = pa.concat_tables(tables).select(ENGINE_SAMPLES.schema.names).sort_by([("time", "ascending")])
    files["engine_samples.parquet.gz"] = packed(every)
    files["events.parquet.gz"] = packed(events.table(sorted(rows, key=lambda row: (row["time"], row["event_id"]))))
    for name, content in files.items():
        (options.output / name).write_bytes(content)
    if options.json:
        sizes = {name: len(content) for name, content in files.items()}
        options.json.write_text(json.dumps({"samples": every.num_rows, "events": len(rows), "bytes": sizes}) + "\n")
    print(f"{sum(map(len, files.values()))} bytes in {len(files)} files in {options.output}")


if __name__ == "__main__":
    main()
