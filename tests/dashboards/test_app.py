"""The app in every state of its lake, under Streamlit's own test runner."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

import vllm_slo.page
from fixtures.latency_lake import BUCKETS, Request, fill, recorded, table, traffic
from vllm_slo.analytics import rollup
from vllm_slo.config import Config
from vllm_slo.page import LAKE_VARIABLE, receiver_state, settings

PAGE = vllm_slo.page.__file__


@pytest.fixture
def open_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AppTest:
    """The page on the lake in ``tmp_path``, not run yet."""
    monkeypatch.setenv(LAKE_VARIABLE, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return AppTest.from_file(PAGE, default_timeout=60)


def html(page: AppTest) -> str:
    return "\n".join(element.proto.body for element in page.get("html"))


def charts(page: AppTest) -> int:
    return len(page.get("plotly_chart"))


def test_a_lake_that_is_not_there_is_explained(open_page: AppTest, tmp_path: Path) -> None:
    page = open_page.run()
    assert not page.exception
    assert page.error[0].value == "The lake cannot be read."
    assert str(tmp_path) in html(page)


def test_an_empty_lake_says_how_to_fill_it(open_page: AppTest, tmp_path: Path) -> None:
    fill(tmp_path, [])
    page = open_page.run()
    assert not page.exception
    assert page.info[0].value == "The lake has no requests yet."
    assert "--otlp-traces-endpoint" in html(page)


def test_one_request_is_shown_with_its_maximum(open_page: AppTest, tmp_path: Path) -> None:
    fill(tmp_path, [Request()])
    page = open_page.run()
    assert not page.exception
    assert "n=1, too few for P95" in html(page)
    assert "1 request, too few for P" in "".join(chart.proto.spec for chart in page.get("plotly_chart"))
    assert charts(page) == 2


def test_rows_that_are_all_left_out_are_counted_by_reason(open_page: AppTest, tmp_path: Path) -> None:
    fill(tmp_path, [Request(quality="negative_time"), Request(quality="negative_time"), Request(quality="clock_skew")])
    page = open_page.run()
    assert not page.exception
    assert (
        "All 3 requests of this selection are left out of statistics: 1 × clock skew, 2 × negative time"
        in page.warning[0].value
    )
    assert charts(page) == 0


def test_a_damaged_lake_gives_a_message_and_no_traceback(open_page: AppTest, tmp_path: Path) -> None:
    fill(tmp_path, traffic(50, seed=1))
    for file in (tmp_path / "rollups").rglob("*.parquet"):
        file.write_bytes(b"not parquet")
    page = open_page.run()
    assert not page.exception
    assert page.error[0].value == "The lake cannot be read."


def test_a_lake_whose_files_vanish_is_explained_and_read_again_once_they_are_back(
    open_page: AppTest, tmp_path: Path
) -> None:
    fill(tmp_path, traffic(50, seed=1))
    hidden = {file: file.read_bytes() for file in (tmp_path / "rollups").rglob("*.parquet")}
    for file in hidden:
        file.unlink()
    page = open_page.run()
    assert not page.exception
    assert page.error
    for file, content in hidden.items():
        file.write_bytes(content)
    page = page.run()
    assert not page.error
    assert charts(page) == 2


def test_the_page_follows_a_lake_that_is_being_written(open_page: AppTest, tmp_path: Path) -> None:
    lake = fill(tmp_path, traffic(50, seed=1))
    stop = threading.Event()

    def write() -> None:
        for seed in range(2, 40):
            if stop.is_set():
                return
            rows = table(traffic(20, seed))
            lake.append("requests", rows)
            lake.append("rollups", rollup.rows(rows, BUCKETS))

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    try:
        page = open_page
        for _ in range(6):
            page = page.run()
            assert not page.exception
            assert not page.error
            seen.append(html(page))
    finally:
        stop.set()
        writer.join()
    assert len(set(seen)) > 1


def test_filters_change_what_is_counted(open_page: AppTest, tmp_path: Path) -> None:
    requests = traffic(400, seed=4)
    fill(tmp_path, requests)
    page = open_page.run()
    assert f">{len(requests)}<" in html(page)
    page = page.multiselect(key="shard").set_value(["a"]).run()
    assert not page.exception
    assert f">{sum(r.shard == 'a' for r in requests)}<" in html(page)
    page = page.multiselect(key="bucket").set_value([None]).run()
    assert not page.exception
    assert f">{sum(r.shard == 'a' and r.prompt_tokens is None for r in requests)}<" in html(page)


def test_rows_of_servers_and_of_clients_are_never_counted_together(open_page: AppTest, tmp_path: Path) -> None:
    fill(tmp_path, [*traffic(300, seed=5), *(replace(r, source="client") for r in traffic(200, seed=5))])
    page = open_page.run()
    assert not page.exception
    assert ">300<" in html(page)
    page = page.selectbox(key="seen").set_value("client").run()
    assert not page.exception
    assert ">200<" in html(page)


def test_every_choice_of_the_page_draws(open_page: AppTest, tmp_path: Path, captures: Path) -> None:
    recorded(tmp_path, captures)
    page = open_page.run()
    assert charts(page) == 4
    for group in range(len(page.button_group)):
        for option in range(len(page.button_group[group].options)):
            control = page.button_group[group]
            page = control.set_value(control.options[option]).run()
            assert not page.exception
            assert not page.error


def test_the_spool_of_the_receiver_is_found_where_it_is(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "counters.json").write_text('{"spans_accepted": {"grpc": 7}}')
    told = settings(Config(), str(tmp_path), str(tmp_path / "elsewhere"))
    assert told.receiver().accepted == 7
    assert settings(Config(), str(tmp_path)).receiver().counted_at is None
    assert settings(Config(), "s3://bucket/lake").receiver().counted_at is None


def test_the_spool_tells_what_waits_and_what_was_refused(tmp_path: Path) -> None:
    assert receiver_state(tmp_path).counted_at is None
    (tmp_path / "counters.json").write_text(
        '{"spans_accepted": {"grpc": 7, "http": 2}, "spans_refused": {"grpc/bad_id": 2, "http/bad_id": 1}, '
        '"spans_duplicate": {"": 4}}'
    )
    (tmp_path / "000000000001.seg").write_bytes(b"")
    (tmp_path / "000000000002.seg").write_bytes(b"x" * 5000)
    found = receiver_state(tmp_path)
    assert (found.accepted, found.duplicates, found.refused) == (9, 4, {"bad_id": 3})
    assert found.waiting_bytes == 5000
    assert found.waiting_since is not None
