"""OTLP/HTTP as real senders meet it."""

from __future__ import annotations

import gzip
import logging
import os
import re
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import orjson
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.exporter.otlp.proto.http.trace_exporter import Compression, OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult

from receiving import ROOMY, Running, body, certificate, receiving, spans_of
from vllm_slo.exporters.receiver.gzipped import TooLargeError, gunzip
from vllm_slo.exporters.receiver.settings import Limits, ReceiverSettings

PROTOBUF = {"content-type": "application/x-protobuf"}
JSON = {"content-type": "application/json"}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    with receiving(tmp_path) as found:
        yield found


@pytest.fixture
def client(running: Running) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=running.url, timeout=20) as found:
        yield found


def json_body(trace_id: str = "5b8efff798038103d269b633813fc60c", span_id: str = "eee19b7ec3c1b174") -> bytes:
    span = {
        "traceId": trace_id,
        "spanId": span_id,
        "name": "work",
        "kind": 2,
        "startTimeUnixNano": "1790000000000000000",
        "endTimeUnixNano": "1790000001000000000",
    }
    return orjson.dumps({"resourceSpans": [{"scopeSpans": [{"spans": [span]}]}]})


def test_protobuf_is_acknowledged_once_on_disk(running: Running, client: httpx.Client) -> None:
    sent = body(20)
    reply = client.post("/v1/traces", content=sent, headers=PROTOBUF)
    assert (reply.status_code, reply.headers["content-type"], reply.content) == (200, "application/x-protobuf", b"")
    assert running.spooled() == [sent]


def test_a_grpc_client_at_the_http_port_is_told_counted_and_turned_away(
    running: Running, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{running.receiver.http_port}") as channel:
        call = channel.unary_unary("/opentelemetry.proto.collector.trace.v1.TraceService/Export")
        with pytest.raises(grpc.RpcError, match=r"Trying to connect an http1\.x server"):
            call(body(1), timeout=10)
    with socket.create_connection(("127.0.0.1", running.receiver.http_port)) as other:
        other.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        assert other.recv(100).startswith(b"HTTP/1.1 400")
    assert sum("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf" in text for text in caplog.messages) == 1
    counted = re.search(r'spans_refused_total\{reason="grpc_on_http_port"\} (\d+)', client.get("/metrics").text)
    assert counted
    assert int(counted[1]) >= 2
    assert client.post("/v1/traces", content=body(1), headers=PROTOBUF).status_code == 200


def test_json_keeps_the_ids_that_were_sent(running: Running, client: httpx.Client) -> None:
    reply = client.post("/v1/traces", content=json_body(), headers={"content-type": "application/json; charset=utf-8"})
    assert (reply.status_code, reply.json()) == (200, {})
    (span,) = spans_of(running.spooled()[0])
    assert span.trace_id.hex() == "5b8efff798038103d269b633813fc60c"
    assert span.span_id.hex() == "eee19b7ec3c1b174"


@pytest.mark.parametrize(("content", "headers"), [(body(3), PROTOBUF), (json_body(), JSON)])
def test_gzip_is_taken(running: Running, client: httpx.Client, content: bytes, headers: dict[str, str]) -> None:
    half = len(content) // 2
    two_members = gzip.compress(content[:half]) + gzip.compress(content[half:])
    for packed in (gzip.compress(content), two_members):
        reply = client.post("/v1/traces", content=packed, headers={**headers, "content-encoding": "gzip"})
        assert reply.status_code == 200
    assert len(running.spooled()) == 2


@pytest.mark.parametrize("compression", [Compression.NoCompression, Compression.Gzip])
def test_the_real_exporter_delivers(running: Running, compression: Compression) -> None:
    provider = TracerProvider()
    exporter = OTLPSpanExporter(endpoint=f"{running.url}/v1/traces", compression=compression)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with provider.get_tracer("t").start_as_current_span("a"):
        pass
    provider.shutdown()
    assert [span.name for data in running.spooled() for span in spans_of(data)] == ["a"]


def test_a_partial_success_names_what_was_refused_in_the_senders_encoding(
    running: Running, client: httpx.Client
) -> None:
    good = os.urandom(8)
    reply = client.post("/v1/traces", content=body([good, b"bad"]), headers=PROTOBUF)
    assert reply.status_code == 200
    assert ExportTraceServiceResponse.FromString(reply.content).partial_success.rejected_spans == 1
    reply = client.post("/v1/traces", content=json_body(span_id="zz"), headers=JSON)
    assert reply.status_code == 200
    partial = reply.json()["partialSuccess"]
    assert partial["rejectedSpans"] == "1"
    assert partial["errorMessage"]
    assert running.span_ids() == [good]


def test_an_unusable_body_is_400_with_a_status_in_the_senders_encoding(running: Running, client: httpx.Client) -> None:
    reply = client.post("/v1/traces", content=b"\xff\xff not protobuf", headers=PROTOBUF)
    assert (reply.status_code, reply.headers["content-type"]) == (400, "application/x-protobuf")
    assert Status.FromString(reply.content).message
    reply = client.post("/v1/traces", content=b'{"resourceSpans": [', headers=JSON)
    assert (reply.status_code, reply.headers["content-type"]) == (400, "application/json")
    assert "malformed_json" in reply.json()["message"]
    assert running.spooled() == []


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"content-type": "text/plain"},
        {"content-type": "application/protobuf"},
        {**PROTOBUF, "content-encoding": "zstd"},
    ],
)
def test_other_types_and_encodings_are_415_and_said(client: httpx.Client, headers: dict[str, str]) -> None:
    reply = client.post("/v1/traces", content=body(1), headers=headers)
    assert reply.status_code == 415
    assert "is not taken" in reply.text


