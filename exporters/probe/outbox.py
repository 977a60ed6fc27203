"""A bounded queue of records and the thread that sends them; what fills it never waits, whatever the receiver does."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.util import Finalize
from typing import Protocol

from vllm_slo.exporters.probe.encode import PAUSE_EVERY
from vllm_slo.exporters.probe.settings import LOGGER_NAME, Settings
from vllm_slo.exporters.probe.spans import SpanData, pause

EXPORT_THREAD = "vllm-slo-export"
SECOND_THREAD = "vllm-slo-second"
GIVE_UP_SECONDS = 60.0
"""A batch is tried again for so long, then it is counted as failed; what comes meanwhile waits in the queue."""
LONGEST_BACKOFF_SECONDS = 15.0
LOG_EVERY_SECONDS = 60.0
CLOSE_SECONDS = 2.0
"""At the end of the process; vLLM kills an engine core 5 s after its SIGTERM."""

logger = logging.getLogger(LOGGER_NAME)


class Record(Protocol):
    """What a hook puts: cheap to make, turned into a span in the outbox's thread."""

    def span(self) -> SpanData: ...


class Exporter(Protocol):
    """Sends up to ``batch`` records at once; ``close`` ends a ``send`` that hangs."""

    batch: int

    def send(self, records: Sequence[SpanData]) -> bool: ...

    def close(self) -> None: ...


