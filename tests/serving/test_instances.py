"""Names of scraped servers."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.receiver.settings import ReceiverSettings
from vllm_slo.exporters.vllm.scrape import parse_target
from vllm_slo.serving.process import ScrapeSettings, ServeSettings, serve


def test_two_servers_under_one_name_are_refused_before_anything_starts(tmp_path: Path) -> None:
    groups = tuple(
        ScrapeSettings((parse_target(f"http://h:{port}=a"),), seconds) for port, seconds in ((1, 5.0), (2, 9.0))
    )
    settings = ServeSettings(str(tmp_path / "lake"), tmp_path / "spool", ReceiverSettings(), scrape=groups)
    with pytest.raises(SloError, match="http://h:1/metrics and http://h:2/metrics are both called a"):
        serve(settings, lambda _: None)
    assert not list(tmp_path.iterdir())
