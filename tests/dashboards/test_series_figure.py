from __future__ import annotations

from datetime import UTC, datetime, timedelta

from vllm_slo.analytics.series import SERIES_QUANTILES, Series
from vllm_slo.dashboards.series_figure import thin_note

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


def series(*rows: int) -> Series:
    step = timedelta(minutes=1)
    values = dict.fromkeys(SERIES_QUANTILES, tuple(0.5 if n else None for n in rows))
    return Series("queue", "rows", step, tuple(NOON + step * i for i in range(len(rows))), rows, values)


def test_steps_with_too_few_requests_for_their_p99_are_told() -> None:
    assert thin_note(series(0, 10, 999, 1000)) == (
        "2 of 3 steps have fewer than 1,000 requests: their P99 lies near the slowest request."
    )
    assert thin_note(series(0, 1000, 5000)) == ""
