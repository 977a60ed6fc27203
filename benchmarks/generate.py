"""Writes a lake of synthetic requests, spread over one day, and samples of their engines. Nothing in it was measured.

Shapes are chosen to look like a busy vLLM fleet: lognormal prompt and output lengths in three context buckets, a daily
load curve, queue times that grow with the load, shards of unequal speed, a few rows that the quality gate leaves out.
The first shard is a stock server; the others have the probe: their phases are split into parts that sum to them
exactly, some of their requests are preempted, given up or refused. Rows go in through `Lake.append` and `rollup.rows`,
in time order, as the receiver would write them.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.analytics import rollup
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.lake import Lake
from vllm_slo.exporters.records import DECODE_PARTS, PREFILL_PARTS, PROBE_VERSION, QUEUE_PARTS
from vllm_slo.exporters.schema import ENGINE_SAMPLES, REQUESTS, SECONDS, TIME

DAY = datetime(2026, 6, 1, tzinfo=UTC)
NANOSECONDS = 1_000_000_000
SCRAPE_SECONDS = 5
PROBE_SECONDS = 1
STOCK_SHARDS = 1
DAY_MICROSECONDS = 86_400_000_000
BUCKET_SHARES = (0.80, 0.16, 0.04)
BUCKET_MEDIAN_TOKENS = (700, 9_000, 48_000)
BUCKET_TOKEN_LIMITS = ((8, 4_096), (4_097, 32_768), (32_769, 128_000))


@dataclass(frozen=True)
class Fleet:
    """``shards`` instances, the last quarter serving a second model, the first STOCK_SHARDS without the probe."""

    shards: int = 8

    @property
    def names(self) -> list[str]:
        """Shard names in order."""
        return [f"shard-{i:02d}" for i in range(self.shards)]

    def model(self, shard: int) -> str:
        """The model a shard serves."""
        return "synthetic-70b" if shard >= self.shards - self.shards // 4 else "synthetic-8b"


def batches(rows: int, batch_rows: int, fleet: Fleet, seed: int = 1) -> Iterator[pa.Table]:
    """Tables of REQUESTS.schema, in order of start time, ``rows`` rows in all."""
    random = np.random.default_rng(seed)
    written = 0
    while written < rows:
        size = min(batch_rows, rows - written)
        yield _batch(random, written / rows, (written + size) / rows, size, fleet)
        written += size


def _batch(random: np.random.Generator, first: float, last: float, size: int, fleet: Fleet) -> pa.Table:
    share = np.sort(random.uniform(first, last, size))
    start, load = _times_on_the_load_curve(share)
    shard = random.integers(0, fleet.shards, size)
    bucket = random.choice(3, size, p=BUCKET_SHARES)
    slow = 1 + 0.5 * shard / fleet.shards

    lower, upper = np.array(BUCKET_TOKEN_LIMITS)[bucket].T
    prompt = np.clip(np.array(BUCKET_MEDIAN_TOKENS)[bucket] * random.lognormal(0, 0.8, size), lower, upper).astype(
        np.int64
    )
    completion = np.clip(180 * random.lognormal(0, 1.0, size), 1, 4_096).astype(np.int64)

    waited = random.random(size) < 0.35 + 0.4 * load
    queue = _nanoseconds(np.where(waited, 0.25 * load**3 * slow * random.lognormal(0, 1.6, size), 4e-5))
    prefill = _nanoseconds((0.012 + prompt * 55e-6) * slow * random.lognormal(0, 0.15, size))
    frontend = _nanoseconds(0.003 * random.lognormal(0, 0.5, size))
    decode = _nanoseconds((completion - 1) * 0.018 * slow * (1 + 0.6 * load) * random.lognormal(0, 0.12, size))
    residual = _nanoseconds(4e-4 * random.lognormal(0, 0.4, size))
    first_token = queue + prefill + frontend
    duration = first_token + decode + residual

    lot = random.random(size)
    broken = lot < 0.0005
    prefill = np.where(broken, 400_000 * NANOSECONDS, prefill)
    probed = shard >= STOCK_SHARDS
    ending = np.where(lot < 0.97, np.where(lot < 0.8, 0, 1), np.where(lot < 0.99, 2, np.where(lot < 0.997, 3, 4)))
    unfinished = probed & (ending >= 2)
    marks = np.where(unfinished, "unfinished", np.where(broken, "uptime_sized_time", "missing_milestone"))
    quality = pa.array(marks, mask=~(unfinished | (lot < 0.0008)))
    status = pa.array(np.where((lot > 0.5) & (lot < 0.502), "error", "unset"))
    names, models = fleet.names, [fleet.model(i) for i in range(fleet.shards)]
    shards = _dictionary(shard, names)
    end = start + duration // 1000

    ids = _text_ids(random, size)
    columns: dict[str, pa.Array] = {
        "day": pc.cast(pc.cast(pa.array(start, pa.int64()), pa.timestamp("us")), pa.date32()),
        "start_time": pa.array(start, pa.int64()).cast(TIME),
        "end_time": pa.array(end, pa.int64()).cast(TIME),
        "request_id": ids,
        "trace_id": _bytes(random, size, 16),
        "span_id": _bytes(random, size, 8),
        "source": _dictionary(probed.astype(np.int32), ["stock", "probe"]),
        "service_name": _constant("vllm", size),
        "service_instance_id": shards,
        "shard": shards,
        "model": _dictionary(shard, models),
        "prompt_tokens": pa.array(prompt),
        "completion_tokens": pa.array(completion),
        "max_tokens": pa.array(np.full(size, 4_096)),
        "n": pa.array(np.ones(size, np.int64)),
        "status": status,
        "time_to_first_token_seconds": _seconds(first_token),
        "request_duration_seconds": _seconds(duration),
        "queue_seconds": _seconds(queue),
        "prefill_seconds": _seconds(prefill),
        "decode_seconds": _seconds(decode),
        "resource_attributes": _dictionary(shard, [_resource(name) for name in names]),
        "received_time": pa.array(end + 1_000_000, pa.int64()).cast(TIME),
        "quality": quality,
        "records": _dictionary(np.where(probed, 1 + (ending == 4), 0), ["stock", "engine+frontend+edge+stock", "edge"]),
        "finish_reason": _where(probed, _dictionary(ending, ["stop", "length", "abort", "error", "rejected"])),
        "http_status": _where(probed, pa.array(np.array([200, 200, 200, 500, 503])[ending])),
        "client_disconnected": _where(probed, pa.array(ending == 2)),
        **_parts(random, probed & (ending < 4), queue, prefill, decode, prompt),
        **_blockers(random, probed & (ending < 4), ids, np.where(waited, queue, 0)),
    }
    arrays = [
        columns[field.name].cast(field.type) if field.name in columns else pa.nulls(size, field.type)
        for field in REQUESTS.schema
    ]
    return pa.Table.from_arrays(arrays, schema=REQUESTS.schema)


def _parts(
    random: np.random.Generator,
    known: np.ndarray,
    queue: np.ndarray,
    prefill: np.ndarray,
    decode: np.ndarray,
    prompt: np.ndarray,
) -> dict[str, pa.Array]:
    """The probe's columns of the rows that are ``known``: integer parts that sum to queue, prefill and decode."""
    size = len(known)
    hit = random.random(size) < 0.03
    columns = _split(random, queue, QUEUE_PARTS, (0.5, 1.5, 0.7, 0.05, 0.2), "queue_step")
    columns |= _split(random, prefill, PREFILL_PARTS, (3.0, 1.0, 0.2, 0.1 * hit, 0.1 * hit), "prefill_other")
    late = ("preempted", "recompute")
    columns |= _split(random, decode, (*DECODE_PARTS, *late), (3.0, 0.6, 0.8, 0.5 * hit, 0.2 * hit), "decode_slowdown")
    for name in late:
        columns[name] = columns[name] + columns[f"{name}_before_first_token"]
    lost = np.where(hit, prompt, 0)
    return {
        **{f"{name}_seconds": _where(known, _seconds(values)) for name, values in columns.items()},
        "preemptions": _where(known, pa.array(hit.astype(np.int64))),
        "lost_tokens": _where(known, pa.array(lost)),
        "recomputed_tokens": _where(known, pa.array(lost // 2)),
    }


def _blockers(random: np.random.Generator, known: np.ndarray, ids: pa.Array, waited: np.ndarray) -> dict[str, pa.Array]:
    """Whom those that waited stood behind: one that arrived a little earlier."""
    columns: dict[str, pa.Array] = {"engine_request_id": _where(known, ids)}
    for kind, share in (("token_budget", 0.6), ("kv_blocks", 0.2)):
        stood = known & (waited > 0) & (random.random(len(known)) < share)
        earlier = np.maximum(np.arange(len(known)) - random.integers(1, 2_000, len(known)), 0)
        columns[f"{kind}_blocker"] = _where(stood, ids.take(pa.array(earlier)))
        columns[f"{kind}_blocker_seconds"] = _where(stood, _seconds(waited // 3))
    return columns


def _split(
    random: np.random.Generator,
    whole: np.ndarray,
    names: tuple[str, ...],
    weights: tuple[float | np.ndarray, ...],
    rest: str,
) -> dict[str, np.ndarray]:
    """Random integer parts of ``whole``; what division leaves over goes to ``rest``."""
    shares = [weight * random.exponential(1.0, len(whole)) for weight in weights]
    every = np.sum(shares, axis=0)
    parts = {name: (whole * (share / every)).astype(np.int64) for name, share in zip(names, shares, strict=True)}
    parts[rest] = parts[rest] + whole - np.sum(list(parts.values()), axis=0)
    return parts


def _where(known: np.ndarray, values: pa.Array) -> pa.Array:
    """The values of rows that are known, null for others."""
    return pc.if_else(pa.array(known), values, pa.scalar(None, values.type))


def _times_on_the_load_curve(share: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start in epoch microseconds for a share of the day's requests, and the load then (0.1 by night, 1 at noon)."""
    so_far, grid = _load_so_far()
    load = 0.55 - 0.45 * np.cos(2 * np.pi * grid)
    moment = np.interp(share, so_far, grid)
    microseconds = int(DAY.timestamp()) * 1_000_000 + np.minimum(moment * DAY_MICROSECONDS, DAY_MICROSECONDS - 1)
    return microseconds.astype(np.int64), np.interp(moment, grid, load)


def _load_so_far() -> tuple[np.ndarray, np.ndarray]:
    """Share of the day's requests that have arrived at each minute, and the minute as a share of the day."""
    grid = np.linspace(0, 1, 1_441)
    load = 0.55 - 0.45 * np.cos(2 * np.pi * grid)
    cumulative = np.concatenate([[0.0], np.cumsum((load[1:] + load[:-1]) / 2)])
    return cumulative / cumulative[-1], grid


def _nanoseconds(seconds: np.ndarray) -> np.ndarray:
    return np.maximum(seconds * NANOSECONDS, 1_000).astype(np.int64)


def _seconds(nanoseconds: np.ndarray) -> pa.Array:
    words = np.empty((len(nanoseconds), 2), np.int64)
    words[:, 0], words[:, 1] = nanoseconds, nanoseconds >> 63
    return pa.Array.from_buffers(SECONDS, len(nanoseconds), [None, pa.py_buffer(words)])


def _bytes(random: np.random.Generator, size: int, width: int) -> pa.Array:
    offsets = np.arange(0, (size + 1) * width, width, dtype=np.int32)
    return pa.Array.from_buffers(
        pa.binary(), size, [None, pa.py_buffer(offsets), pa.py_buffer(random.bytes(size * width))]
    )


def _text_ids(random: np.random.Generator, size: int) -> pa.Array:
    hexadecimal = np.frombuffer(random.bytes(size * 16).hex().encode(), np.uint8).reshape(size, 32)
    text = np.concatenate([np.tile(np.frombuffer(b"cmpl-", np.uint8), (size, 1)), hexadecimal], axis=1)
    offsets = np.arange(0, (size + 1) * text.shape[1], text.shape[1], dtype=np.int32)
    return pa.Array.from_buffers(
        pa.string(), size, [None, pa.py_buffer(offsets), pa.py_buffer(np.ascontiguousarray(text))]
    )


def _dictionary(codes: np.ndarray, values: list[str]) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array(codes, pa.int32()), pa.array(values)).cast(pa.string())


def _constant(value: str, size: int) -> pa.Array:
    return pa.repeat(pa.scalar(value), size)


def _resource(shard: str) -> str:
    return json.dumps(
        {"service.name": "vllm", "service.instance.id": shard, "vllm.shard": shard}
        | ({} if shard < f"shard-{STOCK_SHARDS:02d}" else {PROBE_VERSION: "synthetic"})
    )


def samples(rows: int, fleet: Fleet) -> pa.Table:
    """Samples of every shard over the day: scraped each SCRAPE_SECONDS, by the probe each PROBE_SECONDS where it runs.

    The scraped counters say that every request that ends was received.
    """
    tables = []
    for index, name in enumerate(fleet.names):
        load, share = _moments(SCRAPE_SECONDS)
        scraped: dict[str, np.ndarray] = {
            "requests_running": np.floor(200 * load),
            "requests_waiting": np.floor(40 * load**3),
            "kv_cache_usage_ratio": 0.9 * load,
            "requests_finished_total": np.floor(share * rows / fleet.shards),
            "requests_finished_error_total": np.floor(share * rows / fleet.shards / 500),
        }
        tables.append(_samples("scrape", SCRAPE_SECONDS, name, fleet.model(index), scraped))
        if index >= STOCK_SHARDS:
            load, _ = _moments(PROBE_SECONDS)
            blocks, slots = np.full(len(load), 20_000.0), 16.0
            used = np.floor(0.9 * load * blocks)
            wasted = np.floor(200 * load) * slots / 2
            probed = {
                "interval_seconds": np.full(len(load), float(PROBE_SECONDS)),
                "requests_running": np.floor(200 * load),
                "requests_waiting": np.floor(40 * load**3),
                "kv_blocks_total": blocks,
                "kv_block_size_tokens": np.full(len(load), slots),
                "kv_blocks_used": used,
                "kv_blocks_free": blocks - used,
                "kv_blocks_cached": np.floor((blocks - used) / 2),
                "kv_slots_wasted": wasted,
                "kv_tokens_stored": used * slots - wasted,
                "kv_fragmentation_ratio": wasted / (used * slots),
                "probe_dropped_total": np.zeros(len(load)),
                "probe_errors_total": np.zeros(len(load)),
            }
            tables.append(_samples("probe", PROBE_SECONDS, name, fleet.model(index), probed))
    return pa.concat_tables(tables).sort_by("time")


def _moments(every: int) -> tuple[np.ndarray, np.ndarray]:
    """The load at a steady rhythm over the day, and the share of the day's requests so far."""
    seconds = np.arange(0, 86_400, every)
    return 0.55 - 0.45 * np.cos(2 * np.pi * seconds / 86_400), np.interp(seconds / 86_400, *_load_so_far()[::-1])


def _samples(source: str, every: int, shard: str, model: str, values: dict[str, np.ndarray]) -> pa.Table:
    seconds = np.arange(0, 86_400, every)
    size = len(seconds)
    columns: dict[str, pa.Array] = {
        "day": pa.array(np.full(size, DAY.timestamp() // 86_400, np.int32)).cast(pa.date32()),
        "time": pa.array(int(DAY.timestamp()) * 1_000_000 + seconds * 1_000_000).cast(TIME),
        "source": _constant(source, size),
        "service_instance_id": _constant(shard, size),
        "shard": _constant(shard, size),
        "model": _constant(model, size),
        "engine": _constant("0", size),
        "process_start_time": pa.array(np.full(size, int(DAY.timestamp()) * 1_000_000)).cast(TIME),
        **{name: pa.array(given) for name, given in values.items()},
    }
    arrays = [columns.get(field.name, pa.nulls(size, field.type)) for field in ENGINE_SAMPLES.schema]
    return pa.Table.from_arrays(arrays, schema=ENGINE_SAMPLES.schema)


def write(lake: Lake, rows: int, batch_rows: int, fleet: Fleet, buckets: Buckets) -> None:
    """Appends ``rows`` synthetic requests, their rollups, and samples of their engines."""
    lake.append("engine_samples", samples(rows, fleet))
    done, began = 0, time.perf_counter()
    for table in batches(rows, batch_rows, fleet):
        lake.append("requests", table)
        lake.append("rollups", rollup.rows(table, buckets))
        done += table.num_rows
        print(
            f"{done:,} of {rows:,} synthetic requests, {done / (time.perf_counter() - began):,.0f} a second", flush=True
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lake", type=Path)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--batch-rows", type=int, default=500_000)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    began = time.perf_counter()
    write(Lake.open(str(arguments.lake)), arguments.rows, arguments.batch_rows, Fleet(arguments.shards), Buckets())
    seconds = time.perf_counter() - began
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": arguments.rows, "seconds": round(seconds, 2)}))
    print(f"{arguments.rows:,} synthetic requests in {arguments.lake}, {seconds:.0f} s")


if __name__ == "__main__":
    main()
