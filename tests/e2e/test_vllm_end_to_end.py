"""A real vLLM sends its spans to `vllm-slo up`; every request sent is found again, with what its client saw."""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import sync_playwright

from e2e.conftest import INSTANCE, SHARD, System
from e2e.product import app, query, vllm_slo
from e2e.vllm_server import MODEL_NAME

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SHORT, MEDIUM, LONG = 94, 5, 1
VISIBLE_WITHIN_SECONDS = 60.0


@dataclass(frozen=True)
class Answered:
    """One request as its client saw it; ``wall`` in epoch seconds, the others in seconds from it."""

    request_id: str
    prompt: int
    completion: int
    wall: float
    ttft: float
    duration: float


CLIENT = httpx.Client(timeout=120, limits=httpx.Limits(max_connections=4, max_keepalive_connections=0))


def send(url: str, request_id: str, prompt: int, completion: int, seed: int) -> Answered:
    """Streams one completion of exactly ``completion`` tokens over a connection of its own."""
    tokens = random.Random(seed).choices(range(2, 1024), k=prompt)
    body = json.dumps(
        {
            "model": MODEL_NAME,
            "prompt": tokens,
            "max_tokens": completion,
            "ignore_eos": True,
            "temperature": 0.7,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    headers = {"X-Request-Id": request_id, "Content-Type": "application/json"}
    wall, start, first, usage = time.time(), time.perf_counter(), None, None
    with CLIENT.stream("POST", f"{url}/v1/completions", content=body, headers=headers) as response:
        assert response.status_code == 200, response.read()
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter()
            usage = json.loads(line.removeprefix("data: ")).get("usage") or usage
    end = time.perf_counter()
    assert first is not None
    assert usage is not None
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, completion)
    return Answered(f"cmpl-{request_id}-0", prompt, completion, wall, first - start, end - start)


def send_all(url: str, prefix: str, sizes: list[tuple[int, int]]) -> list[Answered]:
    """Requests of these (prompt, completion) tokens, four at a time."""
    with ThreadPoolExecutor(4) as pool:
        waiting = [pool.submit(send, url, f"{prefix}-{i:03}", *size, seed=i) for i, size in enumerate(sizes)]
        return [each.result() for each in waiting]


def rows_of(system: System, prefix: str, expected: int) -> dict[str, dict[str, Any]]:
    """Rows whose id begins with the prefix, as soon as there are as many as expected."""
    sql = f"""
        select request_id, trace_id, span_id, parent_span_id, source, shard, model, service_instance_id, bucket,
               quality, prompt_tokens, completion_tokens, max_tokens, epoch_us(start_time) / 1e6 as start,
               time_to_first_token_seconds::double as ttft, request_duration_seconds::double as duration,
               queue_seconds::double as queue, prefill_seconds::double as prefill, decode_seconds::double as decode,
               frontend_seconds::double as frontend, residual_seconds::double as residual,
               frontend_seconds + queue_seconds + prefill_seconds + decode_seconds + residual_seconds
                   = request_duration_seconds as exact
        from requests where request_id like 'cmpl-{prefix}-%'"""
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while True:
        rows = query(system.lake, sql)
        if len(rows) >= expected or time.monotonic() > deadline:
            found = {row["request_id"]: row for row in rows}
            assert len(found) == len(rows), "a request is in the lake twice"
            return found
        time.sleep(1)


@pytest.fixture(scope="module")
def answered(system: System) -> list[Answered]:
    sizes = random.Random(7)
    short = [(sizes.randint(1, 1500), sizes.randint(2, 24)) for _ in range(SHORT)]
    edge = [(4096, 2), (4097, 2)]
    medium = [(sizes.randint(4200, 9000), sizes.randint(2, 8)) for _ in range(MEDIUM - 1)]
    long = [(33_000, 3)] * LONG
    mix = [*short[2:], *edge, *medium, *long, (1, 2)]
    sizes.shuffle(mix)
    return send_all(system.server.url, "load", mix)


@pytest.fixture(scope="module")
def rows(system: System, answered: list[Answered]) -> dict[str, dict[str, Any]]:
    return rows_of(system, "load", len(answered))


def test_every_request_is_in_the_lake_once_with_its_tokens_bucket_shard_and_model(
    answered: list[Answered], rows: dict[str, dict[str, Any]]
) -> None:
    assert rows.keys() == {request.request_id for request in answered}
    for request in answered:
        row = rows[request.request_id]
        assert (row["prompt_tokens"], row["completion_tokens"]) == (request.prompt, request.completion)
        assert row["max_tokens"] == request.completion
        bucket = "short" if request.prompt <= 4096 else "medium" if request.prompt <= 32768 else "long"
        assert row["bucket"] == bucket
        assert (row["shard"], row["service_instance_id"], row["model"]) == (SHARD, INSTANCE, MODEL_NAME)
        assert (row["source"], row["quality"], row["parent_span_id"]) == ("stock", None, None)
        assert (len(row["trace_id"]), len(row["span_id"])) == (32, 16)


def test_the_phases_of_every_request_sum_to_its_duration_exactly(rows: dict[str, dict[str, Any]]) -> None:
    for row in rows.values():
        assert row["exact"] is True
        assert min(row["queue"], row["prefill"], row["decode"]) >= 0
        # The residual alone is below zero when the last token was handed over faster than the first; the time
        # outside the engine core as a whole never is.
        assert row["frontend"] > 0
        assert row["frontend"] + row["residual"] > 0


def test_times_agree_with_the_client_within_the_part_no_span_covers(
    answered: list[Answered], rows: dict[str, dict[str, Any]], record_property: Any
) -> None:
    pairs = [(request, rows[request.request_id]) for request in answered]
    gaps = {
        "time to first token": np.array([request.ttft - row["ttft"] for request, row in pairs]),
        "duration": np.array([request.duration - row["duration"] for request, row in pairs]),
        "way there": np.array([row["start"] - request.wall for request, row in pairs]),
    }
    for what, gap in gaps.items():
        figures = dict(zip(("min", "median", "p95", "max"), np.percentile(gap, [0, 50, 95, 100]) * 1e3, strict=True))
        report = ", ".join(f"{name} {value:.1f}" for name, value in figures.items())
        print(f"client minus lake, {what}, ms: {report}")
        record_property(what, report)
        assert gap.min() > 0, f"a client saw its {what} before the server did"
        # The four clients and the server share the machine: a client reads late while the server computes.
        assert np.median(gap) < 0.2
        assert gap.max() < 5


def test_coverage_is_whole_against_the_counters_of_vllm_itself(system: System, rows: dict[str, dict[str, Any]]) -> None:
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    sql = "select max(requests_finished_total) as finished, count(*) as samples from engine_samples"
    while (sample := query(system.lake, sql)[0])["finished"] != len(rows) and time.monotonic() < deadline:
        time.sleep(1)
    assert sample["finished"] == len(rows), "requests that vLLM finished and nobody sent, or the other way round"
    assert sample["samples"] >= 2
    (covered,) = json.loads(vllm_slo(system.lake, "status", "--json"))["coverage"]
    assert covered["instance"] == INSTANCE
    # Between the first and the last sample in the minutes of the requests, so a few may lie before it.
    assert covered["covered"] == covered["received"] == covered["finished"] > 0


def test_the_scrape_gives_the_engine_and_its_configuration(system: System, rows: dict[str, dict[str, Any]]) -> None:
    assert rows
    (engine,) = query(
        system.lake,
        "select model, engine, last(shard order by time) as shard, any_value(vllm_version) as version,"
        " max(kv_blocks_total) as blocks,"
        " max(kv_block_size_tokens) as block_size, max(prompt_tokens_total) as prompt_tokens,"
        " max(generation_tokens_total) as generation_tokens from engine_samples group by all",
    )
    assert (engine["model"], engine["engine"], engine["block_size"], engine["blocks"]) == (MODEL_NAME, "0", 32, 2600)
    assert engine["shard"] == SHARD, "the page names no shard; the spans of the same instance do"
    assert engine["version"]
    assert engine["prompt_tokens"] == sum(row["prompt_tokens"] for row in rows.values())
    assert engine["generation_tokens"] == sum(row["completion_tokens"] for row in rows.values())
    (event,) = query(system.lake, "select * from events where kind = 'configuration'")
    assert event["service_instance_id"] == INSTANCE
    assert "2600" in event["detail"]


def test_the_spans_of_the_start_are_kept_apart_from_requests(system: System, rows: dict[str, dict[str, Any]]) -> None:
    assert rows
    started = query(system.lake, "select name, quality, count(*) as n from spans group by all")
    assert {"Load model", "Worker init"} <= {row["name"] for row in started}
    assert {row["quality"] for row in started} == {"startup"}


@pytest.mark.browser
def test_the_page_counts_every_request_in_a_real_browser(
    system: System, rows: dict[str, dict[str, Any]], chromium: str
) -> None:
    with app(system.lake) as address, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 1000})
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(address)
        page.get_by_text(f"{len(rows)} requests used, 0 left out").first.wait_for(timeout=30_000)
        text = page.inner_text("body")
        browser.close()
    assert not faults
    assert SHARD in text
    assert all(f"n={count}" in text for count in (SHORT, MEDIUM, LONG)), "a bucket has another count on the page"


def test_vllm_keeps_serving_while_the_receiver_is_away_and_nothing_comes_twice(
    system: System, rows: dict[str, dict[str, Any]]
) -> None:
    assert rows
    assert system.up.stop() == 0
    try:
        away = send_all(system.server.url, "away", [(200, 4)] * 10)
    finally:
        system.up.start()
    back = send_all(system.server.url, "back", [(200, 4)] * 10)
    assert len(away) == len(back) == 10
    # vLLM's exporter tries again for ten seconds, so even those of the pause arrive.
    assert rows_of(system, "away", 10).keys() == {request.request_id for request in away}
    assert rows_of(system, "back", 10).keys() == {request.request_id for request in back}
    assert rows_of(system, "load", len(rows)).keys() == rows.keys()
