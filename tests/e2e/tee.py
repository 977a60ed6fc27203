"""A process between vLLM and the receiver that passes every OTLP/gRPC body on at once and keeps a copy.

Usage: tee.py RECEIVER_HOST_AND_PORT FILE. Prints the port it listens on; ends when standard input ends. The file holds
the bodies one after another, which is one body again: `kept` reads it.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"


def main(receiver: str, file: Path) -> None:
    """Serve until standard input ends."""
    onward = grpc.insecure_channel(receiver).unary_unary(EXPORT)
    lock = Lock()

    def export(body: bytes, context: grpc.ServicerContext) -> bytes:
        reply = onward(body, timeout=30)
        with lock, file.open("ab") as copy:
            copy.write(body)
        assert isinstance(reply, bytes)
        return reply

    method = grpc.unary_unary_rpc_method_handler(export)
    service, name = EXPORT.strip("/").split("/")
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {name: method}),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(5).wait()


@contextmanager
def tee(receiver_port: int, file: Path) -> Iterator[int]:
    """The port to send to, instead of ``receiver_port``."""
    command = [sys.executable, __file__, f"127.0.0.1:{receiver_port}", str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.communicate(timeout=30)


def kept(file: Path, name: str) -> list[Span]:
    """Spans of that name in the copy."""
    body = ExportTraceServiceRequest.FromString(file.read_bytes())
    return [
        span
        for resource in body.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
        if span.name == name
    ]


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
