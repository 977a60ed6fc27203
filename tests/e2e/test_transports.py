"""What a stock OpenTelemetry SDK or a collector in the middle sends gives the same rows as the bodies themselves."""

from __future__ import annotations

import gzip
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from e2e.product import Up, import_files, query

VISIBLE_WITHIN_SECONDS = 30.0


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    receiver = Up(tmp_path / "lake", tmp_path / "up.log")
    with receiver.running():
        yield receiver


def _rows(lake: Path, table: str, expected: int) -> list[dict[str, Any]]:
    """Every row but its time of receipt, as soon as there are as many as expected."""
    sql = f"select * exclude (received_time) from {table} order by trace_id, span_id"
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while len(rows := query(lake, sql)) < expected and time.monotonic() < deadline:
        time.sleep(0.5)
    return rows


@pytest.mark.parametrize("spans_a_body", [1, 7, 500])
def test_a_process_in_the_middle_that_cuts_batches_anew_changes_no_row(
    captures: Path, tmp_path: Path, up: Up, spans_a_body: int
) -> None:
    files = sorted((captures / "lightshard" / "otlp").glob("*.pb.gz"))[:12]
    direct = tmp_path / "direct"
    import_files(direct, files)
    command = [sys.executable, str(Path(__file__).with_name("rebatcher.py")), f"http://127.0.0.1:{up.http_port}"]
    middle = subprocess.Popen(
        [*command, str(spans_a_body)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert middle.stdout is not None
    with grpc.insecure_channel(f"127.0.0.1:{int(middle.stdout.readline())}") as channel:
        stub = service.TraceServiceStub(channel)
        for file in files:
            stub.Export(ExportTraceServiceRequest.FromString(gzip.decompress(file.read_bytes())), timeout=30)
    _, errors = middle.communicate(timeout=60)
    assert middle.returncode == 0, errors[-2000:]
    for table in ("requests", "spans"):
        expected = _rows(direct, table, 1)
        assert expected
        time.sleep(3 if table == "requests" else 0)  # long enough for a repeated body to become visible, were it kept
        assert _rows(tmp_path / "lake", table, len(expected)) == expected


@pytest.mark.parametrize("transport", ["grpc", "http", "http gzip"])
def test_spans_of_the_opentelemetry_sdk_arrive_over_every_transport(tmp_path: Path, up: Up, transport: str) -> None:
    url = f"http://127.0.0.1:{up.http_port}/v1/traces"
    exporter: SpanExporter
    if transport == "grpc":
        exporter = GrpcExporter(endpoint=f"127.0.0.1:{up.grpc_port}", insecure=True)
    else:
        exporter = HttpExporter(endpoint=url, compression=Compression.Gzip if "gzip" in transport else None)
    provider = TracerProvider(resource=Resource({"service.name": "vllm", "vllm.shard": "general"}))
    span = provider.get_tracer("vllm.tracing.otel").start_span(
        "llm_request",
        kind=SpanKind.SERVER,
        attributes={
            "gen_ai.request.id": "cmpl-1-0",
            "gen_ai.usage.prompt_tokens": 5000,
            "gen_ai.usage.completion_tokens": 3,
            "gen_ai.latency.time_to_first_token": 0.5,
            "gen_ai.latency.e2e": 0.75,
            "gen_ai.latency.time_in_queue": 0.125,
            "gen_ai.latency.time_in_model_prefill": 0.25,
            "gen_ai.latency.time_in_model_decode": 0.25,
            "gen_ai.prompt.0.content": "what must never reach the disk",
        },
    )
    span.end()
    assert exporter.export([span]) is SpanExportResult.SUCCESS
    exporter.shutdown()
    (row,) = _rows(tmp_path / "lake", "requests", 1)
    context = span.get_span_context()
    assert (row["trace_id"], row["span_id"]) == (f"{context.trace_id:032x}", f"{context.span_id:016x}")
    assert (row["shard"], row["bucket"], row["prompt_tokens"]) == ("general", "medium", 5000)
    assert float(row["frontend_seconds"]) == 0.125
    stored = b"".join(path.read_bytes() for path in (tmp_path / "lake").rglob("*") if path.is_file())
    assert b"never reach the disk" not in stored
