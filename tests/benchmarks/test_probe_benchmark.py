"""`benchmarks/probe.py` gives the figures it promises, and the hooks cost what may be said on a busy machine."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent.parent / "benchmarks"
FIGURES = (
    *("step_us_64_running", "request_us", "sample_ms_512_running"),
    *("cpu_per_request_ratio", "throughput_ratio", "throughput_ratio_low"),
)
BUSY_MACHINE = 4
"""How many times the bars other work beside the test may make of them; the bars themselves are for an idle machine."""


@pytest.fixture(scope="module")
def abba() -> ModuleType:
    """The module, from its file."""
    spec = importlib.util.spec_from_file_location("abba", BENCHMARKS / "abba.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["abba"] = module
    spec.loader.exec_module(module)
    return module


def benchmark(tmp_path: Path, python: str, *options: str) -> dict[str, Any]:
    """The figures that a run writes."""
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "probe.py"), "--quick", *options, "--json", str(file)],
        env={**os.environ, "VLLM_SLO_VLLM_PYTHON": python},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures: dict[str, Any] = json.loads(file.read_text())
    return figures


@pytest.mark.vllm
def test_hooks_are_cheap_whatever_waits(vllm_python: str, tmp_path: Path) -> None:
    figures = benchmark(tmp_path, vllm_python, "--only", "hot-path")
    assert figures.keys() >= set(FIGURES[:3])
    assert figures["step_us_64_running"] <= 15 * BUSY_MACHINE
    assert figures["request_us"] <= 60 * BUSY_MACHINE
    assert figures["sample_ms_512_running"] <= 1 * BUSY_MACHINE
    assert figures["memory_growth_mib"] <= 8


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_servers_by_turns_give_ratios_with_intervals(vllm_python: str, tmp_path: Path) -> None:
    figures = benchmark(tmp_path, vllm_python, "--only", "end-to-end")
    assert figures.keys() >= set(FIGURES[3:])
    assert figures["throughput_ratio_low"] <= figures["throughput_ratio"] <= figures["throughput_ratio_high"]
    assert 0.5 < figures["cpu_per_request_ratio"] < 2


def test_a_ratio_is_the_geometric_mean_of_its_pairs(abba: ModuleType) -> None:
    found = abba.ratio([(2.0, 1.0), (1.0, 2.0), (4.0, 4.0)])
    assert found.mean == pytest.approx(1.0)
    assert found.low == pytest.approx(1 / found.high)


def test_the_interval_holds_the_true_ratio_in_95_of_100_experiments(abba: ModuleType) -> None:
    draw = random.Random(4)
    held = 0
    for _ in range(2_000):
        pairs = [(math.exp(draw.gauss(0.01, 0.05)), math.exp(draw.gauss(0.0, 0.05))) for _ in range(20)]
        found = abba.ratio(pairs)
        held += found.low <= math.exp(0.01) <= found.high
    assert 0.935 <= held / 2_000 <= 0.965


@pytest.mark.parametrize(("freedom", "quantile"), [(1, 12.706), (3, 3.182), (5, 2.571), (19, 2.093), (39, 2.023)])
def test_the_quantile_of_students_t_is_that_of_the_tables(abba: ModuleType, freedom: int, quantile: float) -> None:
    assert abba.student_t_975(freedom) == pytest.approx(quantile, abs=0.03)
