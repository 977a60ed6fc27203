"""vLLM's stat logger plugin in every API server: requests refused at the door, and engines put to sleep.

vLLM calls ``record`` for every step inside its output handler, where an exception ends the server: it does nothing.
Where the middleware runs a refusal is told to it, and it makes the record; else the record is made here, once either
way. vLLM before 0.32 does not report refusals.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

from vllm.v1.metrics.loggers import AggregateStatLoggerBase

from vllm_slo.exporters import records
from vllm_slo.exporters.probe import link
from vllm_slo.exporters.probe.guard import guarded
from vllm_slo.exporters.probe.http_request import HttpRequest
from vllm_slo.exporters.probe.spans import SpanData

REFUSAL_STATUS = 503
"""What vLLM answers for both of its limits (`QueueOverflowError`, `MaxQueuedTokensError`)."""


class SleepState:
    """An event: engines went to sleep or woke up."""

    def __init__(self, asleep: bool, level: int) -> None:
        self._time_ns = time.time_ns()
        self._asleep = asleep
        self._level = level

    def span(self) -> SpanData:
        """The record."""
        title = f"engine asleep (level {self._level})" if self._asleep else "engine awake"
        detail = json.dumps({"asleep": self._asleep, "level": self._level})
        attributes = {
            records.key("event_id"): f"sleep-{os.getpid():x}-{self._time_ns:x}",
            records.key("kind"): "note",
            records.key("title"): title,
            records.key("detail"): detail,
        }
        return SpanData(records.EVENT, self._time_ns, self._time_ns, attributes)


def _rejected(reason: str) -> None:
    front = link.active()
    if front is None:
        return
    http = link.CURRENT.get()
    if http is not None:
        http.rejection = reason
        return
    unseen = HttpRequest(None)
    unseen.rejection = reason
    unseen.status = REFUSAL_STATUS
    front.link.http_ended(unseen)


def _sleep_state(asleep: bool, level: int) -> None:
    front = link.active()
    if front is not None:
        front.put(SleepState(asleep, level))


class AdmissionStats(AggregateStatLoggerBase):  # type: ignore[misc]
    """One a process that serves the API, for all of its engines."""

    def __init__(self, vllm_config: Any, engine_indexes: list[int]) -> None:
        self._rejected = guarded("stat_logger.rejection", _rejected)
        self._sleep_state = guarded("stat_logger.sleep", _sleep_state)

    def record(self, *arguments: Any, **named: Any) -> None:
        """Nothing: the engine core knows each step better."""

    def log_engine_initialized(self) -> None:
        """Nothing."""

    def record_admission_rejection(self, reason: str) -> None:
        """A request was refused because a queue is full."""
        self._rejected(str(reason))

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """The name of vLLM's first argument says the opposite of what it passes: 1 is asleep."""
        self._sleep_state(bool(is_awake), int(level))
