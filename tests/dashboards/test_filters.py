"""Choices that come with the address."""

from __future__ import annotations

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import vllm_slo.page
from fixtures.latency_lake import Request, fill
from vllm_slo.page import LAKE_VARIABLE


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"shard": ["zzz"], "bucket": ["long", "huge"]}, ["shard zzz, bucket huge."]),
        ({"shard": ["a", "no shard"], "range": ["Newest hour"], "model": ["m"]}, []),
    ],
)
def test_what_the_address_asks_for_in_vain_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: dict[str, list[str]], said: list[str]
) -> None:
    monkeypatch.setenv(LAKE_VARIABLE, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    fill(tmp_path, [Request(), Request(shard=None)])
    page = AppTest.from_file(vllm_slo.page.__file__, default_timeout=60)
    for key, values in asked.items():
        page.query_params[key] = values
    page.run()
    assert not page.exception
    assert [warning.value.rpartition("was changed: ")[2] for warning in page.warning] == said
