"""The middleware on a real uvicorn, before an application that does what vLLM's does."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket

from vllm_slo.exporters.probe import edge, link
from vllm_slo.exporters.probe.guard import OFF_AFTER
from vllm_slo.exporters.probe.http_request import HttpRequest
from vllm_slo.exporters.probe.link import CURRENT, Front, Link
from vllm_slo.exporters.probe.spans import SpanData
from vllm_slo.exporters.probe.tenant import tenant_of

ROUTE = "/v1/completions"


class EngineRequest:
    """What the front end's hook would link."""

    def __init__(self) -> None:
        self.http: HttpRequest | None = None
        self.ended = False
        self.sent = False

    def span(self) -> SpanData:
        raise NotImplementedError


class Served:
    """A server whose application streams, waits and fails on request; ``records`` is what the middleware sent."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.link = Link(self.records.append)
        self.front = Front(self.link, self.records.append, b"x-tenant", lambda value: tenant_of(value, hashed=False))
        self.contexts: list[HttpRequest | None] = []
        self.release = threading.Event()
        self.url = ""

    async def inference(self, request: Request) -> Response:
        """The body tells what to do."""
        body = await request.json()
        self.contexts.append(CURRENT.get())
        if "status" in body:
            return JSONResponse({"error": {"code": body["status"]}}, status_code=body["status"])
        if body.get("raise") == "http":
            raise HTTPException(404, "no such model")
        if body.get("raise"):
            raise RuntimeError("the application fails")
        if body.get("wait"):
            return await self._until_disconnected(request)
        side = None if body.get("unlinked") else EngineRequest()
        if side is not None:
            self.link.engine_started(side)
        if body.get("stream"):
            return StreamingResponse(self._pieces(body, side), media_type="text/event-stream")
        if side is not None:
            self.link.engine_ended(side)
        return JSONResponse({"choices": []})

    async def _pieces(self, body: dict[str, Any], side: EngineRequest | None) -> AsyncIterator[bytes]:
        try:
            yield body.get("first", "data: 0\n\n").encode()
            for number in range(1, body["stream"]):
                if body.get("held"):
                    while not self.release.is_set():
                        await asyncio.sleep(0.005)
                if body.get("breaks") == number:
                    raise RuntimeError("in the middle of a stream")
                yield b"data: %d\n\n" % number
        finally:
            if side is not None:
                self.link.engine_ended(side)

    async def _until_disconnected(self, request: Request) -> Response:
        """As vLLM's with_cancellation: ends, with an answer that nobody reads, when the client has gone."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        return JSONResponse(None)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Serves on a port of its own."""

        async def echo(websocket: WebSocket) -> None:
            self.contexts.append(CURRENT.get())
            await websocket.accept()
            await websocket.send_text(await websocket.receive_text())
            await websocket.close()

        async def health(request: Request) -> Response:
            self.contexts.append(CURRENT.get())
            return PlainTextResponse("well")

        app = Starlette(
            routes=[
                Route(ROUTE, self.inference, methods=["POST", "GET"]),
                Route("/health", health),
                Route("/tokenize", health, methods=["POST"]),
                WebSocketRoute("/v1/realtime", echo),
            ]
        )
        app.add_middleware(edge.Middleware)
        listener = socket.create_server(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", ws="none"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        link.activate(self.front)
        try:
            yield
        finally:
            link.activate(None)
            server.should_exit = True
            thread.join(20)
            listener.close()

    def post(self, timeout: float = 10, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        return httpx.post(self.url + ROUTE, json=body, headers=headers, timeout=timeout)

    def record(self) -> Any:
        """The next record, and that there is only one."""
        deadline = time.monotonic() + 5
        while not self.records and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.05)
        assert len(self.records) == 1
        return self.records.pop()


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    with served.running():
        yield served


def columns(http: HttpRequest) -> dict[str, Any]:
    return {name.removeprefix("vllm_slo."): value for name, value in http.span().attributes.items()}


def test_a_request_that_reached_the_engine_carries_the_http_side(served: Served) -> None:
    assert served.post(headers={"X-Tenant": "blue", "X-Request-Id": "abc"}).status_code == 200
    side = served.record()
    assert isinstance(side, EngineRequest)
    assert side.http is not None
    found = side.http.attributes()
    assert found["vllm_slo.http_status"] == 200
    assert found["vllm_slo.http_route"] == ROUTE
    assert found["vllm_slo.tenant"] == "blue"
    assert found["vllm_slo.client_disconnected"] is False
    assert 0 < found["vllm_slo.time_to_first_byte_nanoseconds"] <= found["vllm_slo.http_duration_nanoseconds"]


def test_pieces_of_a_stream_arrive_as_they_are_made_and_the_first_byte_is_timed(served: Served) -> None:
    started = time.monotonic()
    with httpx.stream("POST", served.url + ROUTE, json={"stream": 3, "held": True}, timeout=10) as response:
        pieces = response.iter_raw()
        assert next(pieces) == b"data: 0\n\n", "the first piece comes while the second is held back"
        first_byte = time.monotonic() - started
        time.sleep(0.2)
        served.release.set()
        assert b"".join(pieces) == b"data: 1\n\ndata: 2\n\n"
        last_byte = time.monotonic() - started
    http = served.record().http
    assert 0 < (http.first_byte_ns - http.began_ns) / 1e9 <= first_byte
    assert 0.2 <= (http.end_ns - http.began_ns) / 1e9 <= last_byte + 0.05
    assert not http.client_disconnected


@pytest.mark.parametrize(
    ("status", "outcome", "error"),
    [(400, "invalid", False), (404, "invalid", False), (429, "rejected", False), (503, "rejected", True)],
)
def test_a_refused_request_is_a_record_of_its_own(served: Served, status: int, outcome: str, error: bool) -> None:
    traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"X-Request-Id": "mine", "X-Tenant": "blue", "traceparent": traceparent}
    assert served.post(status=status, headers=headers).status_code == status
    http = served.record()
    span = http.span()
    found = columns(http)
    assert span.name == "vllm_slo.edge_request"
    assert (found["http_status"], found["finish_reason"], found["tenant"]) == (status, outcome, "blue")
    assert span.attributes["gen_ai.request.id"] == "mine"
    assert span.error is error
    assert span.trace_headers == {"traceparent": traceparent}
    assert abs(span.start_ns / 1e9 - time.time()) < 10
    assert span.end_ns > span.start_ns


