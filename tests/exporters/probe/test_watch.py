"""When samples are taken, and what becomes of lives whose end was missed: on stand-ins, in time that stands still."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest

from probe_twin import Told
from vllm_slo.exporters.probe import watch as watching
from vllm_slo.exporters.probe.accounting import Accounting
from vllm_slo.exporters.probe.life import Life
from vllm_slo.exporters.probe.watch import GRACE_NS, SECOND_NS, Watch, each_second

JITTER_NS = 3_000_000


class Scheduler:
    """With the requests that are there."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}


class Stage:
    """A watch whose clock is ``now_ns``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = 100 * SECOND_NS
        self.failing = False
        self.taken: list[int] = []
        self.configurations: list[Any] = []
        self.scheduler = Scheduler()
        self.accounting = Accounting(Told(), lambda _life: None)
        self.last_ns = self.now_ns
        outbox = SimpleNamespace(put=lambda _record: None)
        self.engine = SimpleNamespace(
            off=False, accounting=self.accounting, process=SimpleNamespace(outbox=outbox, described=dict)
        )
        monkeypatch.setattr(watching, "monotonic_ns", lambda: self.now_ns)
        monkeypatch.setattr(Watch, "_compare_configuration", lambda _self, one: self.configurations.append(one))
        self.watch = Watch(self.engine, self.scheduler, self, lambda _columns: None)  # type: ignore[arg-type]

    def take(self, _scheduler: Any, now_ns: int) -> dict[str, Any]:
        """As a `Sampler`."""
        if self.failing:
            raise RuntimeError("dictionary changed size during iteration")
        self.taken.append(now_ns)
        return {}

    def second(self, at_ns: int) -> None:
        self.now_ns = at_ns
        self.watch.second()

    def step(self, at_ns: int) -> None:
        """As `Engine.update_ends`."""
        self.now_ns = at_ns
        if at_ns >= self.watch.due_ns:
            self.watch.step(self.scheduler, at_ns)

    def gaps(self) -> list[float]:
        return [(b - a) / SECOND_NS for a, b in zip(self.taken, self.taken[1:], strict=False)]


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(monkeypatch)


def test_an_engine_that_idles_is_sampled_each_second(stage: Stage) -> None:
    start = stage.now_ns
    for number in range(1, 30):
        stage.second(start + number * SECOND_NS + (JITTER_NS if number % 2 else -JITTER_NS))
    assert len(stage.taken) == 28  # all but the first second, in which a step might have come
    assert stage.gaps() == pytest.approx([1.0] * 27, abs=0.01)


def test_an_engine_with_steps_takes_its_samples_itself(stage: Stage) -> None:
    start = stage.now_ns
    for number in range(1, 500):
        stage.step(start + number * 20_000_000)
        if number % 50 == 17:
            before = len(stage.taken)
            stage.second(stage.now_ns + 1)
            assert len(stage.taken) == before
    assert len(stage.taken) == 9
    assert stage.gaps() == pytest.approx([1.0] * 8, abs=0.02)


def test_a_step_after_idling_waits_for_its_second(stage: Stage) -> None:
    start = stage.now_ns
    for number in range(1, 4):
        stage.second(start + number * SECOND_NS)
    stage.step(stage.now_ns + SECOND_NS // 2)
    assert stage.gaps() == [1.0]
    stage.step(stage.taken[-1] + SECOND_NS)
    stage.second(stage.taken[-1] + SECOND_NS + GRACE_NS // 2)
    assert stage.gaps() == [1.0, 1.0]


def test_an_engine_that_has_steps_again_takes_its_samples_itself_again(stage: Stage) -> None:
    start = stage.now_ns
    for number in range(1, 4):
        stage.second(start + number * SECOND_NS)
    taken = len(stage.taken)
    for number in range(3 * 50 + 1, 30 * 50):  # the thread is early by a hair, each second
        stage.accounting.step_count += 1
        if number % 50 == 0:
            stage.second(start + number * 20_000_000 - number)
            assert stage.now_ns not in stage.taken
        stage.step(start + number * 20_000_000)
    assert len(stage.taken) == taken + 26
    assert stage.gaps() == pytest.approx([1.0] * (taken + 25), abs=0.03)


def test_a_reading_that_the_engine_disturbed_is_made_up_for_by_the_next_step(stage: Stage) -> None:
    stage.failing = True
    stage.second(stage.now_ns + 2 * SECOND_NS)
    assert stage.configurations == [stage.scheduler]
    stage.failing = False
    stage.step(stage.now_ns + 1)
    assert stage.taken == [stage.now_ns]


def test_a_life_whose_end_was_missed_is_forgotten_at_the_next_sample(stage: Stage) -> None:
    for name in ("gone", "there"):
        stage.accounting.added(Life(name, stage.now_ns))
    stage.scheduler.requests["there"] = object()
    stage.step(stage.now_ns + 2 * SECOND_NS)
    assert stage.accounting.in_flight.keys() == {"there"}


def test_a_life_is_there_before_its_request_and_the_thread_leaves_it_alone(stage: Stage) -> None:
    start = stage.now_ns
    stage.second(start + 2 * SECOND_NS)
    stage.accounting.added(Life("new", stage.now_ns))
    stage.second(start + 3 * SECOND_NS)
    assert stage.accounting.in_flight.keys() == {"new"}
    stage.scheduler.requests["new"] = object()
    stage.second(start + 4 * SECOND_NS)
    assert stage.accounting.in_flight.keys() == {"new"}
    del stage.scheduler.requests["new"]
    for number in (5, 6):
        stage.second(start + number * SECOND_NS)
    assert not stage.accounting.in_flight
    assert stage.accounting.cells == {}


def test_an_engine_that_is_off_is_sampled_no_more(stage: Stage) -> None:
    stage.engine.off = True
    stage.second(stage.now_ns + 5 * SECOND_NS)
    assert (stage.taken, stage.configurations) == ([], [])


def test_what_an_engine_had_is_given_back_once_its_scheduler_is_gone(stage: Stage) -> None:
    calls: list[str] = []
    outbox = SimpleNamespace(every_second=[])
    each_second(stage.watch, stage.scheduler, outbox, lambda: calls.append("ended"))
    (second,) = outbox.every_second
    stage.now_ns += 2 * SECOND_NS
    second()
    assert (len(stage.taken), calls) == (1, [])
    stage.configurations.clear()
    del stage.scheduler
    gc.collect()
    second()
    assert (calls, outbox.every_second) == (["ended"], [])
