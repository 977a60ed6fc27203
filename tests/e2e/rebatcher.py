"""A process between vLLM and the receiver, as a collector is: merges what comes, cuts it anew, sends parts twice.

Usage: rebatcher.py RECEIVER_URL SPANS_A_BODY. Prints the port it listens on (OTLP/gRPC); ends when standard input ends,
after everything has been passed on.
"""

from __future__ import annotations

import gzip
import random
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as service
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Rebatcher(service.TraceServiceServicer):
    """Keeps every span with its resource and scope until the end, then sends them in another order and grouping."""

    def __init__(self) -> None:
        self.alone: list[ExportTraceServiceRequest] = []

    def Export(self, request: ExportTraceServiceRequest, context: grpc.ServicerContext) -> ExportTraceServiceResponse:
        for resource_spans in request.resource_spans:
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    one = ExportTraceServiceRequest()
                    resource = one.resource_spans.add(resource=resource_spans.resource)
                    resource.scope_spans.add(scope=scope_spans.scope).spans.append(span)
                    self.alone.append(one)
        return ExportTraceServiceResponse()

    def bodies(self, spans_a_body: int) -> list[bytes]:
        """Every span once, shuffled and cut anew, and a tenth of the bodies a second time."""
        order = random.Random(3)
        order.shuffle(self.alone)
        cut = [self.alone[i : i + spans_a_body] for i in range(0, len(self.alone), spans_a_body)]
        merged = [b"".join(one.SerializeToString() for one in part) for part in cut]
        return merged + order.sample(merged, len(merged) // 10)


def main(receiver: str, spans_a_body: int) -> None:
    rebatcher = Rebatcher()
    server = grpc.server(ThreadPoolExecutor(2))
    service.add_TraceServiceServicer_to_server(rebatcher, server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    server.start()
    sys.stdin.read()
    server.stop(5).wait()
    headers = {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip"}
    for body in rebatcher.bodies(spans_a_body):
        request = urllib.request.Request(f"{receiver}/v1/traces", gzip.compress(body), headers)
        with urllib.request.urlopen(request, timeout=30) as response:
            assert response.status == 200


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
