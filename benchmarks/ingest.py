"""Durable spans per CPU second of the receiver: OTLP/gRPC in, fsynced spool, deduplicated rows committed to the lake.

The server (`vllm-slo up --no-app`) runs on one core, the sender on the other. CPU seconds are user + system of the
server's processes, everything included: gRPC, decoding, fsync, deduplication, rollups, Delta commits, compaction
while it runs. The clock of CPU seconds stops when every span sent is in the lake and the spool is empty. Bytes per
request are those of the whole lake folder after compaction and vacuum, all tables and logs included.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import httpx
import psutil
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from bodies import stream
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.maintenance import Maintenance, MaintenanceSettings

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
SERVER_CORE, SENDER_CORE = 0, 1


@dataclass(frozen=True)
class Load:
    """``spans`` requests in bodies of ``per_body``, at most ``in_flight`` bodies unacknowledged."""

    spans: int
    per_body: int
    in_flight: int
    seed: int


class Server:
    """A real `vllm-slo up` on its own core; CPU seconds are those of the process and of all its children."""

    def __init__(self, lake: Path) -> None:
        self.grpc, self.http = free_port(), free_port()
        self.process = subprocess.Popen(
            ["taskset", "-c", str(SERVER_CORE), sys.executable, "-m", "vllm_slo", "--lake", str(lake), "up", "--no-app",
             "--grpc", f"127.0.0.1:{self.grpc}", "--http", f"127.0.0.1:{self.http}"],
            stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.handle = psutil.Process(self.process.pid)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.http}/healthz").status_code == 200:
                    return
            except httpx.HTTPError:
                time.sleep(0.05)
        raise SystemExit("the receiver did not start; run `vllm-slo up --no-app` to see why")

    def cpu_seconds(self) -> float:
        """User + system seconds so far."""
        total = 0.0
        for process in [self.handle, *self.handle.children(recursive=True)]:
            times = process.cpu_times()
            total += times.user + times.system
        return total

    def resident_bytes(self) -> int:
        """Resident memory now."""
        return int(self.handle.memory_info().rss)

    def stop(self) -> None:
        """SIGTERM, then wait for the clean stop."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=60)


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def send(port: int, load: Load) -> int:
    """Bodies of ``load`` sent over one channel; returns the spans acknowledged. Pushed-back bodies are sent again."""
    channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=[("grpc.max_send_message_length", -1)])
    export = channel.unary_unary(EXPORT)
    slots = threading.Semaphore(load.in_flight)
    again: deque[bytes] = deque()
    acknowledged = [0]
    failed: list[str] = []

    def done(future: grpc.Future, body: bytes) -> None:
        error = future.exception()
        if error is None:
            acknowledged[0] += load.per_body
        elif error.code() in (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE):
            again.append(body)
        else:
            failed.append(str(error))
        slots.release()

    bodies = stream(load.per_body, load.seed, time.time_ns)
    left = load.spans // load.per_body
    while (left or again or acknowledged[0] < load.spans) and not failed:
        if not slots.acquire(timeout=5):
            continue
        if again:
            body = again.popleft()
            time.sleep(0.05)
        elif left:
            body, left = next(bodies), left - 1
        else:
            slots.release()
            time.sleep(0.01)
            continue
        export.future(body, timeout=120).add_done_callback(lambda future, body=body: done(future, body))
    channel.close()
    if failed:
        raise SystemExit(f"the receiver refused a body: {failed[0]}")
    return acknowledged[0]


def rows_in(lake: Path) -> int:
    """Rows of `requests` by Delta's own statistics."""
    return Lake.open(lake, create=False).table_stats()["requests"].rows


