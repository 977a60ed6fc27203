"""The warning above the figures when vLLM goes on and no span arrives."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import vllm_slo.page
from fixtures.latency_lake import NOON, Request, fill
from lake_rows import rows
from vllm_slo.exporters.schema import ENGINE_SAMPLES
from vllm_slo.page import LAKE_VARIABLE


@pytest.mark.parametrize("requests", [[], [Request()]], ids=["an empty lake", "a lake with requests"])
def test_requests_that_only_vllm_knows_of_are_told_above_the_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requests: list[Request]
) -> None:
    monkeypatch.setenv(LAKE_VARIABLE, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    lake = fill(tmp_path, requests)
    page = AppTest.from_file(vllm_slo.page.__file__, default_timeout=60).run()
    assert not page.warning
    counter = {70: 1.0, 100: 8.0, 170: 14.0, 230: 14.0}
    samples = [
        {
            "time": NOON + timedelta(seconds=at),
            "source": "scrape",
            "service_instance_id": "vllm-0",
            "requests_finished_total": finished,
        }
        for at, finished in counter.items()
    ]
    lake.append("engine_samples", rows(ENGINE_SAMPLES, samples))
    page.run()
    assert not page.exception
    assert "Spans are missing since 1 Jun 12:01:10 UTC" in page.warning[0].value
    assert "(vllm-0: 13)" in page.warning[0].value
