from __future__ import annotations

from datetime import UTC, datetime, timedelta

from vllm_slo.analytics.counts import Counts
from vllm_slo.analytics.health import ReceiverState
from vllm_slo.dashboards.health_table import health_table

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
NOTHING = Counts(counted=0, errors=0, untold=0, left_out={}, basis="rows")


def test_counts_of_a_receiver_say_since_and_until_when_they_were_counted() -> None:
    old = ReceiverState(counted_at=NOON - timedelta(days=3), accepted=7)
    html = health_table(None, old, NOTHING, (), NOON)
    assert "counted since its first start, until</th><td>29 May 12:00:00 UTC, 3 d ago<" in html


def test_a_receiver_that_left_no_counts_is_unknown() -> None:
    html = health_table(None, ReceiverState(), NOTHING, (), NOON)
    assert "unknown: no spool of one here" in html
    assert "spans accepted" not in html
