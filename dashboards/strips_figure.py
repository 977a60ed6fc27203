"""Quantities over one range of time, a thin strip of bars each, with the name in front and the total behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from vllm_slo.dashboards.figure import SMALL, Json, layout, time_axis, value_axis, words
from vllm_slo.dashboards.palette import Palette

HEIGHT, GAP, AXIS = 34, 12, 34
"""Pixels of a strip, between two, and under the last one."""
LEFT, RIGHT = 205, 130


@dataclass(frozen=True)
class Strip:
    """One strip. ``values`` a step, None where nothing is known: a gap. ``texts`` say each value, for the pointer.

    Strips of one ``scale`` have the same height for the same value; ``top`` says the value of the full height.
    """

    name: str
    values: Sequence[float | None]
    texts: Sequence[str]
    total: str
    scale: str
    strong: bool = False
    hatched: bool = False


def strips_figure(
    strips: Sequence[Strip], times: Sequence[datetime], step: timedelta, palette: Palette, tops: dict[str, str]
) -> Json:
    """The strips under each other; ``tops`` says the highest value of each scale."""
    count = len(strips)
    inner = count * HEIGHT + (count - 1) * GAP
    figure = layout(palette, height=inner + AXIS + 12, margin={"t": 12, "b": AXIS, "l": LEFT, "r": RIGHT})
    figure["bargap"] = 0
    highest = {
        scale: max((v for strip in strips if strip.scale == scale for v in strip.values if v is not None), default=0.0)
        for scale in {strip.scale for strip in strips}
    }
    span = [times[0].isoformat(), (times[-1] + step).isoformat()]
    middles = [(time + step / 2).isoformat() for time in times]
    figure["xaxis"] = time_axis(
        palette,
        range=span,
        anchor="y" if count == 1 else f"y{count}",
        nticks=8,
        tickformat=_one_line(times[-1] + step - times[0]),
    )
    data = []
    for number, strip in enumerate(strips, start=1):
        axis = "" if number == 1 else str(number)
        high = 1 - (number - 1) * (HEIGHT + GAP) / inner
        low = high - HEIGHT / inner
        top = highest[strip.scale] or 1.0
        first = number == 1 or strips[number - 2].scale != strip.scale
        figure[f"yaxis{axis}"] = value_axis(
            palette,
            domain=[max(low, 0.0), min(high, 1.0)],
            range=[0, top * 1.02],
            tickvals=[0, top] if first else [0],
            ticktext=["", tops[strip.scale]] if first else [""],
            tickfont={"size": SMALL, "color": palette.quiet},
            automargin=False,
            showgrid=True,
        )
        middle = (low + high) / 2
        placed = {"xref": "paper", "yref": "paper", "yanchor": "middle"}
        figure["annotations"] += [
            words(palette, strip.name, 0, middle, **placed, xshift=-LEFT, font={"size": 13, "color": palette.text}),
            words(palette, strip.total, 1, middle, **placed, xshift=10, font={"size": 13, "color": palette.text}),
        ]
        figure["shapes"].append(
            {"type": "line", "xref": "paper", "yref": "paper", "x0": 0, "x1": 1, "y0": low, "y1": low,
             "line": {"color": palette.line, "width": 1}}
        )  # fmt: skip
        marker: Json = {"color": palette.strong if strip.strong else palette.medium, "line": {"width": 0}}
        if strip.hatched:
            marker |= {"color": palette.weak, "pattern": {"shape": "/", "fgcolor": palette.text, "size": 5}}
        data.append(
            {
                "type": "bar",
                "name": strip.name,
                "x": middles,
                "y": list(strip.values),
                "width": step.total_seconds() * 1000 * 0.9,
                "yaxis": f"y{axis}",
                "marker": marker,
                "customdata": list(strip.texts),
                "hovertemplate": "%{customdata}",
            }
        )
    return {"data": data, "layout": figure}


def clock(span: timedelta) -> str | None:
    """Format of the ticks: seconds over minutes where ticks share a minute; None lets Plotly choose, with days."""
    if span > timedelta(days=1):
        return None
    return "%H:%M" if span > timedelta(minutes=6) else ":%S\n%H:%M"


def _one_line(span: timedelta) -> str | None:
    """The same format without a second line, for which strips have no room."""
    ticks = clock(span)
    return "%H:%M:%S" if ticks and "\n" in ticks else ticks
