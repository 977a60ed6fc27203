"""The sections that need the probe: what they say of every mix of servers, and that unknown is never zero."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import vllm_slo.page
from fixtures.latency_lake import BUCKETS, NOON
from fixtures.probe_lake import Told, fill, samples, told
from vllm_slo.analytics import rollup
from vllm_slo.analytics.blocked import Blocked, BlockedTable, blocked, blocked_series
from vllm_slo.analytics.kv import KvUse
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.outcomes import outcomes
from vllm_slo.analytics.parts import Tail
from vllm_slo.analytics.phases import phases
from vllm_slo.analytics.preemption import preemption_cost
from vllm_slo.analytics.query import connect
from vllm_slo.analytics.selection import Selection
from vllm_slo.dashboards.blocked_table import blocked_table, reasons_table
from vllm_slo.dashboards.kv_figure import fullest, kv_figure
from vllm_slo.dashboards.palette import palette
from vllm_slo.dashboards.sections import blocked as blocked_view
from vllm_slo.dashboards.sections import endings as endings_view
from vllm_slo.dashboards.sections import kv as kv_view
from vllm_slo.dashboards.sections import preemption as preemption_view
from vllm_slo.dashboards.units import count_text, percent_text
from vllm_slo.page import LAKE_VARIABLE

PAGE = vllm_slo.page.__file__
LIGHT = palette("light")
HOUR = Selection.around(NOON, NOON + timedelta(hours=1))
STEP = timedelta(minutes=10)
WAITS = {"queue_token_budget": 3_000_000_000, "queue_step": 1_000_000_000, "prefill_own": 10_000_000}


@pytest.fixture
def open_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The page on the lake in ``tmp_path``, not run yet."""
    monkeypatch.setenv(LAKE_VARIABLE, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return AppTest.from_file(PAGE, default_timeout=60)


def html(page: AppTest) -> str:
    return "\n".join(element.proto.body for element in page.get("html"))


def sections(page: AppTest) -> dict[str, str]:
    """Heading of each section, in the order of the page."""
    return dict(re.findall(r"data-section='(\w+)'><h3>(.*?)</h3>", html(page)))


def charts(page: AppTest) -> int:
    return len(page.get("plotly_chart"))


def test_a_lake_with_the_probe_has_every_section_in_order(open_page: AppTest, tmp_path: Path) -> None:
    lake = fill(tmp_path, told(1500, seed=3, stock=0.0))
    for shard in ("a", "b"):
        lake.append("engine_samples", samples(shard, 600))
    page = open_page.run()
    assert not page.exception
    found = sections(page)
    assert list(found) == [
        "latency", "time_spent", "blocked", "computing", "over_time", "endings", "engines", "kv", "preemption", "health"
    ]  # fmt: skip
    assert re.fullmatch(r"[\d.]+ % of tail queue time: [a-zA-Z ]+", found["blocked"])
    assert re.fullmatch(r"[\d.]+ % of [\d,]+ requests did not finish", found["endings"])
    assert "preemptions of" in found["preemption"]
    assert "of used slots empty" in found["kv"]
    assert re.fullmatch(r"[\d.]+ % of tail prefill and decode: [a-zA-Z', ]+", found["computing"].replace("&#x27;", "'"))
    assert charts(page) == 9
    assert "probe 0.2.0: engine, front end, HTTP edge" in html(page)


def test_a_lake_of_stock_servers_says_what_it_cannot_show_and_shows_no_zero(open_page: AppTest, tmp_path: Path) -> None:
    lake = fill(tmp_path, told(500, seed=3, stock=1.0))
    lake.append("engine_samples", samples("stock", 20, "scrape", every=15.0))
    page = open_page.run()
    assert not page.exception
    found = sections(page)
    assert list(found) == ["latency", "time_spent", "over_time", "engines", "kv", "unseen", "health"]
    assert found["kv"] == "KV cache: at most 19.0 % of blocks in use"
    shown = html(page)
    assert "how many of their slots hold a token is unknown without the probe" in shown
    assert "are known from stock spans alone" in shown
    assert "stock vLLM" in shown
    assert "did not finish" not in shown
    assert "preempt" not in shown.replace("what preemption cost", "")


def test_a_mix_says_of_how_many_requests_the_reason_is_known(open_page: AppTest, tmp_path: Path) -> None:
    requests = told(1500, seed=5, stock=0.4)
    fill(tmp_path, requests)
    page = open_page.run()
    assert not page.exception
    counts = [r for r in requests if r.quality is None]
    known = sum(r.known for r in counts)
    assert f"{count_text(known)} of {count_text(len(counts))} requests" in html(page)
    assert re.search(r"of tail queue time: [a-zA-Z ]+, [\d.]+ % unknown", sections(page)["blocked"])
    stock = sum(r.source == "stock" and r.quality is None for r in requests)
    assert f"{count_text(stock)} more are known from stock spans alone" in html(page)
    page = page.button_group(key="blocked_group").set_value("all").run()
    assert not page.exception
    assert "Mean queue time of all requests" in html(page)


def test_a_lake_where_nothing_finished_still_tells_how_it_ended(open_page: AppTest, tmp_path: Path) -> None:
    lost = Told(quality="unfinished", finish_reason="rejected", http_status=503, records="edge")
    fill(tmp_path, [lost, lost, replace(lost, finish_reason="failed", http_status=500)])
    page = open_page.run()
    assert not page.exception
    assert "All 3 requests of this selection are left out of statistics: 3 × not finished" in page.warning[0].value
    assert sections(page)["endings"] == "100 % of 3 requests did not finish"
    assert "503 overloaded" in html(page)
    assert "blocked" not in sections(page)
    assert sections(page)["preemption"].startswith("Preemption is unknown")


def test_rows_of_clients_draw_no_section_of_servers(open_page: AppTest, tmp_path: Path) -> None:
    lake = fill(tmp_path, told(200, seed=6, stock=0.0))
    rows = connect(lake, BUCKETS).sql("select * from stored.requests").to_arrow_table()
    place = rows.schema.get_field_index("source")
    clients = rows.set_column(place, "source", [["client"] * rows.num_rows]).cast(rows.schema)
    lake.append("requests", clients)
    lake.append("rollups", rollup.rows(clients, BUCKETS))
    page = open_page.run()
    assert "blocked" in sections(page)
    page = page.selectbox(key="seen").set_value("client").run()
    assert not page.exception
    assert not {"blocked", "computing", "endings", "preemption", "unseen"} & set(sections(page))


@pytest.fixture(scope="module")
def lone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty requests of a server with the probe that wait three quarters of their time for the token budget."""
    folder = tmp_path_factory.mktemp("lone")
    fill(folder, [Told(at=NOON + timedelta(minutes=i), parts=WAITS) for i in range(40)])
    return folder


def test_the_heading_names_what_the_tail_waited_for(lone: Path) -> None:
    connection = connect(Lake.open(lone, create=False), BUCKETS)
    slow = phases(connection, HOUR, "rows")
    assert slow is not None
    tail = blocked(connection, HOUR, "rows", Tail("request_duration", slow.tail_from)).overall
    assert blocked_view.headline(tail, slow) == "75.0 % of tail queue time: token budget"
    assert tail is not None
    stock = replace(tail, known=0, nanoseconds=(0, 0, 0, 0, 0, tail.queue_nanoseconds))
    assert blocked_view.headline(stock, slow).startswith("What blocked the queue of the tail is unknown")
    assert slow.tail is not None
    brief = replace(tail, nanoseconds=(0, slow.tail.measured_nanoseconds // 200, 0, 0, 0, 0))
    assert blocked_view.headline(brief, slow).startswith("The tail hardly waits in the queue")
    assert blocked_view.headline(None, slow) == "What blocked the queue"


def test_bars_of_a_panel_sum_to_the_whole_and_unknown_is_hatched(lone: Path) -> None:
    connection = connect(Lake.open(lone, create=False), BUCKETS)
    every = blocked(connection, HOUR, "rows").overall
    assert every is not None
    mixed = every + Blocked(10, 0, (0, 0, 0, 0, 0, every.queue_nanoseconds))
    figure = blocked_view.blocked_figure(mixed, every, None, LIGHT)
    left, right = (trace for trace in figure["data"] if trace["type"] == "bar")
    assert sum(left["x"]) == pytest.approx(100)
    assert sum(right["x"]) == pytest.approx(100)
    assert left["y"][-1] == "Unknown"
    assert left["x"][-1] == pytest.approx(50)
    assert left["marker"]["pattern"]["shape"] == ["", "", "", "", "", "/"]
    alone = blocked_view.blocked_figure(every, None, None, LIGHT)
    assert "Unknown" not in alone["data"][0]["y"]
    assert "no request" in str(alone["layout"]["annotations"])
    unseen = blocked_view.blocked_figure(Blocked(10, 0, (0, 0, 0, 0, 0, 5)), None, None, LIGHT)
    texts = unseen["data"][1]["text"]
    assert texts[:5] == ["unknown"] * 5
    assert texts[5].endswith("100 %")


def test_strips_leave_a_gap_where_nobody_arrived_and_share_one_scale(lone: Path) -> None:
    connection = connect(Lake.open(lone, create=False), BUCKETS)
    whole = blocked(connection, HOUR, "rows").overall
    assert whole is not None
    figure = blocked_view.blocked_strips(blocked_series(connection, HOUR, "rows", STEP), whole, LIGHT)
    assert [trace["name"] for trace in figure["data"]] == ["token budget", "step boundary"]
    for trace, seconds in zip(figure["data"], (3, 1), strict=True):
        assert trace["y"] == [10 * seconds] * 4 + [None] * 2
    assert figure["layout"]["yaxis"]["range"] == figure["layout"]["yaxis2"]["range"]
    assert figure["layout"]["yaxis"]["ticktext"] == ["", "30.0 s"]


def test_cells_say_the_leading_reason_or_that_it_is_unknown() -> None:
    second = 1_000_000_000
    table = BlockedTable(
        {
            ("a", "short"): Blocked(10, 10, (second, 9 * second, 0, 0, 0, 0)),
            ("a", "long"): Blocked(10, 10, (0, 0, 0, 0, 1000, 0)),
            ("b<", "short"): Blocked(4, 0, (0, 0, 0, 0, 0, 8 * second)),
            ("b<", "long"): Blocked(4, 1, (0, second, 0, 0, 0, 3 * second)),
        },
        Blocked(28, 21, (second, 10 * second, 0, 0, 1000, 11 * second)),
    )
    shown = blocked_table("t", "tail", table, ("short", "medium", "long"), LIGHT)

    def cell(place: str) -> str:
        (inside,) = re.findall(f"data-cell='{place}'.*?</td>", shown)
        return " ".join(re.sub(r"<[^>]*>", " ", inside.partition(">")[2]).split())

    assert cell("a\\|short") == "1.00 s token budget 90.0 % n=10"
    assert cell("a\\|long") == "0.000 ms hardly a wait n=10"
    assert cell("b&lt;\\|short") == "2.00 s reason unknown n=4, 0 known"
    assert cell("b&lt;\\|long") == "1.00 s unknown 75.0 % n=4, 1 known"
    assert cell("a\\|medium") == "no data"
    figures = reasons_table(table)
    assert "<td>28</td><td>21</td><td>22.000 s</td>" in figures


def test_the_cost_of_preemption_is_unknown_none_or_told(tmp_path: Path) -> None:
    def cost(name: str, *requests: Told) -> tuple[str, str]:
        found = preemption_cost(connect(fill(tmp_path / name, requests), BUCKETS), HOUR, "rows", STEP)
        return preemption_view.headline(found), preemption_view.under(found)

    decode = {"decode_work": 900_000_000}
    assert cost("stock", Told(parts=decode, records="stock"))[0].startswith("Preemption is unknown")
    assert cost("calm", Told(parts=decode)) == (
        "No request was preempted",
        "Of 1 requests from engines with the probe.",
    )
    hit = Told(parts=decode, preempted=75_000_000, recompute=25_000_000, preemptions=2, lost_tokens=900)
    title, text = cost("hit", hit, replace(hit, quality="unfinished"), Told(records="stock"))
    assert title == "Preemption took 10.0 % of decode time: 2 preemptions of 1 requests"
    assert "of 1 others it is unknown" in text
    assert "900 computed tokens were thrown away" in text
    assert "75.0 ms waiting to run again and 25.0 ms computing again" in text
    assert "2 more preemptions of requests that did not finish" in text


def test_endings_are_shares_of_the_requests_that_tell(tmp_path: Path) -> None:
    lost = Told(quality="unfinished", finish_reason="abort", client_disconnected=True, records="engine+frontend+edge")
    requests = [Told(), Told(), Told(records="stock"), lost, replace(lost, at=NOON + STEP)]
    found = outcomes(connect(fill(tmp_path, requests), BUCKETS), HOUR, "rows", STEP)
    assert endings_view.headline(found) == "50.0 % of 4 requests did not finish"
    assert "1 more are known from stock spans alone" in endings_view.under(found)
    figure = endings_view.endings_figure(found, LIGHT)
    assert [trace["name"] for trace in figure["data"]] == ["all requests", "aborted"]
    assert figure["data"][0]["y"] == [0.4, 0.1, 0, 0, 0, 0]
    assert figure["data"][1]["y"] == [0.1, 0.1, 0, 0, 0, 0]
    silent = outcomes(
        connect(fill(tmp_path / "silent", [lost, Told(at=NOON + STEP, records="stock")]), BUCKETS), HOUR, "rows", STEP
    )
    assert endings_view.endings_figure(silent, LIGHT)["data"][1]["y"][:2] == [0.1, None]


def use(name: str, stored: bool = True, most: float = 0.5) -> KvUse:
    times = (NOON, NOON + STEP)
    known: tuple[float | None, ...] = (0.3, None)
    nothing: tuple[float | None, ...] = (None, None)
    return KvUse(
        name, "probe" if stored else "scrape", times, (0.4, None), known if stored else nothing,
        (0.1, None) if stored else nothing, most, 0.25 if stored else None, 1000.0,
    )  # fmt: skip


def test_kv_panels_draw_only_what_is_known() -> None:
    figure = kv_figure([use("a"), use("b", stored=False)], STEP, LIGHT)
    lines = {(trace["xaxis"], trace["name"]): trace["y"] for trace in figure["data"]}
    assert lines == {
        ("x", "slots that hold a token"): [30.0, None],
        ("x", "blocks in use"): [40.0, None],
        ("x", "in use or cached"): [50.0, None],
        ("x2", "blocks in use"): [40.0, None],
    }
    assert [trace["name"] for trace in figure["data"] if trace["showlegend"]] == [
        "slots that hold a token", "blocks in use", "in use or cached"
    ]  # fmt: skip
    assert figure["layout"]["yaxis"]["range"] == figure["layout"]["yaxis2"]["range"]
    json.dumps(figure)
    title, under = kv_view.headline([use("a"), use("b", stored=False, most=0.9)])
    assert title == "KV cache: at most 90.0 % of blocks in use (b); 25.0 % of used slots empty (a)"
    assert "internal fragmentation" in under
    assert kv_view.headline([use("b", stored=False)])[0] == "KV cache: at most 50.0 % of blocks in use"


def test_of_many_engines_the_fullest_are_drawn() -> None:
    many = [use(f"e{i:02d}", most=i / 100) for i in range(20)]
    kept = fullest(many)
    assert [each.name for each in kept] == [f"e{i:02d}" for i in range(12, 20)]
    domains = {tuple(kv_figure(kept, STEP, LIGHT)["layout"][f"xaxis{i}"]["domain"]) for i in ("", 2, 3, 4, 5)}
    assert len(domains) == 4
    assert percent_text(0.19) in str(kv_figure(kept, STEP, LIGHT)["layout"]["annotations"])