class Outbox:
    """Records that wait for the receiver.

    ``make_exporter`` is called in the thread that sends. ``every_second`` are called about once a second in a thread of
    their own, so a receiver that hangs does not stop them; ``before_close`` put what still waits elsewhere. Counters:
    ``exported``; ``dropped``, for want of room; ``failed``, not accepted in time or no span could be made of them;
    ``errors`` of the two lists.
    Threads start with ``start`` or the first ``put``; a forked child begins empty.
    """

    def __init__(self, settings: Settings, make_exporter: Callable[[], Exporter]) -> None:
        self._make_exporter = make_exporter
        self._interval = settings.export_interval_seconds
        self._size = settings.queue_size
        self.every_second: list[Callable[[], None]] = []
        self.before_close: list[Callable[[], None]] = []
        self._begin()
        os.register_at_fork(after_in_child=partial(_begin_again, weakref.ref(self)))

    def _begin(self) -> None:
        self._queue: deque[Record] = deque()
        self._batch: list[SpanData] = []
        self.exported = self.dropped = self.failed = self.errors = 0
        self._stop = threading.Event()
        self._deadline = float("inf")
        self._exporter: Exporter | None = None
        self._threads: list[threading.Thread] = []
        self._finalizer: Finalize | None = None
        self._starting = threading.Lock()
        self._running = False
        self._closed = False

    def __len__(self) -> int:
        """Records that wait, those being sent among them."""
        return len(self._queue) + len(self._batch)

    @property
    def lost(self) -> int:
        """Records that will never arrive."""
        return self.dropped + self.failed

    def put(self, record: Record) -> None:
        """Queues a record, or counts it as dropped when the queue is full."""
        if not self._running:
            self.start()
        queue = self._queue
        if len(queue) < self._size and not self._closed:
            queue.append(record)
        else:
            self.dropped += 1

    def start(self) -> None:
        """Starts the threads unless they run; never raises."""
        with self._starting:
            if self._running:
                return
            self._running = True
        targets = {EXPORT_THREAD: self._export, SECOND_THREAD: self._seconds}
        try:
            self._threads = [threading.Thread(target=each, name=name, daemon=True) for name, each in targets.items()]
            for thread in self._threads:
                thread.start()
            # vLLM's processes end by either: a fork of multiprocessing calls no atexit.
            atexit.register(self.close)
            self._finalizer = Finalize(None, self.close, exitpriority=100)
        except RuntimeError as error:
            self._closed = True
            logger.warning("vllm-slo: no thread for the probe's records, they are dropped: %s", error)

    def close(self, timeout_seconds: float = CLOSE_SECONDS) -> None:
        """Sends what waits, for at most this long; what comes later is dropped."""
        if self._closed or not self._running:
            return
        for each in self.before_close:
            try:
                each()
            except Exception:  # noqa: BLE001
                self.errors += 1
        self._closed = True
        end = time.monotonic() + timeout_seconds
        self._deadline = end - timeout_seconds / 4
        self._stop.set()
        for thread in self._threads:
            thread.join(max(0.0, self._deadline - time.monotonic()))
        if self._threads[0].is_alive() and self._exporter is not None:
            try:
                self._exporter.close()
            except Exception:
                logger.debug("vllm-slo: the exporter did not close", exc_info=True)
            self._threads[0].join(max(0.0, end - time.monotonic()))
        atexit.unregister(self.close)
        if self._finalizer is not None:
            self._finalizer.cancel()

    def _export(self) -> None:
        try:
            self._exporter = exporter = self._make_exporter()
            _quieten(EXPORT_THREAD)
        except Exception as error:  # noqa: BLE001
            logger.warning("vllm-slo: the probe's records cannot be sent, they are dropped: %s", error)
            self._closed = True
            self.failed += len(self._queue)
            self._queue.clear()
            return
        tries, told, next_try, give_up = 0, -LOG_EVERY_SECONDS, 0.0, 0.0
        while not self._stop.wait(self._interval):
            while time.monotonic() >= next_try and self._take(exporter.batch):
                if self._sent(exporter):
                    tries = 0
                    continue
                now = time.monotonic()
                give_up = give_up if tries else now + GIVE_UP_SECONDS
                tries += 1
                next_try = now + min(2.0**tries, LONGEST_BACKOFF_SECONDS)
                if next_try > give_up:
                    self._forget()
                    tries = 0
                if now - told >= LOG_EVERY_SECONDS:
                    told = now
                    logger.warning(
                        "vllm-slo: the receiver does not take the probe's records: %d wait, %d are lost",
                        len(self),
                        self.lost,
                    )
                if self._stop.is_set():
                    break
        while time.monotonic() < self._deadline and self._take(exporter.batch) and self._sent(exporter):
            pass
        self._forget()
        self.failed += len(self._queue)
        self._queue.clear()
        exporter.close()

    def _take(self, size: int) -> bool:
        """Whether there is something to send: the batch that was not accepted, else spans of the first records."""
        batch = self._batch
        while not batch and self._queue:
            for number in range(min(size, len(self._queue))):
                try:
                    batch.append(self._queue.popleft().span())
                except Exception:  # noqa: BLE001
                    self.failed += 1
                if number % PAUSE_EVERY == 0:
                    pause()
        return bool(batch)

    def _sent(self, exporter: Exporter) -> bool:
        """Whether the batch was accepted; then it is gone."""
        try:
            accepted = exporter.send(self._batch)
        except Exception:
            logger.debug("vllm-slo: an export failed", exc_info=True)
            accepted = False
        if accepted:
            self.exported += len(self._batch)
            self._batch = []
        return accepted

    def _forget(self) -> None:
        self.failed += len(self._batch)
        self._batch = []

    def _seconds(self) -> None:
        """Calls ``every_second`` on a grid of seconds; a call that is late is not made up for."""
        due = time.monotonic() + 1.0
        while not self._stop.wait(max(0.0, due - time.monotonic())):
            for each in tuple(self.every_second):
                try:
                    each()
                except Exception:
                    self.errors += 1
                    logger.debug("vllm-slo: the work of a second failed", exc_info=True)
            due = max(due + 1.0, time.monotonic())


def _begin_again(outbox: weakref.ref[Outbox]) -> None:
    if (box := outbox()) is not None:
        box._begin()


class OncePerMinute(logging.Filter):
    """Lets one line a minute of one thread through, and all those of others."""

    def __init__(self, thread: str, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._thread, self._clock, self._next = thread, clock, 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        if record.threadName != self._thread:
            return True
        now = self._clock()
        if now < self._next:
            return False
        self._next = now + LOG_EVERY_SECONDS
        return True


def _quieten(thread: str) -> None:
    """What the exporter and its HTTP client log in this thread is limited: one line says it, and so does the outbox."""
    limit = OncePerMinute(thread)
    for name in tuple(logging.root.manager.loggerDict):
        if name.partition(".")[0] in ("opentelemetry", "urllib3", "requests"):
            log = logging.getLogger(name)
            log.filters = [each for each in log.filters if not isinstance(each, OncePerMinute)]
            log.addFilter(limit)
