"""Clients of every kind that an API server meets, and what each of them saw."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from e2e.vllm_server import MODEL_NAME

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True)
class Call:
    """One HTTP request. Its client may go away: after so many pieces of the answer's body; so many seconds after the
    server has the request; when all others have ended.
    """

    name: str
    route: str
    body: dict[str, Any]
    leave_after_pieces: int | None = None
    leave_after_seconds: float | None = None
    leave_last: bool = False
    tenant: str = "blue"


@dataclass
class Seen:
    """What the client saw; seconds from the moment it sent the request.

    ``scheduling_seconds``: for how long client and server waited for a core until the first byte, where that is known.
    """

    call: Call
    status: int | None = None
    reasons: list[str] = field(default_factory=list)
    first_byte_seconds: float | None = None
    duration_seconds: float = 0.0
    scheduling_seconds: float = 0.0
    left: bool = False
    stream_error: int | None = None

    def note(self, body: bytes) -> None:
        """Takes finish reasons, or the error in a stream, from the whole body."""
        if self.status != 200:
            return
        lines = [line[6:] for line in body.splitlines() if line.startswith(b"data: {")]
        for answer in map(json.loads, lines if self.call.body.get("stream") else [body]):
            self.reasons += [choice["finish_reason"] for choice in answer.get("choices", ()) if choice["finish_reason"]]
            if "error" in answer:
                self.stream_error = answer["error"]["code"]

    @property
    def answer(self) -> int | None:
        """The status, or the code of an error that came in a stream after its status."""
        return self.stream_error or self.status

    @property
    def outcomes(self) -> list[str]:
        """Sorted finish reasons that the records of this request must have, one a record."""
        if self.left:
            return ["abort"] * int(self.call.body.get("n", 1))
        if self.answer == 200:
            return sorted(self.reasons)
        return ["rejected"] if self.answer in (429, 503) else ["invalid"]


def completion(name: str, tokens: int, output: int, draw: int, **more: Any) -> Call:
    """A completion of random token ids that ends at its limit."""
    prompt = random.Random(draw).choices(range(3, 1024), k=tokens)
    own = {key: more.pop(key) for key in CALL if key in more}
    body = {"prompt": prompt, "max_tokens": output, "ignore_eos": True, "temperature": 0.0, **more}
    return Call(name, COMPLETIONS, {"model": MODEL_NAME, **body}, **own)


def chat(name: str, words: str, output: int, **more: Any) -> Call:
    """A chat that ends at its limit."""
    own = {key: more.pop(key) for key in CALL if key in more}
    messages = [{"role": "user", "content": words}]
    body = {"messages": messages, "max_tokens": output, "ignore_eos": True, "temperature": 0.0, **more}
    return Call(name, CHAT, {"model": MODEL_NAME, "chat_template": TEMPLATE, **body}, **own)


CALL = ("leave_after_pieces", "leave_after_seconds", "leave_last", "tenant")
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def send(url: str, calls: Sequence[Call], at_once: int, spread_seconds: float = 0.0) -> list[Seen]:
    """Sends every call, so many at a time, the first ones spread over some seconds; returns when all have ended."""
    return asyncio.run(_send(url, calls, at_once, spread_seconds))


def send_alone(url: str, calls: Sequence[Call], server_process: int) -> list[Seen]:
    """Sends streamed calls one at a time over connections that stand already; the client does nothing else."""
    address = urlsplit(url)
    assert address.hostname is not None
    found = []
    for call in calls:
        connection = HTTPConnection(address.hostname, address.port, timeout=60)
        connection.connect()
        seen, body = Seen(call), json.dumps(call.body)
        waited, started = _waited(server_process), time.monotonic()
        connection.request("POST", call.route, body, _headers(call))
        response = connection.getresponse()
        first = response.read(1)
        seen.first_byte_seconds = time.monotonic() - started
        seen.scheduling_seconds = _waited(server_process) - waited
        seen.status = response.status
        seen.note(first + response.read())
        seen.duration_seconds = time.monotonic() - started
        connection.close()
        found.append(seen)
    return found


def _waited(process: int) -> float:
    """Seconds for which the main threads of that process and of this one have waited for a core, so far."""
    # https://docs.kernel.org/scheduler/sched-stats.html: the second number.
    stats = (Path(f"/proc/{each}/schedstat").read_text().split() for each in (process, os.getpid()))
    return sum(int(numbers[1]) for numbers in stats) / 1e9


def _headers(call: Call) -> dict[str, str]:
    return {"X-Request-Id": call.name, "X-Tenant": call.tenant, "Content-Type": "application/json"}


async def _send(url: str, calls: Sequence[Call], at_once: int, spread_seconds: float) -> list[Seen]:
    limit, others = asyncio.Semaphore(at_once), asyncio.Event()
    going = sum(not call.leave_last for call in calls)
    # A connection per request: one that goes away must not take another's with it.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)

    async def one(client: httpx.AsyncClient, index: int, call: Call) -> Seen:
        nonlocal going
        await asyncio.sleep(spread_seconds * index / len(calls))
        async with limit:
            seen = await _call(client, url, call, others)
        going -= not call.leave_last
        if not going:
            others.set()
        return seen

    async with httpx.AsyncClient(timeout=300, limits=limits, trust_env=False) as client:
        return await asyncio.gather(*(one(client, index, call) for index, call in enumerate(calls)))


async def _call(client: httpx.AsyncClient, url: str, call: Call, others: asyncio.Event) -> Seen:
    seen, started, there = Seen(call), time.monotonic(), asyncio.Event()
    reading = asyncio.create_task(_read(client, url, call, seen, started, there))
    if call.leave_last or call.leave_after_seconds is not None:
        await there.wait()
        going = asyncio.create_task(others.wait() if call.leave_last else asyncio.sleep(call.leave_after_seconds or 0))
        await asyncio.wait([reading, going], return_when=asyncio.FIRST_COMPLETED)
        going.cancel()
        seen.left = not reading.done()
        if seen.left:
            reading.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await reading
    seen.duration_seconds = time.monotonic() - started
    return seen


async def _read(
    client: httpx.AsyncClient, url: str, call: Call, seen: Seen, started: float, there: asyncio.Event
) -> None:
    """``there`` is set when the server has the request: it answers, or all of it is sent and the answer comes last."""

    async def trace(event: str, info: object) -> None:
        if event == "http11.send_request_body.complete" and not call.body.get("stream"):
            there.set()

    body, pieces, extensions = json.dumps(call.body), list[bytes](), {"trace": trace}
    request = client.stream("POST", url + call.route, content=body, headers=_headers(call), extensions=extensions)
    try:
        async with request as response:
            there.set()
            seen.status = response.status_code
            async for piece in response.aiter_raw():
                if seen.first_byte_seconds is None:
                    seen.first_byte_seconds = time.monotonic() - started
                pieces.append(piece)
                if call.leave_after_pieces is not None and len(pieces) >= call.leave_after_pieces:
                    seen.left = True
                    return
        seen.note(b"".join(pieces))
    finally:
        there.set()
