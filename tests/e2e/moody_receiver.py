"""An OTLP receiver that accepts, hangs, refuses or is gone, as told, on one port."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from e2e.product import free_port

SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


class MoodyReceiver:
    """``calls`` counts what arrived while in each mood."""

    def __init__(self) -> None:
        self.port = free_port()
        self.calls: dict[str, int] = {}
        self._bodies: list[bytes] = []
        self._mood = "gone"
        self._changed = threading.Event()
        self._server: grpc.Server | None = None

    @property
    def endpoint(self) -> str:
        """Its address, for `--otlp-traces-endpoint`."""
        return f"grpc://127.0.0.1:{self.port}"

    def be(self, mood: str) -> None:
        """`accepting`, `hanging`, `refusing` or `gone`."""
        self._mood = mood
        self._changed.set()
        self._changed = threading.Event()
        if mood == "gone" and self._server is not None:
            self._server.stop(None).wait()
            self._server = None
        elif mood != "gone" and self._server is None:
            handler = grpc.unary_unary_rpc_method_handler(self._export)
            handlers = (grpc.method_handlers_generic_handler(SERVICE, {"Export": handler}),)
            self._server = grpc.server(ThreadPoolExecutor(32), handlers=handlers)
            self._server.add_insecure_port(f"127.0.0.1:{self.port}")
            self._server.start()

    def records(self, name: str) -> list[dict[str, Any]]:
        """Attributes of the accepted spans of this name, with those of their resource."""
        found = []
        for body in tuple(self._bodies):
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                whole = _plain(resource.resource.attributes)
                for scope in resource.scope_spans:
                    found += [{**whole, **_plain(span.attributes)} for span in scope.spans if span.name == name]
        return found

    def _export(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        mood, changed = self._mood, self._changed
        self.calls[mood] = self.calls.get(mood, 0) + 1
        if mood == "hanging":
            changed.wait(30)
        if mood == "accepting":
            self._bodies.append(body)
            return b""
        context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "not now")
        return b""


def _plain(attributes: Any) -> dict[str, Any]:
    return {each.key: getattr(each.value, each.value.WhichOneof("value")) for each in attributes}


@contextmanager
def moody_receiver() -> Iterator[MoodyReceiver]:
    """Accepting at first, gone at the end."""
    receiver = MoodyReceiver()
    receiver.be("accepting")
    try:
        yield receiver
    finally:
        receiver.be("gone")
