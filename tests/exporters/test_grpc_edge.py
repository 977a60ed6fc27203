"""OTLP/gRPC as real senders meet it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from grpc_health.v1 import health_pb2, health_pb2_grpc
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult

from receiving import EXPORT, ROOMY, Running, body, certificate, receiving, spans_of
from vllm_slo.exporters.otlp.decoded import Decoded, DecodeSettings
from vllm_slo.exporters.otlp.plain import decode
from vllm_slo.exporters.receiver.grpc_edge import TRACE_SERVICE
from vllm_slo.exporters.receiver.settings import Limits, ReceiverError, ReceiverSettings, Tls, read_token


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with receiving(tmp_path) as found:
        yield found


def failure(caught: pytest.ExceptionInfo[grpc.RpcError]) -> tuple[grpc.StatusCode, Status, dict[str, bytes]]:
    """Code, google.rpc.Status and trailing metadata of a failed call."""
    trailers = dict(caught.value.trailing_metadata())
    return caught.value.code(), Status.FromString(trailers.get("grpc-status-details-bin", b"")), trailers


def test_an_acknowledged_body_is_on_disk_as_it_was_sent(running: Running) -> None:
    sent = body(50)
    assert running.export(sent) == b""
    assert running.spooled() == [sent]


def test_many_senders_at_once_all_find_their_spans_on_disk(running: Running) -> None:
    ids = [[os.urandom(8) for _ in range(8)] for _ in range(300)]
    with ThreadPoolExecutor(32) as pool:
        assert set(pool.map(lambda one: running.export(body(one)), ids)) == {b""}
    assert sorted(running.span_ids()) == sorted(span for one in ids for span in one)


def test_the_real_exporter_delivers(running: Running) -> None:
    provider = TracerProvider(resource=Resource.create({"service.name": "vllm"}))
    exporter = OTLPSpanExporter(endpoint=running.grpc_address, insecure=True, compression=grpc.Compression.Gzip)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for name in ("a", "b"):
        with provider.get_tracer("t").start_as_current_span(name):
            pass
    provider.shutdown()
    assert [span.name for data in running.spooled() for span in spans_of(data)] == ["a", "b"]


def test_a_partial_success_names_what_was_refused(running: Running) -> None:
    good = os.urandom(8)
    reply = ExportTraceServiceResponse.FromString(running.export(body([b"bad", good])))
    assert reply.partial_success.rejected_spans == 1
    assert "span" in reply.partial_success.error_message
    assert running.span_ids() == [good]


def test_a_partial_success_message_is_bounded(running: Running) -> None:
    reply = ExportTraceServiceResponse.FromString(running.export(body([b"x" * n for n in range(9, 2000)])))
    assert reply.partial_success.rejected_spans == 1991
    assert 0 < len(reply.partial_success.error_message) <= 1000


def test_an_unusable_body_is_an_invalid_argument_with_the_reason(running: Running) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        running.export(b"\xff\xff\xff not protobuf")
    code, status, _ = failure(caught)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert status.code == 3
    assert status.message
    assert running.spooled() == []


def test_other_services_and_methods_are_unimplemented(running: Running) -> None:
    with grpc.insecure_channel(running.grpc_address) as channel:
        for method in (
            "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
            "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
            f"/{TRACE_SERVICE}/Import",
        ):
            with pytest.raises(grpc.RpcError) as caught:
                channel.unary_unary(method)(b"", timeout=10)
            assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_health_says_serving(running: Running) -> None:
    with grpc.insecure_channel(running.grpc_address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for service in ("", TRACE_SERVICE):
            reply = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING


def test_a_body_over_the_limit_is_refused_and_one_at_the_limit_is_not(tmp_path: Path) -> None:
    limit = len(body(100))
    with receiving(tmp_path, ReceiverSettings(limits=Limits(body_bytes=limit, free_bytes=0))) as running:
        assert running.export(body(100)) == b""
        with pytest.raises(grpc.RpcError) as caught:
            running.export(body(101))
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(running.span_ids()) == 100


@pytest.mark.parametrize("algorithm", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_bodies_are_taken(running: Running, algorithm: grpc.Compression) -> None:
    assert running.export(body(20), compression=algorithm) == b""
    assert len(running.span_ids()) == 20


_SERVE = """
import sys, threading
from pathlib import Path
from receiving import receiving
with receiving(Path(sys.argv[1])) as running:
    print(running.receiver.grpc_port, flush=True)
    sys.stdin.read()
