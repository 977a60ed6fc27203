"""Engine load: what the ticks say."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from vllm_slo.analytics.engine_series import GAUGES, EngineSeries
from vllm_slo.dashboards.engine_figure import engine_figure
from vllm_slo.dashboards.palette import palette

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("step", "ticks"),
    [(timedelta(seconds=15), ":%S\n%H:%M"), (timedelta(minutes=5), "%H:%M"), (timedelta(hours=12), None)],
)
def test_ticks_of_a_short_range_tell_the_seconds(step: timedelta, ticks: str | None) -> None:
    times = (NOON, NOON + step, NOON + 2 * step)
    engine = EngineSeries(name="a", times=times, values=dict.fromkeys(GAUGES, (1.0, None, 2.0)))
    layout = engine_figure([engine], step, palette("light"))["layout"]
    assert {layout[axis]["tickformat"] for axis in ("xaxis", "xaxis2")} == {ticks}
