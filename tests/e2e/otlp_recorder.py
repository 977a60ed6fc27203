"""An OTLP/HTTP receiver of the tests: keeps every span that it is sent, one that comes twice once, as the lake does."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Status


@dataclass(frozen=True)
class Kept:
    """One span: ``attributes`` without the prefix ``vllm_slo.``; ``resource`` of the process that sent it."""

    name: str
    start_ns: int
    end_ns: int
    trace_id: str
    span_id: str
    error: bool
    attributes: dict[str, Any]
    resource: dict[str, Any]


@dataclass
class Recorder:
    """``spans`` grows while the server runs."""

    endpoint: str
    spans: list[Kept] = field(default_factory=list)

    def named(self, name: str) -> list[Kept]:
        """Those of one name."""
        return [span for span in self.spans if span.name == name]


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None


def _spans(body: bytes) -> Iterator[Kept]:
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        origin = {pair.key: _value(pair.value) for pair in resource.resource.attributes}
        for scope in resource.scope_spans:
            for span in scope.spans:
                attributes = {pair.key.removeprefix("vllm_slo."): _value(pair.value) for pair in span.attributes}
                yield Kept(
                    span.name,
                    span.start_time_unix_nano,
                    span.end_time_unix_nano,
                    span.trace_id.hex(),
                    span.span_id.hex(),
                    span.status.code == Status.STATUS_CODE_ERROR,
                    attributes,
                    origin,
                )


@contextmanager
def recorder() -> Iterator[Recorder]:
    """Serves on a free port until the end of the block."""
    kept = Recorder("")
    known: set[tuple[str, str]] = set()
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            with lock:
                # A sender that waits too long for an answer sends again.
                for span in _spans(body):
                    if (span.trace_id, span.span_id) not in known:
                        known.add((span.trace_id, span.span_id))
                        kept.spans.append(span)
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    kept.endpoint = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield kept
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()
