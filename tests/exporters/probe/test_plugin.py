"""What `register` decides, in processes of their own; vLLM is a package of empty modules here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent.parent
HEAVY = ("grpc", "opentelemetry.sdk", "numpy", "pyarrow", "vllm.v1", "http.server", "prometheus_client")

PROGRAM = """
import json, logging, sys
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append([record.levelname, record.getMessage()])
log = logging.getLogger("vllm.vllm_slo")
log.addHandler(Keep())
log.setLevel(logging.INFO)
import vllm
before = set(sys.modules)
from vllm_slo.exporters.probe import plugin
plugin.register()
plugin.register()
new = sorted(set(sys.modules) - before)
import vllm.v1.core.sched.scheduler as module
wrapped = "_vllm_slo_wrapped" in vars(module.Scheduler)
print(json.dumps({"lines": lines, "new": new, "wrapped": wrapped}))
"""

SCHEDULER = """
class Scheduler:
    def schedule(self): ...
"""


@pytest.fixture
def fake(tmp_path: Path) -> Path:
    folder = tmp_path / "vllm" / "v1" / "core" / "sched"
    folder.mkdir(parents=True)
    for package in (folder, *list(folder.parents)[:3]):
        (package / "__init__.py").write_text("")
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.32.0'\n")
    (tmp_path / "vllm" / "v1" / "core" / "block_pool.py").write_text("class BlockPool: ...\n")
    (folder / "scheduler.py").write_text(SCHEDULER)
    return tmp_path


def run(folder: Path, **environment: str) -> dict[str, object]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM", "OTEL"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**kept, "PYTHONPATH": f"{folder}:{ROOT / 'src'}", **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, object] = json.loads(done.stdout)
    return found


def said(found: dict[str, object]) -> list[list[str]]:
    lines = found["lines"]
    assert isinstance(lines, list)
    return lines


def test_registering_imports_nothing_heavy(fake: Path) -> None:
    new = run(fake)["new"]
    assert isinstance(new, list)
    assert [name for name in new if name.startswith(HEAVY)] == []


def test_a_scheduler_that_is_not_as_expected_is_left_alone_loudly(fake: Path) -> None:
    found = run(fake)
    ((level, text),) = said(found)
    assert level == "WARNING"
    assert "0.32.0 is not as expected of 0.32 (known: 0.29, 0.30, 0.31, 0.32, 0.33)" in text
    assert "Scheduler.update_from_output is not there" in text
    assert not found["wrapped"]


def test_an_unknown_version_switches_the_probe_off_with_one_warning(fake: Path) -> None:
    (fake / "vllm" / "__init__.py").write_text("__version__ = '0.99.0'\n")
    found = run(fake)
    ((level, text),) = said(found)
    assert level == "WARNING"
    assert "vLLM 0.99.0 is none of the versions it knows (0.29, 0.30, 0.31, 0.32, 0.33)" in text
    assert not found["wrapped"]


def test_the_probe_is_off_where_the_environment_says_so(fake: Path) -> None:
    found = run(fake, VLLM_SLO_PROBE="0")
    assert said(found) == [["INFO", "vllm-slo: the probe is off, VLLM_SLO_PROBE says so"]]
    assert not found["wrapped"]


def test_wrong_settings_switch_it_off_and_are_all_named(fake: Path) -> None:
    found = run(fake, VLLM_SLO_QUEUE_SIZE="many", VLLM_SLO_METRICS_PORT="-1")
    ((level, text),) = said(found)
    assert level == "WARNING"
    assert "VLLM_SLO_QUEUE_SIZE" in text
    assert "VLLM_SLO_METRICS_PORT" in text
    assert not found["wrapped"]
