"""The edge that reads vLLM servers' ``/metrics`` every few seconds and hands rows and events to a callback."""

from __future__ import annotations

import asyncio
import logging
import math
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pyarrow as pa

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.schema import ENGINE_SAMPLES
from vllm_slo.exporters.vllm.changes import Event, Seen, observe
from vllm_slo.exporters.vllm.metrics import Target, read
from vllm_slo.exporters.vllm.recorded import pages

Sink = Callable[[pa.Table, list[Event]], None]
"""Takes one batch: rows of ENGINE_SAMPLES and rows of EVENTS. Called in a worker thread, one call at a time.

When it raises, the very same batch (the same objects) is handed over again later: a sink that may have stored part of
it before it failed tells a repetition by identity.
"""
Clock = Callable[[], datetime]

INTERVAL_SECONDS = 5.0
FLUSH_SECONDS = 10.0
TIMEOUT_SECONDS = 4.0
PAGE_BYTES = 64 * 2**20
"""A page beyond this is an error: a vLLM page has 50 to 500 kB."""
BUFFERED_ROWS = 100_000
"""Rows kept while the sink fails (a day of 5-second scrapes of 6 engines); beyond it the oldest batches go, counted."""

_FILE = "file://"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TargetState:
    """How scraping one target goes.

    ``last_error`` stays after the target works again, with its time in ``last_failure``; ``failing`` is about now.
    ``warning`` says what a page that could be read lacks. ``clock_offset_seconds`` is the server's clock minus ours.
    """

    target: Target
    successes: int = 0
    failures: int = 0
    last_success: datetime | None = None
    last_failure: datetime | None = None
    last_error: str | None = None
    failing: bool = False
    warning: str | None = None
    bad_lines: int = 0
    first_bad_line: str | None = None
    vllm_version: str | None = None
    process_start: datetime | None = None
    clock_offset_seconds: float | None = None
    seen: Seen | None = None
    read_until: datetime | None = None
    """The moment of the latest saved page, for a target that is a file or a folder."""


def parse_target(text: str) -> Target:
    """A target as written on the command line: ``URL``, ``URL=INSTANCE``, ``URL=INSTANCE@SHARD`` or ``PATH=INSTANCE``.

    Without a path the page is ``/metrics``; without a scheme it is http. Without INSTANCE it is host:port.
    PATH begins with ``/`` or ``.`` and is a page that something else keeps writing, or a folder of such pages.
    Raises SloError.

    >>> parse_target("localhost:8000=general-0@general")
    Target(url='http://localhost:8000/metrics', instance='general-0', shard='general')
    """
    address, _, name = text.strip().partition("=")
    instance, _, shard = name.partition("@")
    if address.startswith(("/", "./", "../")):
        if not instance:
            raise SloError(f"--scrape {text}: a saved page names no server; write PATH=INSTANCE")
        return Target(f"{_FILE}{Path(address).absolute()}", instance, shard or None)
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise SloError(f"--scrape {text}: {error}; write http://HOST:PORT=INSTANCE") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SloError(f"--scrape {text}: not an http or https address; write http://HOST:PORT=INSTANCE")
    host, _, group = parts.netloc.rpartition("@")
    if not name and ":" not in group and re.fullmatch(r"[^@:]+:\d+", host):
        raise SloError(f"--scrape {text}: @{group} follows no instance; write http://{host}=INSTANCE@{group}")
    if parts.query or parts.fragment:
        raise SloError(f"--scrape {text}: a metrics address has no query; write http://HOST:PORT=INSTANCE")
    path = parts.path.rstrip("/") or "/metrics"
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    default = f"{host}:{port or (443 if parts.scheme == 'https' else 80)}"
    return Target(parts._replace(path=path).geturl(), instance or default, shard or None)


def version_url(url: str) -> str:
    """The address of ``/version`` beside a metrics page.

    >>> version_url("http://a:8000/prefix/metrics")
    'http://a:8000/prefix/version'
    """
    parts = urlsplit(url)
    return parts._replace(path=parts.path.removesuffix("/metrics") + "/version").geturl()


