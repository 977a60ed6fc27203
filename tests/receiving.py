"""A receiver on free ports in a thread of its own, and bodies to send to it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from prometheus_client.registry import CollectorRegistry

from vllm_slo.exporters.otlp import json, plain
from vllm_slo.exporters.otlp.decoded import Decoder, DecodeSettings
from vllm_slo.exporters.receiver.server import Receiver
from vllm_slo.exporters.receiver.settings import Limits, ReceiverSettings, Tls
from vllm_slo.exporters.receiver.spool import Spool, SystemCalls
from vllm_slo.exporters.receiver.tally import Tally

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
ROOMY = Limits(free_bytes=0, segment_seconds=0.2)


@dataclass
class Running:
    """A started receiver."""

    receiver: Receiver
    spool: Spool
    tally: Tally
    registry: CollectorRegistry
    channels: list[grpc.Channel] = field(default_factory=list)

    @property
    def grpc_address(self) -> str:
        """Where gRPC listens."""
        return f"127.0.0.1:{self.receiver.grpc_port}"

    @property
    def url(self) -> str:
        """Where HTTP listens."""
        return f"http://127.0.0.1:{self.receiver.http_port}"

    def spooled(self) -> list[bytes]:
        """Every body on disk, sealed or open, in order."""
        self.spool.seal()
        return [record.body for number in self.spool.sealed() for record in self.spool.read(number)]

    def span_ids(self) -> list[bytes]:
        """Span ids of everything on disk, in order."""
        return [span.span_id for body in self.spooled() for span in spans_of(body)]

    def export(self, body: bytes, **options: object) -> bytes:
        """One call of Export; raises grpc.RpcError."""
        if not self.channels:
            self.channels.append(
                grpc.insecure_channel(self.grpc_address, options=[("grpc.max_send_message_length", -1)])
            )
        reply = self.channels[0].unary_unary(EXPORT)(body, timeout=30, **options)
        assert isinstance(reply, bytes)
        return reply


@contextmanager
def receiving(
    folder: Path,
    settings: ReceiverSettings | None = None,
    decode: Decoder = plain.decode,
    calls: SystemCalls | None = None,
    before: Callable[[Receiver], None] = lambda receiver: None,
) -> Iterator[Running]:
    """A receiver that spools into ``folder``/spool until the block ends."""
    given = settings or ReceiverSettings(limits=ROOMY)
    on_free_ports = replace(given, grpc=given.grpc and "127.0.0.1:0", http=given.http and "127.0.0.1:0")
    spool, tally, registry = Spool.open(folder / "spool", calls=calls), Tally(), CollectorRegistry()
    receiver = Receiver(on_free_ports, spool, decode, DecodeSettings(), json.to_protobuf, tally, registry)
    before(receiver)
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    running = Running(receiver, spool, tally, registry)
    try:
        asyncio.run_coroutine_threadsafe(receiver.start(), loop).result(30)
        try:
            yield running
        finally:
            for channel in running.channels:
                channel.close()
            asyncio.run_coroutine_threadsafe(receiver.stop(), loop).result(30)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()
        spool.close()


def body(ids: Sequence[bytes] | int, text: str | None = None, resource: str = "general-0") -> bytes:
    """One OTLP body of ``llm_request``-like spans; ``ids`` are span ids, or how many random ones."""
    chosen = [os.urandom(8) for _ in range(ids)] if isinstance(ids, int) else ids
    message = ExportTraceServiceRequest()
    resource_spans = message.resource_spans.add()
    resource_spans.resource.attributes.add(key="service.instance.id").value.string_value = resource
    scope = resource_spans.scope_spans.add()
    for span_id in chosen:
        span = scope.spans.add(
            trace_id=os.urandom(16),
            span_id=span_id,
            name="work",
            kind=Span.SPAN_KIND_SERVER,
            start_time_unix_nano=1_790_000_000_000_000_000,
            end_time_unix_nano=1_790_000_001_000_000_000,
        )
        if text is not None:
            span.attributes.add(key="gen_ai.prompt").value.string_value = text
    return message.SerializeToString()


def spans_of(body: bytes) -> list[Span]:
    """The spans of a body."""
    message = ExportTraceServiceRequest.FromString(body)
    return [span for one in message.resource_spans for scope in one.scope_spans for span in scope.spans]


def certificate(folder: Path) -> Tls:
    """A self-signed certificate for this machine and its key."""
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("openssl is not installed")
    return Tls(folder / "cert.pem", folder / "key.pem")
