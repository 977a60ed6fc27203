"""OTLP/gRPC: the trace service on one port, with the standard health service.

Bodies arrive as bytes and go to the intake untouched. gRPC bounds them by ``Limits.body_bytes`` as they travel and
again as they are unpacked. Who is pushed back finds RetryInfo in ``grpc-status-details-bin``, as OTLP specifies,
and in ``google.rpc.retryinfo-bin``, where OpenTelemetry's Python exporter looks.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server

from vllm_slo.exporters.receiver import rpc
from vllm_slo.exporters.receiver.bearer import bears
from vllm_slo.exporters.receiver.intake import Intake
from vllm_slo.exporters.receiver.outcome import ALL_ACCEPTED, STOPPING, Accepted, PushedBack
from vllm_slo.exporters.receiver.settings import ReceiverError, ReceiverSettings, split_address

TRACE_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"
EXPORT = f"/{TRACE_SERVICE}/Export"
_SUCCESS = rpc.response(ALL_ACCEPTED).SerializeToString()

_Context = Any
_Export = Callable[[bytes, _Context], Awaitable[bytes]]


class GrpcEdge:
    """The gRPC server; ``port`` is known after ``start``."""

    def __init__(self, settings: ReceiverSettings, intake: Intake) -> None:
        self.port = 0
        self._settings = settings
        self._intake = intake
        self._health = HealthServicer()
        self._server: Any = None

    async def start(self) -> None:
        """Listen. Raises ReceiverError when the address cannot be had."""
        address = self._settings.grpc
        assert address is not None
        host, port = split_address("grpc", address)
        limits = self._settings.limits
        server = grpc.aio.server(
            options=[
                ("grpc.max_receive_message_length", limits.body_bytes),
                ("grpc.so_reuseport", 0),
                ("grpc.max_metadata_size", 16 * 1024),
                # A sender that vanished without a word is found and its calls end, instead of after hours.
                ("grpc.keepalive_time_ms", 60_000),
                ("grpc.keepalive_timeout_ms", 20_000),
            ],
            maximum_concurrent_rpcs=2 * limits.requests_in_flight,
        )
        server.add_generic_rpc_handlers((_Services(self._export),))
        add_HealthServicer_to_server(self._health, server)
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        tls = self._settings.tls
        try:
            if tls is None:
                self.port = server.add_insecure_port(where)
            else:
                pair = (tls.key.read_bytes(), tls.certificate.read_bytes())
                self.port = server.add_secure_port(where, grpc.ssl_server_credentials([pair]))
        except (RuntimeError, OSError) as error:
            found = str(error).partition("; set GRPC_VERBOSITY")[0]
            raise ReceiverError(f"--grpc {address}: {found}; free the port or choose another") from error
        await server.start()
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)
        await self._health.set(TRACE_SERVICE, health_pb2.HealthCheckResponse.SERVING)
        self._server = server

    async def stop(self, grace_seconds: float) -> None:
        """Take no more calls; those in flight have ``grace_seconds`` to end."""
        if self._server is not None:
            await self._health.enter_graceful_shutdown()
            await self._server.stop(grace_seconds)

    async def _export(self, body: bytes, context: _Context) -> bytes:
        if self._settings.token is not None and not _bears(context, self._settings.token):
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "send metadata 'authorization: Bearer TOKEN'")
        outcome = await self._intake.take(body, "grpc")
        if outcome is ALL_ACCEPTED:
            return _SUCCESS
        if isinstance(outcome, Accepted):
            return rpc.response(outcome).SerializeToString()
        if isinstance(outcome, PushedBack):
            await _push_back(context, outcome)
        else:
            message = f"{outcome.reason}: {outcome.message}"
            details = rpc.status(rpc.INVALID_ARGUMENT, message).SerializeToString()
            trailers = (("grpc-status-details-bin", details),)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _line(message), trailers)
        raise AssertionError("abort raises")


class _Services(grpc.GenericRpcHandler):  # type: ignore[misc]
    """The one method; gRPC answers UNIMPLEMENTED to every other."""

    def __init__(self, export: _Export) -> None:
        self._export = grpc.unary_unary_rpc_method_handler(export)

    def service(self, call: Any) -> Any:
        return self._export if call.method == EXPORT else None


async def _push_back(context: _Context, outcome: PushedBack) -> None:
    stopping = outcome.cause == STOPPING
    code = grpc.StatusCode.UNAVAILABLE if stopping else grpc.StatusCode.RESOURCE_EXHAUSTED
    number = rpc.UNAVAILABLE if stopping else rpc.RESOURCE_EXHAUSTED
    message = f"{outcome.cause}: {outcome.message}"
    trailers = (
        ("grpc-status-details-bin", rpc.status(number, message, outcome.retry_seconds).SerializeToString()),
        ("google.rpc.retryinfo-bin", rpc.retry_info(outcome.retry_seconds).SerializeToString()),
    )
    await context.abort(code, _line(message), trailers)


def _bears(context: _Context, token: str) -> bool:
    for key, value in context.invocation_metadata():
        if key == "authorization":
            return bears(value, token)
    return False


def _line(message: str) -> str:
    """``message`` as gRPC may carry it in a header: one line."""
    return message.replace("\n", " ").replace("\r", " ")
