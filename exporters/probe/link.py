"""Joins what the HTTP side and the engine side know of a request, and sends the record when both are known.

The middleware sets ``CURRENT`` in the task that runs the handler; tasks that the handler starts inherit it, so the hook
on ``OutputProcessor.add_request`` finds it for completions, chat, n > 1, batches of prompts, streamed or not. A record
waits for the later of its two ends, at most ``WAIT_SECONDS`` after the earlier one. Without the middleware it never
waits. Everything here runs in the event loop's thread of one API server.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

from vllm_slo.exporters.probe.http_request import HttpRequest
from vllm_slo.exporters.probe.outbox import Record

WAIT_SECONDS = 2.0
"""Shorter than the time for which the lake holds the engine's record of the same request back to merge them."""
LIMIT = 10_000
"""Records that may wait at once; beyond that the oldest is sent as it is."""

CURRENT: ContextVar[HttpRequest | None] = ContextVar("vllm_slo_http_request", default=None)


class EngineSide(Record, Protocol):
    """One engine request as this process sees it."""

    http: HttpRequest | None
    ended: bool
    sent: bool


Later = Callable[[float, Callable[[], None]], object]
"""Calls back after so many seconds, in this thread."""


def _later(seconds: float, callback: Callable[[], None]) -> object:
    return asyncio.get_running_loop().call_later(seconds, callback)


class Link:
    """What waits for its other side. ``put`` takes every finished record and never blocks."""

    def __init__(
        self,
        put: Callable[[Record], None],
        later: Later = _later,
        clock: Callable[[], float] = time.monotonic,
        limit: int = LIMIT,
    ) -> None:
        self._put = put
        self._later = later
        self._clock = clock
        self._limit = limit
        self._waiting: deque[tuple[float, EngineSide | HttpRequest]] = deque()
        self._timed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def engine_started(self, side: EngineSide) -> None:
        """Links the engine request to the HTTP request in whose task this runs, if there is one."""
        http = CURRENT.get()
        if http is None:
            return
        side.http = http
        http.linked = True
        if not http.ended:
            http.engine_sides.append(side)

    def engine_ended(self, side: EngineSide) -> None:
        """The engine side is complete: sent now, unless its HTTP response still runs."""
        side.ended = True
        if side.http is None or side.http.ended:
            self._send(side)
        else:
            self._wait(side)

    def http_ended(self, http: HttpRequest) -> None:
        """The response has ended or its client has gone: sends what waited for it.

        A refusal is sent at once. Whether one without a link and without a refusal reached the engine shows a little
        later: a background response starts its engine request after its HTTP response.
        """
        http.ended = True
        sides = http.engine_sides
        http.engine_sides = []
        for side in sides:
            if side.ended and not side.sent:
                self._send(side)
        if http.linked:
            return
        if http.refused:
            self._send(http)
        else:
            self._wait(http)

    def flush(self) -> None:
        """Sends everything that waits, complete or not; for the end of the process."""
        while self._waiting:
            self._expire()

    def _send(self, record: EngineSide | HttpRequest) -> None:
        record.sent = True
        self._put(record)

    def _wait(self, record: EngineSide | HttpRequest) -> None:
        if len(self._waiting) >= self._limit:
            self._expire()
        self._waiting.append((self._clock() + WAIT_SECONDS, record))
        if not self._timed:
            self._timed = True
            self._later(WAIT_SECONDS, self._sweep)

    def _expire(self) -> None:
        record = self._waiting.popleft()[1]
        if record.sent:
            return
        if isinstance(record, HttpRequest) and (record.linked or record.outcome() is None):
            return
        self._send(record)

    def _sweep(self) -> None:
        """Runs once for all that wait: one timer, however many requests."""
        now = self._clock()
        while self._waiting and (self._waiting[0][0] <= now or self._waiting[0][1].sent):
            self._expire()
        self._timed = bool(self._waiting)
        if self._timed:
            self._later(self._waiting[0][0] - now, self._sweep)


@dataclass(frozen=True)
class Front:
    """What the parts in one API server share: vLLM makes the middleware and the stat logger itself, without arguments.

    ``put`` takes records that wait for nothing. ``tenant_header`` is in lower case; null: nobody reads tenants.
    """

    link: Link
    put: Callable[[Record], None]
    tenant_header: bytes | None
    tenant: Callable[[bytes], str | None]


_active: list[Front] = []


def active() -> Front | None:
    """The running front-end part of this process; null while the probe is off."""
    return _active[-1] if _active else None


def activate(front: Front | None) -> None:
    """Sets what ``active`` returns."""
    _active[:] = [] if front is None else [front]
