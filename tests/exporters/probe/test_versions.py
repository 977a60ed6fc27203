"""The table of vLLM's versions, and its check against classes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from vllm_slo.exporters.probe import versions
from vllm_slo.exporters.probe.versions import VERSIONS, Hooked, differences, find, missing_attributes

ROOT = Path(__file__).resolve().parent.parent.parent.parent


@pytest.mark.parametrize(
    ("version", "minor"),
    [("0.32.0", "0.32"), ("0.33.1.dev12+g0a1b2c3", "0.33"), ("0.29.0rc1", "0.29"), ("0.30", "0.30")],
)
def test_a_version_is_that_of_its_minor(version: str, minor: str) -> None:
    row = find(version)
    assert row is not None
    assert row.minor == minor


@pytest.mark.parametrize("version", ["0.28.9", "0.34.0", "0.3.2", "0.320.0", "1.32.0", "dev", "of an unknown version"])
def test_an_unknown_version_has_no_row(version: str) -> None:
    assert find(version) is None


def test_queues_of_the_table_are_those_of_the_scan() -> None:
    assert [row.minor for row in VERSIONS] == ["0.29", "0.30", "0.31", "0.32", "0.33"]
    assert versions.known() == "0.29, 0.30, 0.31, 0.32, 0.33"
    for row in VERSIONS:
        old = row.minor in ("0.29", "0.30")
        assert row.skipped == ("skipped_waiting" if old else "deferred_waiting")
        assert (row.skipped in row.queues) is old


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    found = ModuleType("fake_scheduler")
    monkeypatch.setitem(sys.modules, "fake_scheduler", found)
    return found


class Good:
    def schedule(self, throttle: bool = False, more: int = 0) -> None: ...
    def _free(self, request: object) -> None: ...


def test_methods_are_compared_by_name_and_parameters(module: ModuleType) -> None:
    module.Scheduler = Good  # type: ignore[attr-defined]
    good = (Hooked("fake_scheduler:Scheduler", "schedule"), Hooked("fake_scheduler:Scheduler", "_free", ("request",)))
    assert differences(good) == []
    bad = (
        Hooked("fake_scheduler:Scheduler", "_free", ("request", "delay")),
        Hooked("fake_scheduler:Scheduler", "update"),
        Hooked("fake_scheduler:Pool", "take"),
    )
    assert differences(bad) == [
        "Scheduler._free takes (request), not (request, delay)",
        "Scheduler.update is not there",
        "Pool.take is not there",
    ]


def test_attributes_that_a_scheduler_lacks_are_named() -> None:
    row = VERSIONS[3]
    names = {*versions.ATTRIBUTES, *row.queues, row.skipped, row.cap}
    assert missing_attributes(SimpleNamespace(**dict.fromkeys(names)), row) == []
    names.remove("deferred_waiting")
    assert missing_attributes(SimpleNamespace(**dict.fromkeys(names)), row) == ["deferred_waiting"]


@pytest.mark.vllm
def test_the_row_of_the_installed_vllm_holds_and_its_neighbours_do_not(vllm_python: str) -> None:
    program = """
import json, vllm
from vllm_slo.exporters.probe.versions import VERSIONS, differences, find
own = find(vllm.__version__)
rows = {row.minor: differences((*row.engine, *row.frontend, row.look)) for row in VERSIONS}
print(json.dumps([own.minor, rows]))
"""
    done = subprocess.run(
        [vllm_python, "-c", program],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    own, rows = json.loads(done.stdout.splitlines()[-1])
    assert rows[own] == []
    assert rows["0.30"] == ["Scheduler._select_waiting_queue_for_scheduling is not there"]
