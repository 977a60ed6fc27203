"""ASGI middleware: what only the HTTP edge of an API server knows of a request.

``--middleware vllm_slo.exporters.probe.edge.Middleware``. Pure ASGI: messages pass one by one as they come, so a
stream stays a stream, and a client's disconnection reaches vLLM by the same ``receive``. WebSockets and every path
outside ROUTES (health, metrics, models, administration) pass untouched.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from vllm_slo.exporters.probe import link as links
from vllm_slo.exporters.probe.guard import guarded
from vllm_slo.exporters.probe.http_request import HttpRequest

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

ROUTES: frozenset[str] = frozenset(
    {
        "/classify",
        "/cohere/v2/chat",
        "/generative_scoring",
        "/inference/v1/generate",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/v1/audio/transcriptions",
        "/v1/audio/translations",
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/decisions",
        "/v1/embeddings",
        "/v1/messages",
        "/v1/rerank",
        "/v1/responses",
        "/v1/score",
        "/v1/systemone",
        "/v2/embed",
        "/v2/rerank",
    }
)
"""Paths whose POST asks for inference, in vLLM 0.29 to 0.33; those that only render or tokenise are none."""

LONGEST_REQUEST_ID = 256
STREAM_ERROR = re.compile(rb'^data: \{"error": ?\{.*"code": ?(\d{3})\b', re.DOTALL)
"""How vLLM tells an error in a stream whose status 200 has been sent already."""
LONGEST_ERROR = 8192


class Middleware:
    """Wraps vLLM's application. Does nothing while the probe is off."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._off = False
        self._begin = guarded("edge.begin", _begin, self._switch_off)
        self._sending = guarded("edge.sending", _sending, self._switch_off)
        self._ended = guarded("edge.ended", _ended, self._switch_off)

    def _switch_off(self) -> None:
        """With one hook gone the others would tell half the truth."""
        self._off = True

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        front = links.active()
        if front is None or self._off or scope["type"] != "http":
            return self._app(scope, receive, send)
        http = self._begin(scope, front)
        if http is None:
            return self._app(scope, receive, send)
        return self._observed(scope, receive, send, http, front)

    async def _observed(
        self, scope: Scope, receive: Receive, send: Send, http: HttpRequest, front: links.Front
    ) -> None:
        sending = self._sending

        async def watched_receive() -> Message:
            message = await receive()
            # Servers also say so once the response is complete.
            if message["type"] == "http.disconnect" and not http.complete:
                _gone(http)
            return message

        async def watched_send(message: Message) -> None:
            # Nothing to note of a further piece of a stream.
            noted = not (http.first_byte_ns and message.get("more_body"))
            if noted:
                sending(http, message)
            try:
                await send(message)
            except OSError:
                _gone(http)
                raise
            if noted and http.complete and not http.end_ns:
                http.end_ns = time.monotonic_ns()

        token = links.CURRENT.set(http)
        try:
            await self._app(scope, watched_receive, watched_send)
        except Exception:
            if not http.complete and not http.client_disconnected:
                # vLLM's handlers run inside; what comes this far is answered with 500, unless the response had begun.
                http.broken = True
                http.status = http.status or 500
            raise
        except BaseException:
            if not http.complete:
                _gone(http)
            raise
        finally:
            links.CURRENT.reset(token)
            self._ended(http, front)


def _path(scope: Scope) -> str:
    path, root = str(scope["path"]), scope.get("root_path") or ""
    return path.removeprefix(root) if root else path


def _begin(scope: Scope, front: links.Front) -> HttpRequest | None:
    """The record of a request for inference; null for every other one."""
    if scope["method"] != "POST":
        return None
    path = _path(scope)
    if path not in ROUTES:
        return None
    request_id = tenant = None
    trace_headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            request_id = value.decode("latin-1")[:LONGEST_REQUEST_ID]
        elif name == front.tenant_header:
            tenant = front.tenant(value)
        elif name in (b"traceparent", b"tracestate"):
            trace_headers[name.decode()] = value.decode("latin-1")
    return HttpRequest(path, request_id, tenant, trace_headers or None)


def _gone(http: HttpRequest) -> None:
    if not http.client_disconnected and not http.end_ns:
        http.client_disconnected = True
        http.end_ns = time.monotonic_ns()


def _sending(http: HttpRequest, message: Message) -> None:
    """Notes the status, the first byte and the end; what is sent after a disconnection no client has seen."""
    if http.client_disconnected:
        return
    if message["type"] == "http.response.start":
        http.status = message["status"]
    elif message["type"] == "http.response.body":
        body = message.get("body", b"")
        if body and not http.first_byte_ns:
            http.first_byte_ns = time.monotonic_ns()
            if not http.linked and http.status == 200 and (found := STREAM_ERROR.match(body[:LONGEST_ERROR])):
                http.stream_error = int(found.group(1))
        http.complete = not message.get("more_body", False)


def _ended(http: HttpRequest, front: links.Front) -> None:
    if not http.end_ns:
        http.end_ns = time.monotonic_ns()
    front.link.http_ended(http)
