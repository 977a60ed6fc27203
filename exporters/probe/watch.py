"""Once a second: the sample, the configuration, what was lost. From a step, or from a thread where none comes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from vllm_slo import __version__
from vllm_slo.exporters.probe import configuration
from vllm_slo.exporters.probe.engine import Engine
from vllm_slo.exporters.probe.sample import Columns, Sampler, SampleRecord

SECOND_NS = 1_000_000_000
GRACE_NS = 200_000_000
"""How late a step may be before the thread takes the sample: an engine that idles, or one in a long step."""


class Watch:
    """Of one engine. Holds its scheduler weakly."""

    def __init__(self, engine: Engine, scheduler: Any, sampler: Sampler, sampled: Callable[[Columns], None]) -> None:
        self._engine = engine
        self._scheduler = weakref.ref(scheduler)
        self._sampler = sampler
        self._sampled = sampled
        self._one = threading.Lock()
        self._started_ns = time.time_ns()
        self._configuration: dict[str, str] = {}
        self.due_ns = monotonic_ns() + SECOND_NS

    def step(self, scheduler: Any, now_ns: int) -> None:
        """A step ended at or after ``due_ns``."""
        self._take(scheduler, now_ns)

    def second(self) -> bool:
        """In the thread of the outbox, each second. False when the scheduler is gone."""
        scheduler = self._scheduler()
        if scheduler is None or self._engine.off:
            return False
        self._compare_configuration(scheduler)
        now_ns = monotonic_ns()
        if now_ns >= self.due_ns + GRACE_NS:
            try:
                self._take(scheduler, now_ns)
            except (RuntimeError, KeyError, AttributeError, IndexError):
                # The engine changed what was being read: it is not idle, and takes its samples itself.
                return True
        return True

    def _take(self, scheduler: Any, now_ns: int) -> None:
        if not self._one.acquire(blocking=False):
            return
        try:
            late = now_ns - self.due_ns
            self.due_ns = now_ns + SECOND_NS - (late if 0 <= late < GRACE_NS else 0)
            start_ns = self._sampler.last_ns
            columns = self._sampler.take(scheduler, now_ns)
            offset = time.time_ns() - monotonic_ns()
            self._engine.process.outbox.put(SampleRecord(columns, start_ns + offset, now_ns + offset))
            self._sampled(columns)
            self._forget_lost(scheduler)
        finally:
            self._one.release()

    def _forget_lost(self, scheduler: Any) -> None:
        """Lives whose end was missed, after an error in a hook."""
        accounting = self._engine.accounting
        if len(accounting.in_flight) > len(scheduler.requests):
            for request_id in accounting.in_flight.keys() - scheduler.requests.keys():
                accounting.lost(accounting.in_flight[request_id])

    def _compare_configuration(self, scheduler: Any) -> None:
        process = self._engine.process
        settings = {f"probe.{name}": value for name, value in process.described().items()}
        now = configuration.read(scheduler, process.vllm_version, __version__, settings)
        if now == self._configuration:
            return
        before, self._configuration = self._configuration, now
        changed = configuration.changes(before, now) if before else {}
        moment = time.time_ns() if before else self._started_ns
        process.outbox.put(configuration.ConfigurationEvent(self._engine.name, moment, now, changed, self._started_ns))


def each_second(watch: Watch, outbox: Any) -> None:
    """Has the outbox's thread call `Watch.second`, for as long as the engine lives."""
    held = weakref.ref(watch)

    def second() -> None:
        one = held()
        if one is None or not one.second():
            outbox.every_second.remove(second)

    outbox.every_second.append(second)