def test_what_claims_to_be_gzip_and_is_not_is_400(running: Running, client: httpx.Client) -> None:
    whole = gzip.compress(body(1))
    for broken in (b"not gzip", whole[:-5], whole + b"rest"):
        reply = client.post("/v1/traces", content=broken, headers={**PROTOBUF, "content-encoding": "gzip"})
        assert reply.status_code == 400
        assert "gzip" in Status.FromString(reply.content).message
    assert running.tally.get("spans_refused", "bad_gzip") == 3


def test_bodies_over_the_limit_are_413_packed_or_not_announced_or_not(tmp_path: Path) -> None:
    sent = body(100)
    with (
        receiving(tmp_path, ReceiverSettings(limits=Limits(body_bytes=len(sent), free_bytes=0))) as running,
        httpx.Client(base_url=running.url) as client,
    ):
        over = body(101)
        assert client.post("/v1/traces", content=sent, headers=PROTOBUF).status_code == 200
        assert client.post("/v1/traces", content=over, headers=PROTOBUF).status_code == 413
        in_chunks = iter([over[:1000], over[1000:]])
        assert client.post("/v1/traces", content=in_chunks, headers=PROTOBUF).status_code == 413
        packed = gzip.compress(over)
        reply = client.post("/v1/traces", content=packed, headers={**PROTOBUF, "content-encoding": "gzip"})
        assert reply.status_code == 413
        assert "unpacks" in Status.FromString(reply.content).message
        assert len(running.span_ids()) == 100


def test_an_announced_oversize_is_refused_without_reading_it(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.receiver.http_port), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\n"
            b"Content-Length: 99999999999\r\n\r\n"
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_a_gzip_bomb_is_413(client: httpx.Client) -> None:
    bomb = gzip.compress(bytes(1_000_000_000), 1)
    reply = client.post("/v1/traces", content=bomb, headers={**PROTOBUF, "content-encoding": "gzip"})
    assert reply.status_code == 413


def test_a_flood_of_empty_gzip_members_is_refused_at_once(client: httpx.Client) -> None:
    start = time.monotonic()
    flood = gzip.compress(b"") * 700_000
    reply = client.post("/v1/traces", content=flood, headers={**PROTOBUF, "content-encoding": "gzip"})
    assert (reply.status_code, Status.FromString(reply.content).message) == (
        400,
        "the gzip body has more than 1024 members; send one",
    )
    assert time.monotonic() - start < 10


def test_a_gzip_body_larger_than_one_block_is_unpacked_whole() -> None:
    plain = os.urandom(300_000)
    assert gunzip(gzip.compress(plain) + gzip.compress(b"") + gzip.compress(plain), 600_000) == plain + plain
    with pytest.raises(TooLargeError):
        gunzip(gzip.compress(plain) + gzip.compress(plain), 599_999)
    with pytest.raises(ValueError, match="ends too early"):
        gunzip(gzip.compress(plain)[:-1], 600_000)


def test_push_back_is_429_with_retry_after_and_retry_info(tmp_path: Path) -> None:
    settings = ReceiverSettings(limits=Limits(spool_bytes=0, free_bytes=0, retry_seconds=1.5))
    with receiving(tmp_path, settings) as running, httpx.Client(base_url=running.url) as client:
        reply = client.post("/v1/traces", content=body(1), headers=PROTOBUF)
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "2")
        info = RetryInfo()
        assert Status.FromString(reply.content).details[0].Unpack(info)
        assert info.retry_delay.seconds == 1
        reply = client.post("/v1/traces", content=json_body(), headers=JSON)
        assert reply.status_code == 429
        assert reply.json()["details"][0]["retryDelay"] == "1.500s"


def test_while_stopping_senders_are_told_503_and_health_says_so(running: Running, client: httpx.Client) -> None:
    assert client.get("/healthz").status_code == 200
    running.receiver.intake.turn_away()
    reply = client.post("/v1/traces", content=body(1), headers=PROTOBUF)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert client.get("/healthz").status_code == 503


