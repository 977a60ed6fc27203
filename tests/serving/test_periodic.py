"""Periodic work goes on whatever becomes of one turn."""

from __future__ import annotations

import logging
import threading
import time

import pytest

from vllm_slo.serving.periodic import Periodic


def test_a_failing_turn_does_not_end_the_work_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    turns: list[int] = []
    enough = threading.Event()

    def work() -> None:
        turns.append(len(turns))
        if len(turns) == 6:
            enough.set()
        if len(turns) < 4:
            raise RuntimeError("not now")

    periodic = Periodic("upkeep", work, 0.01)
    with caplog.at_level(logging.WARNING):
        periodic.start()
        assert enough.wait(5)
        periodic.stop(5)
    assert periodic.failures == 3
    assert [record.getMessage() for record in caplog.records] == [
        "upkeep failed and will be tried again: RuntimeError: not now"
    ]


def test_stopping_waits_no_longer_than_its_patience() -> None:
    running, free = threading.Event(), threading.Event()

    def work() -> None:
        running.set()
        free.wait(10)

    periodic = Periodic("upkeep", work, 0.0)
    periodic.start()
    assert running.wait(5)
    start = time.monotonic()
    periodic.stop(0.1)
    assert time.monotonic() - start < 1
    free.set()
    periodic.stop(5)


def test_what_never_started_stops_at_once() -> None:
    Periodic("upkeep", lambda: None, 1.0).stop(1.0)
