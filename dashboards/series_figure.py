"""Latency over time: one line a percentile, told apart by width, dash and a label; requests a step under it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vllm_slo.analytics.marks import Mark
from vllm_slo.analytics.percentiles import needed
from vllm_slo.analytics.series import SERIES_QUANTILES, Series
from vllm_slo.dashboards.figure import SMALL, Json, layout, time_axis, value_axis, words
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.units import count_text, quantile_text, seconds_text, step_text

_DASHES = {0.5: "dot", 0.95: "dash", 0.99: "solid"}
_WIDTHS = {0.5: 1.6, 0.95: 1.8, 0.99: 2.4}
MOST_LABELS = 12
"""With more moments than this only the lines of the events are drawn; the list below the figure names them."""


def series_figure(series: Series, marks: Sequence[Mark], palette: Palette) -> Json:
    """The figure; a step without requests is a gap. The axis is logarithmic unless a value is not positive."""
    latency = _latency_axis(series)
    times = [time.isoformat() for time in series.times]
    start, end = series.times[0], series.times[-1] + series.step
    colours = {0.5: palette.medium, 0.95: palette.medium, 0.99: palette.strong}
    data: list[Json] = [
        {
            "type": "scatter",
            "name": quantile_text(quantile),
            "x": times,
            "y": series.values[quantile],
            "mode": "lines+markers",
            "marker": {"size": 3.5},
            "line": {"color": colours[quantile], "dash": _DASHES[quantile], "width": _WIDTHS[quantile]},
            "connectgaps": False,
            "customdata": ["" if value is None else seconds_text(value) for value in series.values[quantile]],
            "hovertemplate": "%{customdata}",
        }
        for quantile in SERIES_QUANTILES
    ]
    data.append(
        {
            "type": "bar",
            "name": "requests",
            "x": [(time + series.step / 2).isoformat() for time in series.times],
            "y": [n or None for n in series.rows],
            "width": series.step.total_seconds() * 1000 * 0.9,
            "marker": {"color": palette.weak},
            "hovertemplate": "%{y:,}",
            "yaxis": "y2",
        }
    )
    figure = layout(palette, height=380, margin={"l": 62, "r": 52, "t": 26, "b": 48})
    figure["xaxis"] = time_axis(palette, range=[start.isoformat(), end.isoformat()], anchor="y2")
    figure["yaxis"] = value_axis(palette, domain=[0.24, 1.0], **latency)
    per_step = {"text": f"requests<br>per {step_text(series.step)}", "font": {"size": SMALL}}
    figure["yaxis2"] = value_axis(palette, domain=[0.0, 0.19], nticks=3, rangemode="tozero", title=per_step)
    figure["annotations"] += _line_names(series, latency, palette)
    shapes, titles = _events([mark for mark in marks if start <= mark.time <= end], palette)
    figure["shapes"] += shapes
    figure["annotations"] += titles
    return {"data": data, "layout": figure}


def thin_note(series: Series) -> str:
    """A sentence where steps have fewer requests than their highest percentile needs."""
    quantile = max(SERIES_QUANTILES)
    drawn = [rows for rows in series.rows if rows]
    thin = sum(rows < needed(quantile) for rows in drawn)
    if not thin:
        return ""
    few = (
        f"{count_text(thin)} of {count_text(len(drawn))} steps have fewer than {count_text(needed(quantile))} requests"
    )
    return f"{few}: their {quantile_text(quantile)} lies near the slowest request."


def _latency_axis(series: Series) -> Json:
    values = [value for line in series.values.values() for value in line if value is not None]
    if not values or min(values) <= 0:
        return {"ticksuffix": " s", "range": [0, 1.05 * max([*values, 1e-3])]}
    low = math.floor(math.log10(min(values)) * 3) / 3
    high = max(math.ceil(math.log10(max(values)) * 3) / 3, low + 1 / 3)
    digits = (1,) if high - low > 2.5 else (1, 3) if high - low > 1.2 else (1, 2, 5)
    ticks = [digit * 10.0**power for power in range(math.floor(low), math.ceil(high) + 1) for digit in digits]
    shown = [tick for tick in ticks if low - 1e-9 <= math.log10(tick) <= high + 1e-9]
    return {"type": "log", "range": [low, high], "tickvals": shown, "ticktext": [_tick(tick) for tick in shown]}


def _tick(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"


def _line_names(series: Series, latency: Json, palette: Palette) -> list[Json]:
    """The name of each line at the height of its last point, moved apart where they would lie on each other."""
    low, high = latency["range"]
    ends = []
    for quantile in SERIES_QUANTILES:
        known = [value for value in series.values[quantile] if value is not None]
        if known:
            ends.append((math.log10(known[-1]) if latency.get("type") == "log" else known[-1], quantile))
    named, floor = [], -math.inf
    for end, quantile in sorted(ends):
        floor = max(end, floor + 0.08 * (high - low))
        text = f"<b>{quantile_text(quantile)}</b>"
        named.append(words(palette, text, 1.006, floor, yref="y", yanchor="middle"))
    return named


def _events(marks: Sequence[Mark], palette: Palette) -> tuple[list[Json], list[Json]]:
    """A line through both panels at each moment with events, and its title while there are few."""
    moments = sorted({mark.time for mark in marks})
    shapes = [
        {"type": "line", "x0": time.isoformat(), "x1": time.isoformat(), "yref": "paper", "y0": 0, "y1": 1,
         "line": {"color": palette.text, "width": 1, "dash": "2px,3px"}}
        for time in moments
    ]  # fmt: skip
    titles = []
    for time in moments if len(moments) <= MOST_LABELS else ():
        same = [mark.title for mark in marks if mark.time == time]
        text = same[0] if len(same) == 1 else f"{len(same)} events"
        font = {"size": SMALL, "color": palette.quiet}
        titles.append(words(palette, f"▾ {text}", 0, 1.0, xref="x", font=font, xshift=-6) | {"x": time.isoformat()})
    return shapes, titles