def measure(lake: Path, load: Load, warm: Load) -> dict[str, float]:
    """CPU seconds, wall seconds, rows and memory of one load on a fresh lake, after a short warm-up load."""
    server = Server(lake)
    try:
        sent = send(server.grpc, warm)
        wait_for_rows(lake, sent)
        memory_start, cpu_start, wall_start = server.resident_bytes(), server.cpu_seconds(), time.monotonic()
        peak = [memory_start]
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(0.5):
                peak[0] = max(peak[0], server.resident_bytes())

        watcher = threading.Thread(target=watch)
        watcher.start()
        sent += send(server.grpc, load)
        acknowledged_after = time.monotonic() - wall_start
        wait_for_rows(lake, sent)
        cpu = server.cpu_seconds() - cpu_start
        wall = time.monotonic() - wall_start
        stop.set()
        watcher.join()
    finally:
        server.stop()
    return {
        "rows_sent": sent,
        "rows_in_lake": rows_in(lake),
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "acknowledged_after_seconds": acknowledged_after,
        "spans_per_cpu_second": load.spans / cpu,
        "memory_start_bytes": memory_start,
        "memory_peak_bytes": peak[0],
    }


def wait_for_rows(lake: Path, rows: int, seconds: float = 300) -> None:
    """Returns when the lake holds ``rows`` requests; what is sealed by age takes a few seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if rows_in(lake) >= rows:
            return
        time.sleep(0.5)
    raise SystemExit(f"{rows_in(lake)} of {rows} rows reached the lake in {seconds:.0f} s; see `vllm-slo status`")


def bytes_per_request(lake: Path) -> float:
    """Bytes on disk of the lake once its day is over (all small files merged) and replaced files are vacuumed."""

    def tomorrow() -> datetime:
        return datetime.now(UTC) + timedelta(days=1)

    Maintenance(Lake.open(lake), MaintenanceSettings(grace=timedelta(0)), tomorrow).run_once()
    total = sum(path.stat().st_size for path in lake.rglob("*") if path.is_file())
    return total / rows_in(lake)


def parse_only_per_cpu_second(spans: int) -> float:
    """Spans per CPU second of a plain loop that does nothing but parse the protobuf bodies."""
    bodies = stream(1000, 7, time.time_ns)
    batch = [next(bodies) for _ in range(min(200, spans // 1000))]
    start = time.process_time()
    for body in batch:
        ExportTraceServiceRequest.FromString(body)
    return 1000 * len(batch) / (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--spans", type=int, default=2_000_000, help="spans in 1000-span bodies (20000000: the soak)")
    parser.add_argument("--small-spans", type=int, default=200_000, help="spans in 8-span bodies")
    parser.add_argument("--lake", type=Path, help="folder for the lakes; default a temporary one, removed at the end")
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    os.sched_setaffinity(0, {SENDER_CORE})
    folder = options.lake or Path(tempfile.mkdtemp(prefix="vllm-slo-ingest-"))
    try:
        large = measure(folder / "large", Load(options.spans, 1000, 16, 1), Load(100_000, 1000, 16, 2))
        per_request = bytes_per_request(folder / "large")
        small = measure(folder / "small", Load(options.small_spans, 8, 64, 3), Load(8_000, 8, 64, 4))
        plain = parse_only_per_cpu_second(options.spans)
    finally:
        if options.lake is None:
            shutil.rmtree(folder, ignore_errors=True)
    figures = {
        "durable_spans_per_cpu_second": large["spans_per_cpu_second"],
        "durable_spans_per_cpu_second_8_span_bodies": small["spans_per_cpu_second"],
        "cpu_seconds_per_million_spans": 1e6 / large["spans_per_cpu_second"],
        "bytes_per_request": per_request,
        "rows_sent": large["rows_sent"] + small["rows_sent"],
        "rows_in_lake": large["rows_in_lake"] + small["rows_in_lake"],
        "durable_spans_per_second": options.spans / large["wall_seconds"],
        "memory_start_bytes": large["memory_start_bytes"],
        "memory_peak_bytes": large["memory_peak_bytes"],
        "parse_only_spans_per_cpu_second": plain,
        "ratio_to_parse_only": large["spans_per_cpu_second"] / plain,
    }
    for name, value in figures.items():
        print(f"{name}: {value:,.2f}" if isinstance(value, float) else f"{name}: {value:,}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(
        f"ingest: {figures['durable_spans_per_cpu_second']:,.0f} spans/CPU-s (8-span bodies "
        f"{figures['durable_spans_per_cpu_second_8_span_bodies']:,.0f}), {per_request:.1f} bytes/request, "
        f"{figures['rows_in_lake']:,} of {figures['rows_sent']:,} rows in the lake"
    )


if __name__ == "__main__":
    main()
