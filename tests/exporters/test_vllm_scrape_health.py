"""What people and Prometheus are told of the scraping."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pyarrow as pa
from prometheus_client import generate_latest
from prometheus_client.registry import CollectorRegistry

from vllm_slo.exporters.receiver.state import SCRAPING_FILE, look
from vllm_slo.exporters.vllm.changes import Event
from vllm_slo.exporters.vllm.scrape import Scraper, parse_target
from vllm_slo.exporters.vllm.scrape_health import ScrapeCollector, save

PAGE = 'vllm:num_requests_running{model_name="m",engine="0"} 1\n'


def answer(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, text=PAGE) if request.url.host == "good" else httpx.Response(503)


def lost(rows: pa.Table, events: list[Event]) -> None:
    raise OSError("the lake is away")


def scraped() -> list[Scraper]:
    """A server that answers, one that does not, and a lake that takes nothing."""

    async def run() -> Scraper:
        targets = [parse_target("http://good=a"), parse_target("http://me:secret@bad=b")]
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            scraper = Scraper(targets, client=client, sink=lost)
            for target in targets:
                await scraper.scrape(target)
            await scraper.flush()
        return scraper

    return [asyncio.run(run())]


def test_prometheus_sees_which_target_fails_and_that_nothing_is_stored() -> None:
    registry = CollectorRegistry()
    scrapers = scraped()
    registry.register(ScrapeCollector([*scrapers, *scrapers]))
    text = generate_latest(registry).decode()
    assert 'vllm_slo_scrape_failing{instance="a",url="http://good/metrics"} 0.0' in text
    assert 'vllm_slo_scrape_failing{instance="b",url="http://bad/metrics"} 1.0' in text
    assert 'vllm_slo_scrape_reads_total{instance="b",outcome="failure",url="http://bad/metrics"} 1.0' in text
    assert "vllm_slo_scrape_store_failures_total 2.0" in text
    assert text.count("failing{") == 2, "one series a target, however often it is named"


def test_a_reader_of_the_spool_folder_sees_the_errors_and_no_password(tmp_path: Path) -> None:
    save(tmp_path / SCRAPING_FILE, scraped())
    scraping = look(tmp_path).scraping
    assert scraping is not None
    good, bad = scraping["targets"]
    assert (good["failing"], good["successes"], bad["failing"], bad["failures"]) == (False, 1, True, 1)
    assert "503" in bad["last_error"]
    assert scraping["store_error"] == "OSError: the lake is away"
    assert "secret" not in json.dumps(scraping)


def test_a_report_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    for content in (b"", b"[]", b'{"targets": 1}', b"\xff"):
        (tmp_path / SCRAPING_FILE).write_bytes(content)
        assert look(tmp_path).scraping is None
