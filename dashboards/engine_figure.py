"""Engine load over time: requests running and waiting, and KV cache use, one line an engine."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from vllm_slo.analytics.engine_series import GAUGES, EngineSeries
from vllm_slo.dashboards.figure import Json, layout, time_axis, value_axis, words
from vllm_slo.dashboards.palette import Palette

TITLES: dict[str, str] = {
    "requests_running": "Requests running",
    "requests_waiting": "Requests waiting",
    "kv_cache_usage_ratio": "KV cache in use",
}
PANELS = ((0.0, 0.295), (0.352, 0.648), (0.705, 1.0))
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")


def engine_figure(engines: Sequence[EngineSeries], step: timedelta, palette: Palette) -> Json:
    """Three panels over one range of time; a step without a sample is a gap. Engines differ in dash and shade."""
    times = engines[0].times
    span = [times[0].isoformat(), (times[-1] + step).isoformat()]
    clock = _clock(times[-1] + step - times[0])
    figure = layout(palette, height=250, margin={"t": 30, "b": 64, "l": 40, "r": 52})
    legend = {"orientation": "h", "x": 0, "y": -0.26, "yanchor": "top", "itemwidth": 50}
    figure |= {"showlegend": True, "legend": legend}
    data = []
    for column, (gauge, domain) in enumerate(zip(GAUGES, PANELS, strict=True), start=1):
        axis = "" if column == 1 else str(column)
        percent = gauge.endswith("_ratio")
        more = {"ticksuffix": " %"} if percent else {}
        figure[f"xaxis{axis}"] = time_axis(
            palette, range=span, domain=domain, nticks=6, tickformat=clock, anchor=f"y{axis}"
        )
        figure[f"yaxis{axis}"] = value_axis(palette, rangemode="tozero", nticks=5, anchor=f"x{axis}", **more)
        figure["annotations"].append(words(palette, TITLES[gauge], domain[0], 1.02))
        for index, engine in enumerate(engines):
            data.append(
                {
                    "type": "scatter",
                    "name": engine.name,
                    "legendgroup": engine.name,
                    "showlegend": column == 1,
                    "x": [time.isoformat() for time in times],
                    "y": [v * 100 if percent and v is not None else v for v in engine.values[gauge]],
                    "xaxis": f"x{axis}",
                    "yaxis": f"y{axis}",
                    "mode": "lines+markers",
                    "marker": {"size": 3},
                    "line": {"color": _shade(palette, index), "dash": _DASHES[index % len(_DASHES)], "width": 1.9},
                    "hovertemplate": "%{y:.1f}" + (" %" if percent else ""),
                }
            )
    return {"data": data, "layout": figure}


def _clock(span: timedelta) -> str | None:
    """Format of the ticks: seconds over minutes where ticks share a minute; None lets Plotly choose, with days."""
    if span > timedelta(days=1):
        return None
    return "%H:%M" if span > timedelta(minutes=6) else ":%S\n%H:%M"


def _shade(palette: Palette, index: int) -> str:
    return (palette.strong, palette.medium, palette.weak)[index % 3]