"""


def test_a_gzip_bomb_stops_at_the_limit_and_takes_no_memory(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-c", _SERVE, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        options = [("grpc.max_send_message_length", -1)]
        with grpc.insecure_channel(f"127.0.0.1:{port}", options) as channel:
            export = channel.unary_unary(EXPORT)
            assert export(body(1), timeout=10) == b""
            before = peak_bytes(server.pid)
            with pytest.raises(grpc.RpcError) as caught:
                export(bytes(500_000_000), compression=grpc.Compression.Gzip, timeout=60)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert peak_bytes(server.pid) - before < 100_000_000
            assert export(body(1), timeout=10) == b""
        server.communicate()


def peak_bytes(pid: int) -> int:
    """The most memory the process ever had resident."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def test_push_back_carries_retry_info_in_both_places(tmp_path: Path) -> None:
    with receiving(
        tmp_path, ReceiverSettings(limits=Limits(spool_bytes=0, free_bytes=0, retry_seconds=1.5))
    ) as running:
        with pytest.raises(grpc.RpcError) as caught:
            running.export(body(1))
        code, status, trailers = failure(caught)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert status.code == 8
        info, packed = RetryInfo(), status.details[0]
        assert isinstance(packed, AnyMessage)
        assert packed.Unpack(info)
        assert info.retry_delay.ToTimedelta().total_seconds() == 1.5
        assert RetryInfo.FromString(trailers["google.rpc.retryinfo-bin"]) == info


def test_the_real_exporter_comes_again_and_its_batch_arrives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = threading.Event()
    full.set()
    settings = ReceiverSettings(limits=Limits(free_bytes=1, segment_seconds=0.2, retry_seconds=0.3))

    with receiving(tmp_path, settings) as running:
        running.receiver.intake._free_bytes = lambda: 0 if full.is_set() else 1
        provider = TracerProvider()
        exporter = OTLPSpanExporter(endpoint=running.grpc_address, insecure=True, timeout=20)
        results: list[SpanExportResult] = []

        class Recording(SimpleSpanProcessor):
            def on_end(self, span: object) -> None:
                results.append(self.span_exporter.export((span,)))  # type: ignore[arg-type]

        provider.add_span_processor(Recording(exporter))
        threading.Timer(1.0, full.clear).start()
        start = time.monotonic()
        with caplog.at_level(logging.CRITICAL), provider.get_tracer("t").start_as_current_span("late"):
            pass
        assert results == [SpanExportResult.SUCCESS]
        assert 0.9 < time.monotonic() - start < 3, "RetryInfo's 0.3 s, not the exporter's own growing pauses"
        assert [span.name for data in running.spooled() for span in spans_of(data)] == ["late"]
        assert running.tally.get("back_pressure", "disk_full") >= 2
        provider.shutdown()


