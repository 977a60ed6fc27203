"""The page as a person sees it: a real server, a real browser, recordings of a real vLLM."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from playwright.sync_api import Page, sync_playwright

from fixtures import probe_lake
from fixtures.latency_lake import fill, recorded
from vllm_slo.analytics.blocked import REASONS, blocked
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.extent import extent
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.parts import Tail
from vllm_slo.analytics.percentiles import QUANTILES, percentiles
from vllm_slo.analytics.phases import PARTS, phases
from vllm_slo.analytics.query import connect
from vllm_slo.analytics.selection import Selection
from vllm_slo.dashboards import names
from vllm_slo.dashboards.units import percent_text, quantile_text, seconds_text
from vllm_slo.exporters.records import QUEUE_PARTS
from vllm_slo.page import LAKE_VARIABLE
from vllm_slo.serving.app import command, free_port

pytestmark = pytest.mark.browser

HOST = "127.0.0.1"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-dev-shm-usage"]


def drawn(plots: int) -> str:
    """An expression that holds once the page is there with all of its figures."""
    return (
        "document.querySelector('[data-section=health]')"
        f" && document.querySelectorAll('.js-plotly-plot').length === {plots}"
        " && [...document.querySelectorAll('.js-plotly-plot')].every(plot => plot.querySelector('.cartesianlayer .xy'))"
    )


COMPLETE = drawn(4)
PROBED = drawn(9)
CUT = (
    "[...document.querySelectorAll('.slo-heat .scroll, .slo-health .scroll')]"
    ".filter(e => e.scrollWidth > e.clientWidth).length"
)


@pytest.fixture(scope="module")
def browser_path() -> str:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium; apt-get install chromium")
    return path


@pytest.fixture(scope="module")
def page(browser_path: str) -> Iterator[Page]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path, args=FLAGS)
        yield browser.new_page(viewport={"width": 1400, "height": 2500})
        browser.close()


class Server:
    """`streamlit run` as the product starts it, on a lake."""

    def __init__(self, lake: Path) -> None:
        port = free_port(HOST)
        self.address = f"http://{HOST}:{port}"
        self._log = (lake.parent / f"{lake.name}.log").open("w+")
        self._process = subprocess.Popen(
            command(HOST, port),
            env={**os.environ, LAKE_VARIABLE: str(lake)},
            cwd=lake.parent,
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        deadline = time.monotonic() + 60
        while not self._answers():
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            with urlopen(f"{self.address}/_stcore/health", timeout=1) as reply:
                return bool(reply.status == 200)
        except (URLError, OSError):
            return False

    def stop(self) -> str:
        """End it; what it wrote."""
        self._process.terminate()
        self._process.communicate(timeout=20)
        self._log.seek(0)
        text = self._log.read()
        self._log.close()
        return text


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, captures: Path) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("demo") / "lake"
    recorded(folder, captures)
    server = Server(folder)
    yield server.address, folder
    assert "Traceback" not in server.stop()


def visited(page: Page, address: str, ready: str) -> list[str]:
    """Opens an address, waits for an expression to hold, and gives what the console complained of meanwhile."""
    complaints: list[str] = []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("requestfailed", lambda request: complaints.append(f"request failed: {request.url}"))
    page.goto(address)
    page.wait_for_function(ready, timeout=60_000)
    return complaints


def text_of(page: Page, selector: str) -> str:
    return " ".join(page.locator(selector).inner_text().split())


def test_every_figure_in_the_tables_is_the_computed_one(page: Page, demo: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = demo
    complaints = visited(page, address, COMPLETE)
    connection = connect(Lake.open(folder, create=False), Buckets())
    whole = extent(connection)
    assert whole is not None
    selection = Selection.around(whole.start, whole.end)
    tables = percentiles(connection, selection, "rows")
    for quantile in reversed(QUANTILES):
        name = quantile_text(quantile)
        page.get_by_role("radio", name=name, exact=True).click()
        page.wait_for_selector(f".slo-heat[data-quantile='{quantile:g}'] >> nth=3")
        for metric, table in tables.items():
            shown = f".slo-heat[data-metric='{metric}'][data-quantile='{quantile:g}']"
            for cell in table.cells:
                text = text_of(page, f"{shown} [data-cell='{cell.shard}|{cell.bucket}']").replace("▲ worst", "").strip()
                enough = f"{seconds_text(cell.value(quantile))} n={cell.rows:,}"
                few = f"max {seconds_text(cell.maximum)} n={cell.rows:,}, too few for {name}"
                assert text == (enough if cell.enough(quantile) else few)
            assert text_of(page, f"{shown} [data-cell='short-0|long']") == "no data"
            assert "exact" in text_of(page, f"{shown} .note")
    found = phases(connection, selection, "rows")
    assert found is not None
    assert found.median is not None
    assert found.tail is not None
    bars = page.locator(".js-plotly-plot").nth(0).inner_text()
    for group in (found.median, found.tail):
        assert f"mean {seconds_text(group.measured)}" in bars
        assert all(seconds_text(group.mean(part)) in bars for part in PARTS["request_duration"])
    total = tables["queue"].rows_used
    assert text_of(page, "[data-tile='requests'] .figure") == f"{total:,}"
    assert "Coverage: spans of" in page.content()
    page.screenshot(path=tmp_path / "overview.png")
    assert complaints == []


def test_a_link_with_filters_opens_that_selection(page: Page, demo: tuple[str, Path], tmp_path: Path) -> None:
    address, folder = demo
    complaints = visited(page, f"{address}/?shard=short-0", COMPLETE)
    connection = connect(Lake.open(folder, create=False), Buckets())
    ((rows,),) = connection.sql("select count(*) from requests where shard = 'short-0'").fetchall()
    page.wait_for_function(f"document.querySelector('[data-tile=requests] .figure').innerText === '{rows:,}'")
    assert page.locator(".slo-heat [data-cell^='general-0']").count() == 0
    page.screenshot(path=tmp_path / "filtered.png")
    assert complaints == []


@pytest.mark.parametrize("width", [800, 1400])
def test_tables_are_whole_at_every_width_and_times_are_utc_in_every_zone(
    page: Page, demo: tuple[str, Path], tmp_path: Path, width: int
) -> None:
    address, _ = demo
    assert page.context.browser is not None
    context = page.context.browser.new_context(
        viewport={"width": width, "height": 3600}, timezone_id="America/Los_Angeles"
    )
    try:
        narrow = context.new_page()
        narrow.goto(address)
        narrow.wait_for_function(COMPLETE, timeout=60_000)
        assert narrow.evaluate(CUT) == 0
        (start,) = re.findall(r"30 Nov 2026 (\d\d:\d\d) –", text_of(narrow, ".slo-title"))
        ticks = narrow.locator(".js-plotly-plot .xtick text").all_text_contents()
        assert any(tick.strip().startswith(start[:2]) for tick in ticks), (start, ticks)
        narrow.screenshot(path=tmp_path / f"{width}.png", full_page=True)
    finally:
        context.close()


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    folder = tmp_path_factory.mktemp("probed") / "lake"
    lake = probe_lake.fill(folder, probe_lake.told(3000, seed=41), Buckets())
    for shard in ("a", "b"):
        lake.append("engine_samples", probe_lake.samples(shard, 3600))
    lake.append("engine_samples", probe_lake.samples("stock", 240, "scrape", every=15.0))
    server = Server(folder)
    yield server.address, folder
    assert "Traceback" not in server.stop()


def test_what_blocked_the_queue_is_shown_as_computed_for_the_tail_and_for_all(
    page: Page, probed: tuple[str, Path], tmp_path: Path
) -> None:
    address, folder = probed
    complaints = visited(page, address, PROBED)
    connection = connect(Lake.open(folder, create=False), Buckets())
    whole = extent(connection)
    assert whole is not None
    selection = Selection.around(whole.start, whole.end)
    slow = phases(connection, selection, "rows")
    assert slow is not None
    tail = blocked(connection, selection, "rows", Tail("request_duration", slow.tail_from))
    every = blocked(connection, selection, "rows")
    assert tail.overall is not None
    assert every.overall is not None
    leading = tail.overall.leading
    assert leading is not None
    heading = text_of(page, "[data-section=blocked] h3")
    assert heading.startswith(f"{percent_text(tail.overall.share(leading))} of tail queue time: {names.QUEUE[leading]}")
    for group, table, button in (("tail", tail, "The tail"), ("all", every, "All requests")):
        page.get_by_role("radio", name=button, exact=True).click()
        page.wait_for_selector(f"[data-blocked={group}]")
        for (shard, bucket), cell in table.cells.items():
            text = text_of(page, f"[data-blocked={group}] [data-cell='{shard}|{bucket}']")
            known = f", {cell.known:,} known" if cell.known < cell.rows else ""
            assert text.startswith(seconds_text(cell.mean_queue))
            assert text.endswith(f"n={cell.rows:,}{known}")
            assert ("reason unknown" in text) == (cell.known == 0)
        page.wait_for_function(PROBED)
        strips = page.locator(".js-plotly-plot").nth(2).inner_text()
        for reason in QUEUE_PARTS:
            assert table.overall is not None
            if table.overall.of(reason):
                assert seconds_text(table.overall.of(reason) / 1e9) in strips
    bars = page.locator(".js-plotly-plot").nth(1).inner_text()
    for overall in (tail.overall, every.overall):
        assert all(seconds_text(overall.mean(reason)) in bars for reason in REASONS)
    page.screenshot(path=tmp_path / "probed.png")
    assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [800, 1400])
def test_the_sections_of_the_probe_fit_every_width_and_theme(
    page: Page, probed: tuple[str, Path], tmp_path: Path, width: int, scheme: Literal["light", "dark"]
) -> None:
    address, _ = probed
    assert page.context.browser is not None
    context = page.context.browser.new_context(viewport={"width": width, "height": 6000}, color_scheme=scheme)
    try:
        seen = context.new_page()
        complaints = visited(seen, address, PROBED)
        assert seen.evaluate(CUT) == 0
        overlong = "document.documentElement.scrollWidth > document.documentElement.clientWidth"
        assert not seen.evaluate(overlong)
        headings = seen.locator(".slo-section h3").all_inner_texts()
        assert len(headings) == 10
        assert "did not finish" in headings[5]
        assert "of used slots empty" in headings[7]
        assert "preemptions of" in headings[8]
        seen.screenshot(path=tmp_path / f"{width}-{scheme}.png", full_page=True)
        assert complaints == []
    finally:
        context.close()


def test_an_empty_lake_is_explained(page: Page, tmp_path: Path) -> None:
    fill(tmp_path / "lake", [])
    server = Server(tmp_path / "lake")
    try:
        complaints = visited(page, server.address, "document.querySelector('.slo-help')")
        assert "The lake has no requests yet." in page.inner_text("body")
        page.screenshot(path=tmp_path / "empty.png")
        assert complaints == []
    finally:
        assert "Traceback" not in server.stop()
