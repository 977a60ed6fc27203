"""docs/gpu-exporter.md has the table of the code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_slo.exporters.gpu.collector import tables

PAGE = Path(__file__).resolve().parents[3] / "docs" / "gpu-exporter.md"


def test_the_page_holds_the_generated_table(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text()
    found = re.search(r"(<!-- generated: gpu -->\n)(.*?)(<!-- end -->)", text, re.DOTALL)
    assert found is not None
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(text[: found.start(2)] + tables() + "\n" + text[found.end(2) :])
        return
    assert found[2] == tables() + "\n", f"run pytest --rewrite-golden {Path(__file__).name} and read the diff"


def test_every_series_that_the_prose_names_exists() -> None:
    prose, _, table = PAGE.read_text().partition("## Series")
    named = set(re.findall(r"vllm_slo_gpu_\w+", prose))
    assert named <= set(re.findall(r"vllm_slo_gpu_\w+", table))