def test_beyond_the_requests_in_flight_senders_are_pushed_back(tmp_path: Path) -> None:
    gate = threading.Event()

    def slow(data: bytes, received_ns: int, settings: DecodeSettings) -> Decoded:
        gate.wait(10)
        return decode(data, received_ns, settings)

    limits = Limits(requests_in_flight=3, free_bytes=0)
    with receiving(tmp_path, ReceiverSettings(limits=limits), slow) as running:
        running_call = grpc.insecure_channel(running.grpc_address)
        export = running_call.unary_unary(EXPORT)
        waiting = [export.future(body(1), timeout=10) for _ in range(3)]
        deadline = time.monotonic() + 5
        while running.receiver.intake._pending < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(grpc.RpcError) as caught:
            export(body(1), timeout=10)
        assert failure(caught)[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        gate.set()
        assert [one.result() for one in waiting] == [b""] * 3
        running_call.close()


def test_a_token_is_asked_for_and_compared_whole(tmp_path: Path) -> None:
    with receiving(tmp_path, ReceiverSettings(token="s3cret", limits=ROOMY)) as running:
        for metadata in ((), (("authorization", "Bearer s3cre"),), (("authorization", "s3cret"),)):
            with pytest.raises(grpc.RpcError) as caught:
                running.export(body(1), metadata=metadata)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert running.export(body(1), metadata=(("authorization", "Bearer s3cret"),)) == b""
        assert len(running.span_ids()) == 1


def test_tls_serves_those_who_trust_the_certificate(tmp_path: Path) -> None:
    tls = certificate(tmp_path)
    with receiving(tmp_path, ReceiverSettings(tls=tls, limits=ROOMY)) as running:
        trusted = grpc.ssl_channel_credentials(tls.certificate.read_bytes())
        with grpc.secure_channel(running.grpc_address, trusted) as channel:
            assert channel.unary_unary(EXPORT)(body(1), timeout=10) == b""
        with grpc.insecure_channel(running.grpc_address) as channel, pytest.raises(grpc.RpcError):
            channel.unary_unary(EXPORT)(body(1), timeout=5)


def test_a_certificate_without_its_key_is_said_before_anything_starts(tmp_path: Path) -> None:
    tls = certificate(tmp_path)
    (tmp_path / "other").mkdir()
    for wrong in (Tls(tls.certificate, tmp_path / "absent"), Tls(tls.certificate, certificate(tmp_path / "other").key)):
        with pytest.raises(ReceiverError, match="belong together"):
            ReceiverSettings(tls=wrong).check()


@pytest.mark.parametrize("address", ["0.0.0.0:4317", "[::]:4317", "192.0.2.1:4317", "example.org:4317"])
def test_beyond_loopback_a_token_or_the_explicit_option_is_needed(address: str) -> None:
    with pytest.raises(ReceiverError, match="--token-file"):
        ReceiverSettings(grpc=address).check()
    with pytest.raises(ReceiverError, match="--token-file"):
        ReceiverSettings(http=address).check()
    ReceiverSettings(grpc=address, token="t").check()
    ReceiverSettings(grpc=address, insecure=True).check()


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.8.8.8:1", "[::1]:1", "localhost:1"])
def test_on_loopback_no_token_is_needed(address: str) -> None:
    ReceiverSettings(grpc=address, http=address).check()


@pytest.mark.parametrize("address", ["4317", "host", "host:", ":1", "host:99999", "host:x"])
def test_an_address_that_is_none_is_named_with_an_example(address: str) -> None:
    with pytest.raises(ReceiverError, match=r"127\.0\.0\.1:4317"):
        ReceiverSettings(grpc=address).check()


def test_an_address_in_use_is_said(running: Running, tmp_path: Path) -> None:
    import asyncio

    from vllm_slo.exporters.receiver.grpc_edge import GrpcEdge

    taken = ReceiverSettings(grpc=running.grpc_address)
    with pytest.raises(ReceiverError, match="free the port"):
        asyncio.run(GrpcEdge(taken, running.receiver.intake).start())


def test_the_token_file_gives_the_token_and_a_bad_one_is_said(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("  abc123\n")
    assert read_token(file) == "abc123"
    for bad in ("", "two words", "ümlaut", "a\x07b"):
        file.write_text(bad)
        with pytest.raises(ReceiverError, match="ASCII"):
            read_token(file)
    with pytest.raises(ReceiverError, match="No such file"):
        read_token(tmp_path / "absent")
