"""What the page says of prefill and decode, and of those that were in the way."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest

from fixtures.latency_lake import BUCKETS, NOON
from fixtures.probe_lake import Told, fill
from vllm_slo.analytics.blockers import Blocker
from vllm_slo.analytics.computing import Computing, computing
from vllm_slo.analytics.parts import Tail
from vllm_slo.analytics.phases import Phases, phases
from vllm_slo.analytics.query import connect
from vllm_slo.analytics.selection import Selection
from vllm_slo.dashboards.blockers_table import blockers_table
from vllm_slo.dashboards.palette import palette
from vllm_slo.dashboards.sections import computing as view

HOUR = Selection.around(NOON, NOON + timedelta(hours=1))
SECOND = 1_000_000_000
PARTS = {"queue_step": SECOND, "prefill_own": SECOND, "decode_work": SECOND, "decode_interference": 6 * SECOND}


def looked(folder: Path, *requests: Told) -> tuple[Computing, Computing | None, Phases]:
    connection = connect(fill(folder, requests), BUCKETS)
    slow, every = phases(connection, HOUR, "rows"), computing(connection, HOUR, "rows")
    assert slow is not None
    assert every is not None
    tail = computing(connection, HOUR, "rows", "request_duration", Tail(slow.measure, slow.tail_from))
    return every, tail, slow


def test_the_heading_names_what_took_most_of_the_tail(tmp_path: Path) -> None:
    every, tail, slow = looked(tmp_path, *[Told(parts=PARTS, frontend=0, residual=SECOND)] * 20)
    assert view.headline(tail, slow) == "75.0 % of tail prefill and decode: others' prefill, between tokens"
    assert view.under(every, tail, slow).startswith("Prefill and decode: 80.0 % of the tail's time.")
    figure = view.computing_figure(every, tail, slow, palette("light"))
    left, right = (trace for trace in figure["data"] if trace["type"] == "bar")
    assert sum(left["x"]) == sum(right["x"]) == pytest.approx(100)
    assert "Unknown" not in left["y"]


def test_time_of_requests_without_the_probe_is_unknown_and_never_zero(tmp_path: Path) -> None:
    every, tail, slow = looked(tmp_path / "stock", *[Told(parts=PARTS, records="stock")] * 20)
    assert view.headline(tail, slow).startswith("What made prefill and decode of the tail long is unknown")
    assert "0 of 20 requests, 0 of 20 in the tail, have a record" in view.under(every, tail, slow)
    figure = view.computing_figure(every, tail, slow, palette("light"))
    assert figure["data"][1]["text"][:-1] == ["unknown"] * 8
    assert figure["data"][1]["text"][-1].endswith("100 %")
    assert figure["data"][0]["marker"]["pattern"]["shape"][-1] == "/"
    mixed = looked(tmp_path / "mixed", Told(parts=PARTS), Told(parts=PARTS, records="stock"))
    assert view.headline(mixed[1], mixed[2]).endswith("others' prefill, between tokens, 50.0 % unknown")


def test_a_tail_that_only_waits_is_not_blamed_on_computing(tmp_path: Path) -> None:
    waits = {"queue_kv_blocks": 100 * SECOND, "prefill_own": SECOND // 100}
    _, tail, slow = looked(tmp_path, *[Told(parts=waits)] * 20)
    assert view.headline(tail, slow) == "The tail is hardly in prefill and decode: 10.0 ms on average"
    assert view.headline(None, slow) == "What made prefill and decode long"


def test_who_was_in_the_way_is_told_with_what_the_lake_has_of_it() -> None:
    known = Blocker("cmpl-1<", "queue_token_budget", 3, 12 * SECOND, "medium", 30_000, "acme")
    gone = Blocker("cmpl-2", "queue_kv_blocks", 1, SECOND)
    shown = blockers_table([known, gone])
    assert "<th scope='row'>cmpl-1&lt;</th><td>medium</td><td>30,000</td><td>acme</td><td>token budget</td>" in shown
    assert "<td>unknown</td><td>unknown</td><td>none named</td><td>KV blocks</td><td>1</td><td>1.00 s</td>" in shown
    assert "tenant" not in blockers_table([gone])
