"""Once a second: the sample, the configuration, what was lost. From a step, or from a thread where none comes."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable
from time import monotonic_ns
from typing import Any

from vllm_slo import __version__
from vllm_slo.exporters.probe import configuration
from vllm_slo.exporters.probe.engine import Engine
from vllm_slo.exporters.probe.life import Life
from vllm_slo.exporters.probe.sample import Columns, Sampler, SampleRecord

SECOND_NS = 1_000_000_000
GRACE_NS = 200_000_000
"""How late a step may be before the thread takes the sample: an engine that idles, or one in a long step."""
EARLY_NS = 500_000_000
"""How early the thread may be while the engine idles: its seconds are not those of the last step."""


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
        self._steps_by_thread: int | None = None
        """Steps counted at the last sample if the thread took it."""
        self._gone: set[Life] = set()
        """Lives of no request, the last time that the thread looked."""
        self.due_ns = monotonic_ns() + SECOND_NS

    def step(self, scheduler: Any, now_ns: int) -> None:
        """A step ended at or after ``due_ns``."""
        self._steps_by_thread = None
        self._take(scheduler, now_ns)
        accounting = self._engine.accounting
        if len(accounting.in_flight) > len(scheduler.requests):
            self._forget(accounting.in_flight.keys() - scheduler.requests.keys())

    def second(self) -> None:
        """In the thread of the outbox, each second."""
        scheduler = self._scheduler()
        if scheduler is None or self._engine.off:
            return
        now_ns, due_ns = monotonic_ns(), self.due_ns
        steps = self._engine.accounting.step_count
        if now_ns >= (due_ns - EARLY_NS if steps == self._steps_by_thread else due_ns + GRACE_NS):
            try:
                self._take(scheduler, now_ns)
                self._steps_by_thread = steps
                self._forget_when_idle(scheduler)
            except (RuntimeError, KeyError, AttributeError, IndexError):
                # The engine changed what was being read: it is not idle, and takes its samples itself.
                self.due_ns = due_ns
        self._compare_configuration(scheduler)

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
        finally:
            self._one.release()

    def _forget(self, request_ids: Iterable[str]) -> None:
        """Lives whose end was missed, after an error in a hook."""
        accounting = self._engine.accounting
        for request_id in request_ids:
            accounting.lost(accounting.in_flight[request_id])

    def _forget_when_idle(self, scheduler: Any) -> None:
        """The same from the thread, for an engine that has no request and thus no step.

        A life is there a moment before its request is: only one that was too many a second ago is gone.
        """
        if scheduler.requests:
            self._gone.clear()
            return
        gone = set(self._engine.accounting.in_flight.values())
        self._forget([life.engine_request_id for life in gone & self._gone])
        self._gone = gone - self._gone

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


def each_second(watch: Watch, scheduler: Any, outbox: Any, ended: Callable[[], None]) -> None:
    """Has the outbox's thread call `Watch.second`, until the scheduler is gone; then ``ended``, once."""
    held, lives = weakref.ref(watch), weakref.ref(scheduler)

    def second() -> None:
        if lives() is None:
            outbox.every_second.remove(second)
            ended()
        elif (one := held()) is not None:
            one.second()

    outbox.every_second.append(second)
