from __future__ import annotations

from datetime import UTC, datetime, timedelta

from vllm_slo.analytics.counts import Counts
from vllm_slo.analytics.health import ReceiverState
from vllm_slo.analytics.instances import Instance
from vllm_slo.dashboards.health_table import health_table, level_text

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
NOTHING = Counts(counted=0, errors=0, untold=0, left_out={}, basis="rows")


def test_counts_of_a_receiver_say_since_and_until_when_they_were_counted() -> None:
    old = ReceiverState(counted_at=NOON - timedelta(days=3), accepted=7)
    html = health_table(None, old, NOTHING, (), (), NOON)
    assert "counted since its first start, until</th><td>29 May 12:00:00 UTC, 3 d ago<" in html


def test_a_receiver_that_left_no_counts_is_unknown() -> None:
    html = health_table(None, ReceiverState(), NOTHING, (), (), NOON)
    assert "unknown: no spool of one here" in html
    assert "spans accepted" not in html


def test_the_level_of_a_server_names_the_parts_that_were_seen_and_those_that_were_not() -> None:
    stock = Instance("a", "a", NOON, rows=5, stock=5)
    assert level_text(stock) == "stock vLLM"
    whole = Instance("b", "b", NOON, rows=5, parts=(5, 5, 5), version="0.2.0")
    assert level_text(whole) == "probe 0.2.0: engine, front end, HTTP edge"
    blind = Instance("c", "c", NOON, rows=5, parts=(5, 5, 0))
    assert level_text(blind) == "probe: engine, front end; no HTTP edge"
    idle = Instance("d", "d", NOON, probe_sampled=True)
    assert level_text(idle) == "probe: engine; no front end, no HTTP edge"
    off = Instance("e", "e", NOON, rows=5, parts=(5, 5, 5), silent_since=NOON - timedelta(minutes=4))
    assert level_text(off) == "probe: engine, front end, HTTP edge; silent since 1 Jun 11:56:00 UTC"
    table = health_table(None, ReceiverState(), NOTHING, (), (stock, whole), NOON)
    assert "<th scope='row'>a</th><td>stock vLLM</td>" in table