def test_a_request_without_an_id_gets_one_of_its_own(served: Served) -> None:
    ids = []
    for _ in range(3):
        served.post(status=400)
        ids.append(served.record().request_id)
    assert len(set(ids)) == 3
    assert all(name.startswith("edge-") for name in ids)


def test_a_record_that_is_sent_again_has_the_same_ids_and_a_request_that_is_sent_again_has_others(
    served: Served,
) -> None:
    origins = []
    for _ in range(2):
        served.post(status=503, headers={"X-Request-Id": "same"})
        http = served.record()
        assert http.span() == http.span()
        origins.append(http.span().engine_request_id)
    assert None not in origins
    assert len(set(origins)) == 2


def test_what_the_application_raises_passes_through_and_counts_as_failed(served: Served) -> None:
    assert served.post(**{"raise": "any"}).status_code == 500
    found = columns(served.record())
    assert (found["http_status"], found["finish_reason"]) == (500, "failed")
    assert served.post(**{"raise": "http"}).status_code == 404
    assert columns(served.record())["finish_reason"] == "invalid"


def test_a_stream_that_breaks_is_an_error_with_the_status_that_was_sent(served: Served) -> None:
    with pytest.raises(httpx.RemoteProtocolError):
        served.post(stream=3, breaks=1)
    http = served.record().http
    assert (http.status, http.error, http.client_disconnected) == (200, True, False)


@pytest.mark.parametrize(("code", "outcome"), [(503, "rejected"), (400, "invalid"), (500, "failed")])
def test_an_error_as_first_event_of_a_stream_counts_although_its_status_is_200(
    served: Served, code: int, outcome: str
) -> None:
    first = f'data: {{"error": {{"message": "full", "type": "x", "param": null, "code": {code}}}}}\n\n'
    assert served.post(stream=1, first=first, unlinked=True).status_code == 200
    found = columns(served.record())
    assert (found["http_status"], found["finish_reason"]) == (200, outcome)


def test_a_client_that_leaves_in_the_middle_of_a_stream_is_seen(served: Served) -> None:
    with httpx.stream("POST", served.url + ROUTE, json={"stream": 3, "held": True}, timeout=10) as response:
        pieces = response.iter_raw()
        assert next(pieces)
        time.sleep(0.1)
    http = served.record().http
    assert http.client_disconnected
    assert http.status == 200
    assert 0.1 <= (http.end_ns - http.began_ns) / 1e9 < 2


