"""The scraping loop: real pages behind a fake transport, a clock that is an argument."""

from __future__ import annotations

import asyncio
import gzip
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import httpx
import pyarrow as pa
import pytest

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.vllm import scrape as module
from vllm_slo.exporters.vllm.changes import Event
from vllm_slo.exporters.vllm.scrape import Scraper, clock_offset_seconds, parse_target, version_url

NOW = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
PAGES = Path(__file__).resolve().parents[1] / "fixtures" / "vllm_metrics"
PAGE = gzip.decompress((PAGES / "aborted.txt.gz").read_bytes()).decode()
MULTIPROCESS = gzip.decompress((PAGES / "multiprocess.txt.gz").read_bytes()).decode()

Handler = Callable[[httpx.Request], Awaitable[httpx.Response]]


class Store:
    """A sink that keeps what it is given, and fails as often as it is told."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.given: list[pa.Table] = []
        self.kept: list[pa.Table] = []
        self.events: list[Event] = []
        self.threads: set[int] = set()

    def __call__(self, rows: pa.Table, events: list[Event]) -> None:
        self.threads.add(threading.get_ident())
        self.given.append(rows)
        if self.failures:
            self.failures -= 1
            raise OSError("the lake is away")
        self.kept.append(rows)
        self.events += events


async def answer(request: httpx.Request) -> httpx.Response:
    if request.url.path == "/version":
        return httpx.Response(200, json={"version": "0.32.0"})
    return httpx.Response(200, text=PAGE, headers={"Date": "Mon, 30 Nov 2026 12:00:07 GMT"})


def scraping(
    handler: Handler, use: Callable[[Scraper], Awaitable[None]], store: Store, *targets: str, timeout: float = 5.0
) -> Scraper:
    """Runs ``use`` on a scraper of the targets; returns the scraper."""

    async def go() -> Scraper:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handler)) as client:
            scraper = Scraper(
                [parse_target(text) for text in targets or ("http://a:8000=general-0@general",)],
                client=client,
                sink=store,
                clock=lambda: NOW,
                interval_seconds=0.05,
                flush_seconds=0.12,
                timeout_seconds=timeout,
            )
            await use(scraper)
            return scraper

    return asyncio.run(go())


async def once(scraper: Scraper) -> None:
    for state in scraper.states:
        await scraper.scrape(state.target)
    await scraper.flush()


def test_a_scrape_gives_rows_the_configuration_and_the_version() -> None:
    store = Store()
    (state,) = scraping(answer, once, store).states
    (rows,) = store.kept
    (row,) = rows.to_pylist()
    assert (row["service_instance_id"], row["shard"], row["vllm_version"]) == ("general-0", "general", "0.32.0")
    assert row["requests_finished_total"] == 13
    assert row["time"] == NOW
    assert [event["kind"] for event in store.events] == ["configuration"]
    assert (state.successes, state.failures, state.last_success, state.vllm_version) == (1, 0, NOW, "0.32.0")
    assert state.clock_offset_seconds == 7.5


def test_the_version_is_asked_once_a_process() -> None:
    asked: list[str] = []

    async def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return await answer(request)

    async def thrice(scraper: Scraper) -> None:
        for _ in range(3):
            await once(scraper)

    scraping(handler, thrice, Store())
    assert asked.count("/metrics") == 3
    assert asked.count("/version") == 1


def test_a_server_without_a_version_is_scraped_all_the_same() -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(404) if request.url.path == "/version" else await answer(request)

    store = Store()
    scraping(handler, once, store)
    assert store.kept[0]["vllm_version"].to_pylist() == [None]


@pytest.mark.parametrize(
    ("status", "fault", "said"),
    [
        (503, None, "503"),
        (0, httpx.ConnectError("connection refused"), "ConnectError: connection refused"),
        (0, httpx.ReadTimeout("slow"), "ReadTimeout"),
        (0, ValueError("a defect"), "ValueError: a defect"),
    ],
)
def test_a_failing_target_is_counted_and_shown_and_the_other_goes_on(
    status: int, fault: Exception | None, said: str
) -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        if request.url.host != "bad":
            return await answer(request)
        if fault is not None:
            raise fault
        return httpx.Response(status)

    store = Store()
    bad, good = scraping(handler, once, store, "http://bad:1=b", "http://good:1=g").states
    assert (bad.successes, bad.failures, bad.failing, bad.last_success, bad.last_failure) == (0, 1, True, None, NOW)
    assert bad.last_error is not None
    assert said in bad.last_error
    assert (good.successes, good.failures) == (1, 0)
    assert store.kept[0]["service_instance_id"].to_pylist() == ["g"]


def test_a_target_that_hangs_costs_the_timeout_and_no_more() -> None:
    async def handler(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(30)
        return await answer(request)

    (state,) = scraping(handler, once, Store(), timeout=0.05).states
    assert (state.failing, state.last_error) == (True, "TimeoutError")


def test_a_page_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PAGE_BYTES", 1000)
    (state,) = scraping(answer, once, Store()).states
    assert state.last_error is not None
    assert "over 1000 bytes" in state.last_error


def test_a_page_without_vllm_series_is_a_warning_that_goes_away() -> None:
    pages = iter(["python_info 1\n", PAGE])

    async def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, text=next(pages)) if request.url.path == "/metrics" else await answer(request)

    warnings: list[str | None] = []

    async def twice(scraper: Scraper) -> None:
        for _ in range(2):
            await once(scraper)
            warnings.append(scraper.states[0].warning)

    store = Store()
    scraping(handler, twice, store)
    assert warnings[0] is not None
    assert "--disable-log-stats" in warnings[0]
    assert warnings[1] is None
    assert [rows.num_rows for rows in store.kept] == [1]


def test_a_recovered_target_keeps_its_last_error_and_tells_a_restart() -> None:
    answers = iter([PAGE, None, MULTIPROCESS])

    async def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/version":
            return await answer(request)
        text = next(answers)
        return httpx.Response(200, text=text) if text is not None else httpx.Response(502)

    async def thrice(scraper: Scraper) -> None:
        for _ in range(3):
            await once(scraper)

    store = Store()
    (state,) = scraping(handler, thrice, store).states
    assert (state.failing, state.failures, state.successes) == (False, 1, 2)
    assert state.last_error is not None
    assert [event["kind"] for event in store.events] == ["configuration", "restart", "configuration"]


def test_a_sink_that_fails_gets_the_same_batch_again_and_nothing_is_doubled() -> None:
    store = Store(failures=2)

    async def thrice(scraper: Scraper) -> None:
        await once(scraper)
        assert scraper.sink_error == "OSError: the lake is away"
        await once(scraper)
        await scraper.flush()

    scraper = scraping(answer, thrice, store)
    assert store.given[0] is store.given[1] is store.given[2]
    assert sum(rows.num_rows for rows in store.kept) == scraper.rows_delivered == 2
    assert len(store.events) == 1
    assert (scraper.sink_failures, scraper.sink_error) == (2, None)


def test_a_sink_that_fails_for_long_costs_the_oldest_rows_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUFFERED_ROWS", 3)
    store = Store(failures=10)

    async def many(scraper: Scraper) -> None:
        for _ in range(10):
            await once(scraper)
        await scraper.flush()

    scraper = scraping(answer, many, store)
    assert scraper.rows_dropped + scraper.rows_delivered == 10
    assert scraper.rows_dropped >= 6


def test_the_loop_scrapes_every_target_and_delivers_in_few_batches_and_at_the_end() -> None:
    store = Store()

    async def handler(request: httpx.Request) -> httpx.Response:
        if request.url.host == "slow":
            await asyncio.sleep(30)
        return await answer(request)

    elapsed = 0.0

    async def run(scraper: Scraper) -> None:
        nonlocal elapsed
        stop, begin = asyncio.Event(), time.monotonic()
        task = asyncio.create_task(scraper.run(stop))
        a, b, slow = range(3)
        while min(scraper.states[a].successes, scraper.states[b].successes, 2 * scraper.states[slow].failures) < 8:
            assert time.monotonic() < begin + 60
            await asyncio.sleep(0.01)
        stop.set()
        await asyncio.wait_for(task, 30)
        elapsed = time.monotonic() - begin

    scraper = scraping(handler, run, store, "http://a:1=a", "http://b:1=b", "http://slow:1=s", timeout=0.1)
    rows = pa.concat_tables(store.kept)
    counts = rows.group_by("service_instance_id").aggregate([([], "count_all")]).to_pydict()
    assert set(counts["service_instance_id"]) == {"a", "b"}
    assert all(8 <= count <= elapsed / 0.05 + 2 for count in counts["count_all"])
    assert len(store.kept) <= elapsed / 0.12 + 2
    assert rows.num_rows == scraper.rows_delivered
    assert threading.get_ident() not in store.threads


@pytest.mark.parametrize(
    ("text", "url", "instance", "shard"),
    [
        ("http://a:8000", "http://a:8000/metrics", "a:8000", None),
        ("a:8000=x", "http://a:8000/metrics", "x", None),
        ("https://a/vllm/metrics/=x@long", "https://a/vllm/metrics", "x", "long"),
        ("https://a", "https://a/metrics", "a:443", None),
        ("http://[::1]:8000", "http://[::1]:8000/metrics", "[::1]:8000", None),
    ],
)
def test_a_target_is_an_address_and_the_name_of_the_instance(
    text: str, url: str, instance: str, shard: str | None
) -> None:
    target = parse_target(text)
    assert (target.url, target.instance, target.shard) == (url, instance, shard)


def test_saved_pages_are_taken_as_they_come_and_never_twice(tmp_path: Path) -> None:
    def save(seconds: float) -> None:
        (tmp_path / f"{NOW.timestamp() + seconds:.0f}.txt").write_text(PAGE)

    save(-60)
    store = Store()

    async def watch(scraper: Scraper) -> None:
        await once(scraper)
        assert scraper.states[0].warning is not None
        save(10)
        save(20)
        await once(scraper)
        await once(scraper)
        save(30)
        await once(scraper)

    (state,) = scraping(answer, watch, store, f"{tmp_path}=general-0@general").states
    rows = pa.concat_tables(store.kept)
    assert [(time - NOW).total_seconds() for time in rows["time"].to_pylist()] == [10, 20, 30]
    assert (state.successes, state.failures, state.warning) == (3, 0, None)
    assert len(store.events) == 1


def test_an_absent_file_is_a_failure_that_is_shown(tmp_path: Path) -> None:
    (state,) = scraping(answer, once, Store(), f"{tmp_path}/none.txt=a").states
    assert state.failing
    assert state.last_error is not None
    assert "none.txt: absent" in state.last_error


@pytest.mark.parametrize("text", ["", "ftp://a", "http://", "http://a:99999", "http://a?x", "http://[::1"])
def test_an_address_that_cannot_be_scraped_is_refused_with_the_cure(text: str) -> None:
    with pytest.raises(SloError, match=r"write http://HOST:PORT=INSTANCE"):
        parse_target(text)


def test_a_saved_page_that_vanishes_while_it_is_read_is_a_failure_and_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def vanish(path: Path, after: datetime) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(module, "pages", vanish)

    async def use(scraper: Scraper) -> None:
        assert not await scraper.scrape(parse_target(f"{tmp_path}=a"))

    scraper = scraping(answer, use, Store(), f"{tmp_path}=a")
    assert scraper.states[0].failing
    assert "FileNotFoundError" in (scraper.states[0].last_error or "")


def test_a_saved_page_needs_the_name_of_its_instance() -> None:
    with pytest.raises(SloError, match="PATH=INSTANCE"):
        parse_target("./page.txt")


def test_a_shard_without_an_instance_is_not_taken_for_a_host() -> None:
    with pytest.raises(SloError, match=r"write http://127\.0\.0\.1:8000=INSTANCE@general"):
        parse_target("http://127.0.0.1:8000@general")
    assert parse_target("http://user:pass@host:8000").instance == "host:8000"


def test_the_version_is_beside_the_page() -> None:
    assert version_url("http://a:8000/metrics") == "http://a:8000/version"


def test_the_clocks_difference_comes_from_the_date_header() -> None:
    assert clock_offset_seconds("Mon, 30 Nov 2026 11:59:59 GMT", NOW) == -0.5
    assert clock_offset_seconds(None, NOW) is None
    assert clock_offset_seconds("yesterday", NOW) is None
