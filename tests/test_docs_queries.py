"""The queries that the documentation of the probe gives are answered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from vllm_slo.__main__ import run
from vllm_slo.analytics.lake import Lake

PAGE = Path(__file__).resolve().parent.parent / "docs" / "probe.md"
QUERIES = re.findall(r'\./run cli query "(.*?)"', PAGE.read_text(), re.DOTALL)


def test_the_page_has_queries() -> None:
    assert len(QUERIES) >= 3


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_is_answered(query: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Lake.open(str(tmp_path / "lake"), create=True)
    assert run(["--lake", str(tmp_path / "lake"), "query", query, "--format", "json"]) == 0, capsys.readouterr().err
