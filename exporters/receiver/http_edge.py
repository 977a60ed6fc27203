"""OTLP/HTTP (protobuf and JSON, gzip or plain), ``/healthz`` and ``/metrics``: an ASGI application, and its server."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import uvicorn
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from vllm_slo.exporters.receiver import rpc
from vllm_slo.exporters.receiver.bearer import bears
from vllm_slo.exporters.receiver.gzipped import TooLargeError, unzip
from vllm_slo.exporters.receiver.intake import Intake, Preparation
from vllm_slo.exporters.receiver.outcome import STOPPING, Accepted, PushedBack, Unusable
from vllm_slo.exporters.receiver.settings import Limits, ReceiverError, ReceiverSettings, split_address

PROTOBUF = "application/x-protobuf"
JSON = "application/json"
METRICS = "text/plain; version=0.0.4; charset=utf-8"
GRPC_ON_HTTP_PORT = "grpc_on_http_port"
_HTTP_2_PREFACE = b"PRI * HTTP/2.0"
"""What a gRPC client without TLS says first (RFC 9113, section 3.4)."""
_log = logging.getLogger(__name__)


@dataclass
class _Refusal(Exception):
    """An answer that ends the request early."""

    http: int
    code: int
    message: str
    reason: str


@dataclass
class _Crowded(Exception):
    """Too much waits already; found out while a body was being read."""

    outcome: PushedBack


def application(
    intake: Intake,
    limits: Limits,
    token: str | None,
    json_to_protobuf: Preparation,
    render_metrics: Callable[[], bytes],
) -> Starlette:
    """The ASGI application. ``/healthz`` needs no token; everything else does when there is one."""

    def allowed(request: Request) -> bool:
        return token is None or bears(request.headers.get("authorization", ""), token)

    async def traces(request: Request) -> Response:
        content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        answer_type = content_type if content_type in (PROTOBUF, JSON) else JSON
        if not allowed(request):
            refusal = _Refusal(401, rpc.UNAUTHENTICATED, "send the header 'Authorization: Bearer TOKEN'", "")
            return _refused(answer_type, refusal, {"WWW-Authenticate": "Bearer"})
        if request.method != "POST":
            return PlainTextResponse("send OTLP spans with POST\n", 405, {"Allow": "POST"})
        protocol = "http_json" if answer_type == JSON else "http_protobuf"
        crowded = intake.crowded()
        if crowded is not None:
            intake.count_refused(crowded, protocol)
            return _pushed_back(answer_type, crowded)
        try:
            body = await _body(request, content_type, limits, intake)
        except _Crowded as crowd:
            intake.count_refused(crowd.outcome, protocol)
            return _pushed_back(answer_type, crowd.outcome)
        except _Refusal as refusal:
            intake.count_refused(Unusable(refusal.reason, refusal.message), protocol)
            closing = {"Connection": "close"} if refusal.http == 408 else None
            return _refused(answer_type, refusal, closing)
        except ClientDisconnect:
            return Response(status_code=400)
        outcome = await intake.take(body, protocol, json_to_protobuf if answer_type == JSON else None)
        if isinstance(outcome, Accepted):
            return _reply(answer_type, 200, rpc.response(outcome))
        if isinstance(outcome, Unusable):
            message = f"{outcome.reason}: {outcome.message}"
            return _reply(answer_type, 400, rpc.status(rpc.INVALID_ARGUMENT, message))
        return _pushed_back(answer_type, outcome)

    async def other_signal(request: Request) -> Response:
        signal = request.url.path.rpartition("/")[2]
        message = (
            f"this receiver takes spans only (POST /v1/traces); switch the {signal} exporter off or send it elsewhere"
        )
        return _reply(JSON, 404, rpc.status(rpc.NOT_FOUND, message))

    async def healthz(request: Request) -> Response:
        crowded = intake.crowded()
        if crowded is not None and crowded.cause == STOPPING:
            return JSONResponse({"status": "stopping"}, 503)
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        if not allowed(request):
            return PlainTextResponse(
                "send the header 'Authorization: Bearer TOKEN'\n", 401, {"WWW-Authenticate": "Bearer"}
            )
        return Response(await asyncio.to_thread(render_metrics), media_type=METRICS)

    any_method = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    return Starlette(
        routes=[
            Route("/v1/traces", traces, methods=any_method),
            Route("/v1/metrics", other_signal, methods=any_method),
            Route("/v1/logs", other_signal, methods=any_method),
            Route("/healthz", healthz),
            Route("/metrics", metrics),
        ]
    )


class HttpEdge:
    """The HTTP server of an application; ``port`` is known after ``start``."""

    def __init__(self, settings: ReceiverSettings, app: Starlette, intake: Intake) -> None:
        self.port = 0
        self._settings = settings
        self._app = app
        self._intake = intake
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen. Raises ReceiverError when the address cannot be had."""
        address = self._settings.http
        assert address is not None
        host, port = split_address("http", address)
        tls = self._settings.tls
        try:
            listening = _listen(host, port)
            config = uvicorn.Config(
                self._app,
                http=_protocol(self._intake, address, self._settings.grpc),
                lifespan="off",
                log_config=None,
                access_log=False,
                ws="none",
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
                ssl_certfile=tls.certificate if tls else None,
                ssl_keyfile=tls.key if tls else None,
            )
            config.load()
        except OSError as error:
            raise ReceiverError(f"--http {address}: {error}; free the port or choose another") from error
        self.port = listening.getsockname()[1]
        self._server = _Server(config)
        self._task = asyncio.create_task(self._server.serve(sockets=[listening]))
        while not self._server.started and not self._task.done():
            await asyncio.sleep(0.005)
        if self._task.done():
            await self._task

    async def stop(self) -> None:
        """Take no more requests; those in flight have some seconds to end."""
        if self._server is not None and self._task is not None:
            self._server.should_exit = True
            await self._task


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: whoever started the edge stops it."""

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield


def _protocol(intake: Intake, http: str, grpc: str | None) -> type[asyncio.Protocol]:
    """HTTP/1.1 that knows a gRPC client when it meets one: a vLLM that was given this address and not the protocol."""
    message = (
        f"somebody speaks gRPC to --http {http}, and their spans are lost: start vLLM with "
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf"
        + (f", or with --otlp-traces-endpoint grpc://{grpc}" if grpc else "")
    )
    said = False

    class Protocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]  # a name for one of two classes
        def data_received(self, data: bytes) -> None:
            nonlocal said
            if not data.startswith(_HTTP_2_PREFACE):
                super().data_received(data)
                return
            intake.count_refused(Unusable(GRPC_ON_HTTP_PORT, message), "http_protobuf")
            if not said:
                _log.warning("%s", message)
                said = True
            self.send_400_response("this port speaks HTTP/1.1; send gRPC to the other one")

    return Protocol


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except BaseException:
        listening.close()
        raise
    return listening


async def _body(request: Request, content_type: str, limits: Limits, intake: Intake) -> bytes:
    if content_type not in (PROTOBUF, JSON):
        raise _Refusal(
            415,
            rpc.INVALID_ARGUMENT,
            f"content type {content_type or 'missing'} is not taken; send {PROTOBUF} or {JSON}",
            "content_type",
        )
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("gzip", "identity"):
        raise _Refusal(
            415,
            rpc.INVALID_ARGUMENT,
            f"content encoding {encoding} is not taken; send gzip or none",
            "content_encoding",
        )
    too_large = _Refusal(
        413,
        rpc.INVALID_ARGUMENT,
        f"the body is over {limits.body_bytes} bytes; send smaller batches",
        "body_too_large",
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > limits.body_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                crowded = intake.crowded(len(chunk))
                if crowded is not None:
                    raise _Crowded(crowded)
                size += len(chunk)
                intake.reading(len(chunk))
                if size > limits.body_bytes:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError as error:
        message = f"the body was not here after {limits.body_seconds:g} s; send smaller batches"
        raise _Refusal(408, rpc.DEADLINE_EXCEEDED, message, "body_too_slow") from error
    finally:
        intake.reading(-size)
    body = b"".join(chunks)
    if encoding == "identity":
        return body
    try:
        return await unzip(body, limits.body_bytes)
    except TooLargeError as error:
        raise _Refusal(413, rpc.INVALID_ARGUMENT, str(error), "decompressed_too_large") from error
    except ValueError as error:
        raise _Refusal(400, rpc.INVALID_ARGUMENT, str(error), "bad_gzip") from error


def _reply(content_type: str, http: int, message: Message, headers: dict[str, str] | None = None) -> Response:
    if content_type == PROTOBUF:
        return Response(message.SerializeToString(), http, headers, PROTOBUF)
    return JSONResponse(MessageToDict(message), http, headers)


def _refused(content_type: str, refusal: _Refusal, headers: dict[str, str] | None = None) -> Response:
    return _reply(content_type, refusal.http, rpc.status(refusal.code, refusal.message), headers)


def _pushed_back(content_type: str, outcome: PushedBack) -> Response:
    stopping = outcome.cause == STOPPING
    code = rpc.UNAVAILABLE if stopping else rpc.RESOURCE_EXHAUSTED
    message = rpc.status(code, f"{outcome.cause}: {outcome.message}", outcome.retry_seconds)
    return _reply(
        content_type, 503 if stopping else 429, message, {"Retry-After": str(math.ceil(outcome.retry_seconds))}
    )