def test_a_client_that_leaves_before_any_answer_is_an_abort_without_a_status(served: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        served.post(wait=True, timeout=0.3)
    found = columns(served.record())
    assert found["finish_reason"] == "abort"
    assert found["client_disconnected"] is True
    assert "http_status" not in found, "what the application answers after that no client has seen"


def test_other_paths_and_methods_are_no_requests(served: Served) -> None:
    assert httpx.get(served.url + "/health").text == "well"
    assert httpx.post(served.url + "/tokenize", json={}).text == "well"
    assert served.contexts == [None, None]
    assert httpx.post(served.url + "/v1/nothing", json={}).status_code == 404
    time.sleep(0.1)
    assert served.records == []


def test_without_the_probe_requests_pass_untouched(served: Served) -> None:
    link.activate(None)
    assert served.post().status_code == 200
    assert served.contexts == [None]


def test_a_failing_hook_never_reaches_the_client(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("a fault of the probe")

    monkeypatch.setattr(edge.HttpRequest, "__init__", broken)
    assert served.post().status_code == 200
    monkeypatch.undo()
    monkeypatch.setattr(served.link, "http_ended", broken)
    assert served.post(stream=5).text.count("data") == 5
    assert served.post().status_code == 200


def test_a_hook_that_keeps_failing_ends_the_middleware_and_not_the_server(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*arguments: object) -> None:
        raise RuntimeError("a fault of the probe")

    monkeypatch.setattr(served.link, "http_ended", broken)
    for _ in range(OFF_AFTER):
        assert served.post(status=400).status_code == 400
        assert served.contexts.pop() is not None
    monkeypatch.undo()
    assert served.post(status=400).status_code == 400
    assert served.contexts == [None]
    assert served.records == []


def call(app: edge.App, scope: dict[str, Any], messages: list[edge.Message]) -> list[edge.Message]:
    """Runs one ASGI call; what was sent."""
    sent: list[edge.Message] = []

    async def receive() -> edge.Message:
        return messages.pop(0)

    async def send(message: edge.Message) -> None:
        sent.append(message)

    asyncio.run(edge.Middleware(app)(scope, receive, send))  # type: ignore[arg-type]
    return sent


@pytest.fixture
def active() -> Iterator[Served]:
    served = Served()
    link.activate(served.front)
    yield served
    link.activate(None)


def test_a_websocket_gets_the_very_same_callables(active: Served) -> None:
    seen: list[tuple[Any, ...]] = []

    async def app(*arguments: Any) -> None:
        seen.append(arguments)

    scope = {"type": "websocket", "path": "/v1/realtime", "headers": []}
    arguments = (scope, object(), object())
    asyncio.run(edge.Middleware(app)(*arguments))  # type: ignore[arg-type]
    assert seen == [arguments]


def test_messages_pass_as_the_very_same_objects(active: Served) -> None:
    messages: list[edge.Message] = [
        {"type": "http.response.start", "status": 200, "headers": []},
        {"type": "http.response.body", "body": b"a", "more_body": True},
        {"type": "http.response.body", "body": b"b", "more_body": True},
        {"type": "http.response.body", "body": b"", "more_body": False},
    ]

    async def app(scope: edge.Scope, receive: edge.Receive, send: edge.Send) -> None:
        for message in messages:
            await send(message)

    sent = call(app, {"type": "http", "method": "POST", "path": ROUTE, "headers": []}, [])
    assert all(one is other for one, other in zip(sent, messages, strict=True))


def test_a_root_path_in_front_of_the_route_is_no_obstacle(active: Served) -> None:
    async def app(scope: edge.Scope, receive: edge.Receive, send: edge.Send) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"full"})

    call(app, {"type": "http", "method": "POST", "path": "/llm" + ROUTE, "root_path": "/llm", "headers": []}, [])
    assert active.records[0].route == ROUTE


def test_a_disconnection_that_a_server_reports_after_the_last_byte_is_none(active: Served) -> None:
    async def app(scope: edge.Scope, receive: edge.Receive, send: edge.Send) -> None:
        await send({"type": "http.response.start", "status": 400, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})
        await receive()

    call(app, {"type": "http", "method": "POST", "path": ROUTE, "headers": []}, [{"type": "http.disconnect"}])
    assert not active.records[0].client_disconnected


def test_a_send_that_fails_because_the_client_has_gone_is_a_disconnection(active: Served) -> None:
    side = EngineRequest()

    async def app(scope: edge.Scope, receive: edge.Receive, send: edge.Send) -> None:
        active.link.engine_started(side)
        active.link.engine_ended(side)
        await send({"type": "http.response.start", "status": 200, "headers": []})

    async def send(message: edge.Message) -> None:
        raise BrokenPipeError

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": ROUTE, "headers": []}
        await edge.Middleware(app)(scope, send, send)  # type: ignore[arg-type]

    with pytest.raises(BrokenPipeError):
        asyncio.run(run())
    assert active.records == [side]
    assert side.http is not None
    assert side.http.client_disconnected
    assert not side.http.error


def test_a_cancelled_request_is_a_disconnection_and_stays_cancelled(active: Served) -> None:
    side = EngineRequest()

    async def app(scope: edge.Scope, receive: edge.Receive, send: edge.Send) -> None:
        active.link.engine_started(side)
        try:
            await asyncio.sleep(60)
        finally:
            active.link.engine_ended(side)

    async def run() -> None:
        scope = {"type": "http", "method": "POST", "path": ROUTE, "headers": []}
        task = asyncio.ensure_future(edge.Middleware(app)(scope, app, app))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert active.records == [side]
    assert side.http is not None
    assert side.http.client_disconnected
