"""The guard around hooks."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from vllm_slo.exporters.probe import guard
from vllm_slo.exporters.probe.settings import LOGGER_NAME


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    # One dictionary a process: other tests may have left something in it.
    guard.errors.clear()
    guard.off.clear()
    yield
    guard.errors.clear()
    guard.off.clear()


def fail(_: object) -> None:
    raise RuntimeError("broken")


def test_what_a_hook_returns_passes_through() -> None:
    assert guard.guarded("h", lambda a, b: a + b)(2, 3) == 5
    assert guard.errors == {}


def test_an_error_is_counted_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    hook = guard.guarded("h", fail)
    with caplog.at_level(logging.WARNING, LOGGER_NAME):
        assert [hook(1), hook(2), hook(3)] == [None, None, None]
    assert guard.errors == {"h": 3}
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_ten_errors_in_a_row_end_a_hook_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[int] = []
    gone: list[bool] = []

    def counted(number: int) -> None:
        calls.append(number)
        raise ValueError(number)

    hook = guard.guarded("h", counted, lambda: gone.append(True))
    with caplog.at_level(logging.WARNING, LOGGER_NAME):
        for number in range(50):
            hook(number)
    assert calls == list(range(guard.OFF_AFTER))
    assert gone == [True]
    assert guard.off == {"h"}
    assert sum("is off after 10 errors" in record.message for record in caplog.records) == 1


def test_errors_between_successes_do_not_end_it() -> None:
    def odd(number: int) -> int:
        if number % 10:
            raise ValueError(number)
        return number

    hook = guard.guarded("h", odd)
    assert [hook(number) for number in range(101)][-1] == 100
    assert guard.errors["h"] == 90
    assert guard.off == set()


def test_an_error_of_whoever_is_told_that_it_is_gone_is_caught_too() -> None:
    hook = guard.guarded("h", fail, lambda: 1 / 0)  # type: ignore[arg-type,return-value]
    for _ in range(20):
        hook(None)
    assert guard.errors["h"] == guard.OFF_AFTER + 1


def test_what_ends_the_process_is_not_caught() -> None:
    def leave(_: object) -> None:
        raise SystemExit

    with pytest.raises(SystemExit):
        guard.guarded("h", leave)(None)