def clock_offset_seconds(date_header: str | None, now: datetime) -> float | None:
    """The server's clock minus ours by an HTTP Date header, which has whole seconds; None without one."""
    try:
        told = datetime.strptime(date_header or "", "%a, %d %b %Y %H:%M:%S GMT").replace(tzinfo=UTC)
    except ValueError:
        return None
    return (told + timedelta(seconds=0.5) - now).total_seconds()


def utc_now() -> datetime:
    """The wall clock."""
    return datetime.now(UTC)


class Scraper:
    """Reads all targets, each on its own interval, and hands a batch to the sink about every ``flush_seconds``.

    A failing target or sink is counted and shown in ``states`` and ``sink_error``; nothing stops the loop but ``stop``.
    Of saved pages, those from after the scraper was made are taken, so that a restart reads none twice.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        *,
        client: httpx.AsyncClient,
        sink: Sink,
        clock: Clock = utc_now,
        interval_seconds: float = INTERVAL_SECONDS,
        flush_seconds: float = FLUSH_SECONDS,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> None:
        self._states = {target: TargetState(target) for target in targets}
        self._client = client
        self._sink = sink
        self._clock = clock
        self._interval = interval_seconds
        self._flush_every = flush_seconds
        self._timeout = timeout_seconds
        self._rows: list[pa.Table] = []
        self._events: list[Event] = []
        self._batches: list[tuple[pa.Table, list[Event]]] = []
        self._flushing = asyncio.Lock()
        self._made = clock()
        self.rows_delivered = 0
        self.rows_dropped = 0
        self.sink_failures = 0
        self.sink_error: str | None = None

    @property
    def states(self) -> tuple[TargetState, ...]:
        """How each target goes, in the order given."""
        return tuple(self._states.values())

    async def run(self, stop: asyncio.Event) -> None:
        """Scrape and deliver until ``stop`` is set; what is buffered then is delivered."""
        loops = [self._every(self._interval, partial(self.scrape, target), stop) for target in self._states]
        await asyncio.gather(*loops, self._every(self._flush_every, self.flush, stop, first=False))
        await self.flush()

    async def scrape(self, target: Target) -> bool:
        """Read one target once; False when that failed. What it gave waits in the buffer."""
        if target.url.startswith(_FILE):
            return await self._saved_pages(target)
        try:
            text, date = await self._page(target)
            now = self._clock()
            state = self._states[target]
            scrape = read(text, now, target, state.vllm_version)
            new = state.vllm_version is None or state.failing or scrape.process_start != state.process_start
            if new and scrape.page.vllm_samples:
                version = await self._version(target)
                scrape = read(text, now, target, version)
                state = replace(state, vllm_version=version, process_start=scrape.process_start)
            seen, events = observe(state.seen, scrape, now, target)
        except (httpx.HTTPError, httpx.InvalidURL, SloError, TimeoutError) as error:
            self._failed(target, f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)
            return False
        except Exception as error:  # noqa: BLE001 - one target's page must never end the scraping of the others
            _log.exception("scraping %s", target.url)
            self._failed(target, f"{type(error).__name__}: {error}")
            return False
        if state.failing:
            _log.warning("scraping %s (%s) works again", target.url, target.instance)
        empty = "the page has no vLLM series: --disable-log-stats is set, or this is not a vLLM"
        self._states[target] = replace(
            state,
            successes=state.successes + 1,
            last_success=now,
            warning=None if scrape.page.vllm_samples else empty,
            failing=False,
            bad_lines=state.bad_lines + scrape.page.bad_lines,
            first_bad_line=scrape.page.first_bad_line or state.first_bad_line,
            clock_offset_seconds=clock_offset_seconds(date, now),
            seen=seen,
        )
        if scrape.rows.num_rows:
            self._rows.append(scrape.rows)
        self._events += events
        return True

    async def _saved_pages(self, target: Target) -> bool:
        state = self._states[target]
        path, after = Path(target.url.removeprefix(_FILE)), state.read_until or self._made
        try:
            for when, text in await asyncio.to_thread(lambda: list(pages(path, after))):
                scrape = read(text, when, target)
                seen, events = observe(state.seen, scrape, when, target)
                state = replace(
                    state, seen=seen, read_until=when, successes=state.successes + 1, last_success=self._clock()
                )
                self._states[target] = state
                self._rows.append(scrape.rows)
                self._events += events
        except SloError as error:
            self._failed(target, str(error))
            return False
        except Exception as error:  # noqa: BLE001 - one target's page must never end the scraping of the others
            self._failed(target, f"{type(error).__name__}: {error}")
            return False
        waiting = "no page yet from after the start; `vllm-slo import` loads recordings"
        self._states[target] = replace(state, failing=False, warning=None if state.read_until else waiting)
        return True

    async def flush(self) -> bool:
        """Hand what is buffered to the sink, oldest batch first; False when it failed and the batch waits."""
        async with self._flushing:
            if self._rows or self._events:
                rows = pa.concat_tables(self._rows).combine_chunks() if self._rows else _no_rows()
                self._batches.append((rows, self._events))
                self._rows, self._events = [], []
            while self._batches:
                rows, events = self._batches[0]
                try:
                    await asyncio.to_thread(self._sink, rows, events)
                except Exception as error:  # noqa: BLE001 - a sink that fails must not end the scraping
                    self.sink_failures += 1
                    if self.sink_error is None:
                        _log.warning("engine samples cannot be stored, kept for a retry: %s", error)
                    self.sink_error = f"{type(error).__name__}: {error}"
                    self._forget_oldest()
                    return False
                self._batches.pop(0)
                self.rows_delivered += rows.num_rows
            self.sink_error = None
            return True

    def _forget_oldest(self) -> None:
        while len(self._batches) > 1 and sum(rows.num_rows for rows, _ in self._batches) > BUFFERED_ROWS:
            rows, _ = self._batches.pop(0)
            self.rows_dropped += rows.num_rows

    def _failed(self, target: Target, error: str) -> None:
        state = self._states[target]
        if not state.failing:
            _log.warning("scraping %s (%s): %s", target.url, target.instance, error)
        self._states[target] = replace(
            state, failures=state.failures + 1, last_failure=self._clock(), last_error=error, failing=True
        )

    async def _page(self, target: Target) -> tuple[str, str | None]:
        async with asyncio.timeout(self._timeout):
            async with self._client.stream("GET", target.url) as response:
                response.raise_for_status()
                body = bytearray()
                async for part in response.aiter_bytes():
                    body += part
                    if len(body) > PAGE_BYTES:
                        raise SloError(f"{target.url}: over {PAGE_BYTES} bytes; is this a metrics page?")
                return body.decode("utf-8", errors="replace"), response.headers.get("date")

    async def _version(self, target: Target) -> str | None:
        try:
            async with asyncio.timeout(self._timeout):
                response = await self._client.get(version_url(target.url))
                response.raise_for_status()
                version = response.json()["version"]
        except (httpx.HTTPError, TimeoutError, ValueError, KeyError, TypeError):
            return None  # a proxy that passes /metrics alone, or an older server
        return version if isinstance(version, str) else None

    async def _every(
        self, seconds: float, work: Callable[[], Awaitable[object]], stop: asyncio.Event, first: bool = True
    ) -> None:
        """Run ``work`` on a fixed grid; a run that takes longer than the interval skips the moments it missed."""
        loop = asyncio.get_running_loop()
        begin = loop.time()
        done = 0 if first else 1
        while not stop.is_set():
            wait = begin + done * seconds - loop.time()
            if wait > 0:
                try:
                    await asyncio.wait_for(stop.wait(), wait)
                except TimeoutError:
                    pass
                else:
                    return
            await work()
            done = max(done + 1, math.ceil((loop.time() - begin) / seconds))


def _no_rows() -> pa.Table:
    return ENGINE_SAMPLES.schema.empty_table()
