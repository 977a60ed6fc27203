"""Engine load over time: requests running and waiting, one line an engine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from vllm_slo.analytics.engine_series import GAUGES, EngineSeries
from vllm_slo.dashboards.figure import Json, layout, time_axis, value_axis, words
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.strips_figure import clock

TITLES: dict[str, str] = {
    "requests_running": "Requests running",
    "requests_waiting": "Requests waiting",
}
PANELS = ((0.0, 0.47), (0.53, 1.0))
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def engine_figure(engines: Sequence[EngineSeries], step: timedelta, palette: Palette) -> Json:
    """Two panels over one range of time; a step without a sample is a gap. Engines differ in dash and shade."""
    times = engines[0].times
    span = [times[0].isoformat(), (times[-1] + step).isoformat()]
    ticks = clock(times[-1] + step - times[0])
    figure = layout(palette, height=250, margin={"t": 30, "b": 64, "l": 40, "r": 52})
    legend = {"orientation": "h", "x": 0, "y": -0.26, "yanchor": "top", "itemwidth": 50}
    figure |= {"showlegend": True, "legend": legend}
    data = []
    for column, (gauge, domain) in enumerate(zip(GAUGES, PANELS, strict=True), start=1):
        axis = "" if column == 1 else str(column)
        figure[f"xaxis{axis}"] = time_axis(
            palette, range=span, domain=domain, nticks=6, tickformat=ticks, anchor=f"y{axis}"
        )
        figure[f"yaxis{axis}"] = value_axis(palette, rangemode="tozero", nticks=5, anchor=f"x{axis}")
        figure["annotations"].append(words(palette, TITLES[gauge], domain[0], 1.02))
        for index, engine in enumerate(engines):
            data.append(
                {
                    "type": "scatter",
                    "name": engine.name,
                    "legendgroup": engine.name,
                    "showlegend": column == 1,
                    "x": [time.isoformat() for time in times],
                    "y": list(engine.values[gauge]),
                    "xaxis": f"x{axis}",
                    "yaxis": f"y{axis}",
                    "mode": "lines+markers",
                    "marker": {"size": 3},
                    "line": {"color": _shade(palette, index), "dash": _DASHES[index % len(_DASHES)], "width": 1.9},
                    "hovertemplate": "%{y:.1f}",
                }
            )
    return {"data": data, "layout": figure}


def _shade(palette: Palette, index: int) -> str:
    return (palette.strong, palette.medium, palette.weak)[index % 3]