def test_the_real_exporter_comes_again_and_its_batch_arrives(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = threading.Event()
    full.set()
    settings = ReceiverSettings(limits=Limits(free_bytes=1, segment_seconds=0.2, retry_seconds=1))
    with receiving(tmp_path, settings) as running:
        running.receiver.intake._free_bytes = lambda: 0 if full.is_set() else 1
        provider = TracerProvider()
        exporter = OTLPSpanExporter(endpoint=f"{running.url}/v1/traces", timeout=20)
        results: list[SpanExportResult] = []

        class Recording(SimpleSpanProcessor):
            def on_end(self, span: object) -> None:
                results.append(self.span_exporter.export((span,)))  # type: ignore[arg-type]

        provider.add_span_processor(Recording(exporter))
        threading.Timer(0.5, full.clear).start()
        with caplog.at_level(logging.CRITICAL), provider.get_tracer("t").start_as_current_span("late"):
            pass
        assert results == [SpanExportResult.SUCCESS]
        assert [span.name for data in running.spooled() for span in spans_of(data)] == ["late"]
        assert running.tally.get("back_pressure", "disk_full") >= 1
        provider.shutdown()


def test_other_signals_are_404_with_a_sentence(client: httpx.Client) -> None:
    for signal in ("metrics", "logs"):
        reply = client.post(f"/v1/{signal}", content=b"", headers=PROTOBUF)
        assert reply.status_code == 404
        assert f"switch the {signal} exporter off" in reply.text
    assert client.get("/nothing").status_code == 404


def test_get_on_traces_says_how_to_send(client: httpx.Client) -> None:
    reply = client.get("/v1/traces")
    assert (reply.status_code, reply.headers["allow"]) == (405, "POST")


def test_a_token_guards_everything_but_health(tmp_path: Path) -> None:
    settings = ReceiverSettings(token="s3cret", limits=ROOMY)
    with receiving(tmp_path, settings) as running, httpx.Client(base_url=running.url) as client:
        for authorization in (
            "",
            "Bearer s3cre",
            "Bearer s3cret2",
            "s3cret",
            "Basic czNjcmV0",
        ):
            headers = {**PROTOBUF, "authorization": authorization}
            reply = client.post("/v1/traces", content=body(1), headers=headers)
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert client.get("/metrics", headers=headers).status_code == 401
        good = {**PROTOBUF, "authorization": "bearer s3cret"}
        assert client.post("/v1/traces", content=body(1), headers=good).status_code == 200
        assert client.get("/metrics", headers=good).status_code == 200
        assert client.get("/healthz").status_code == 200
        assert len(running.span_ids()) == 1


def test_tls_serves_those_who_trust_the_certificate(tmp_path: Path) -> None:
    tls = certificate(tmp_path)
    trusting = ssl.create_default_context(cafile=str(tls.certificate))
    with receiving(tmp_path, ReceiverSettings(tls=tls, limits=ROOMY)) as running:
        url = running.url.replace("http:", "https:") + "/v1/traces"
        with httpx.Client(verify=trusting) as client:
            assert client.post(url, content=body(1), headers=PROTOBUF).status_code == 200
        with pytest.raises(httpx.ConnectError):
            httpx.post(url, content=body(1), headers=PROTOBUF)


def test_bodies_that_are_still_being_read_count_as_pending(tmp_path: Path) -> None:
    settings = ReceiverSettings(limits=Limits(free_bytes=0, pending_bytes=5000))
    head = (
        b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\nContent-Length: 9000\r\n\r\n"
    )
    with receiving(tmp_path, settings) as running, httpx.Client(base_url=running.url) as client:
        slow = socket.create_connection(("127.0.0.1", running.receiver.http_port), timeout=5)
        slow.sendall(head + bytes(4500))
        deadline = time.monotonic() + 5
        while running.receiver.intake.pending_bytes < 4500 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert client.post("/v1/traces", content=body(20), headers=PROTOBUF).status_code == 429
        slow.sendall(bytes(4000))
        assert slow.recv(100).startswith(b"HTTP/1.1 429")
        slow.close()
        assert client.post("/v1/traces", content=body(20), headers=PROTOBUF).status_code == 200
        assert running.receiver.intake.pending_bytes == 0


def test_a_body_that_stops_coming_gives_back_its_room(tmp_path: Path) -> None:
    head = (
        b"POST /v1/traces HTTP/1.1\r\nHost: x\r\nContent-Type: application/x-protobuf\r\nContent-Length: 9000\r\n\r\n"
    )
    with receiving(tmp_path, ReceiverSettings(limits=Limits(free_bytes=0, body_seconds=0.3))) as running:
        with socket.create_connection(("127.0.0.1", running.receiver.http_port), timeout=5) as stalled:
            stalled.sendall(head + bytes(4500))
            answer = b"".join(iter(lambda: stalled.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"the body was not here after 0.3 s" in answer
        assert running.receiver.intake.pending_bytes == 0
        assert running.tally.get("spans_refused", "body_too_slow") == 1


def test_a_sender_that_goes_away_amid_its_body_costs_nothing(running: Running, client: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", running.receiver.http_port), timeout=5) as connection:
        connection.sendall(
            b"POST /v1/traces HTTP/1.1\r\nHost: x\r\n"
            b"Content-Type: application/x-protobuf\r\nContent-Length: 100\r\n\r\nabc"
        )
    time.sleep(0.05)
    assert client.post("/v1/traces", content=body(1), headers=PROTOBUF).status_code == 200
    assert running.receiver.intake.pending_bytes == 0
