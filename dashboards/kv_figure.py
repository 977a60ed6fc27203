"""KV use of each engine as small multiples: blocks in use, slots that hold a token, cached blocks."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from vllm_slo.analytics.kv import KvUse
from vllm_slo.dashboards.figure import SMALL, Json, layout, time_axis, value_axis, words
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.strips_figure import clock
from vllm_slo.dashboards.units import count_text, percent_text

MOST_ENGINES = 8
COLUMNS = 4
ROW, TOP, GAP, BOTTOM = 120, 44, 84, 72
SPACE = 0.045
"""Pixels of a row of panels, above the first, between two rows, and under the last."""


def fullest(found: Sequence[KvUse]) -> tuple[KvUse, ...]:
    """The MOST_ENGINES with the highest use, in their order."""
    kept = {each.name for each in sorted(found, key=lambda each: -(each.used_max or 0.0))[:MOST_ENGINES]}
    return tuple(each for each in found if each.name in kept)


def kv_figure(engines: Sequence[KvUse], step: timedelta, palette: Palette) -> Json:
    """One panel an engine, all on one scale; a step without a sample is a gap, an unknown line is absent."""
    columns = min(COLUMNS, max(2, len(engines)))
    rows = -(-len(engines) // columns)
    inner = rows * ROW + (rows - 1) * GAP
    figure = layout(palette, height=inner + TOP + BOTTOM, margin={"t": TOP, "b": BOTTOM, "l": 44, "r": 10})
    legend = {"orientation": "h", "x": 0, "y": -44 / inner, "yanchor": "top", "itemwidth": 40}
    figure |= {"showlegend": True, "legend": legend}
    times = engines[0].times
    span = [times[0].isoformat(), (times[-1] + step).isoformat()]
    values = [v for each in engines for line in (each.used, each.stored, _kept(each)) for v in line if v is not None]
    top = min(102.0, 108 * max(values, default=1.0)) or 1.0
    ticks = clock(times[-1] + step - times[0])
    small = {"size": SMALL + 1, "color": palette.text}
    data: list[Json] = []
    named: set[str] = set()
    for index, each in enumerate(engines):
        axis = "" if index == 0 else str(index + 1)
        row, column = divmod(index, columns)
        width = (1 - SPACE * (columns - 1)) / columns
        left, high = column * (width + SPACE), 1 - row * (ROW + GAP) / inner
        figure[f"xaxis{axis}"] = time_axis(
            palette, range=span, domain=[left, left + width], anchor=f"y{axis}", nticks=3, tickformat=ticks
        )
        figure[f"yaxis{axis}"] = value_axis(
            palette,
            domain=[max(high - ROW / inner, 0.0), high],
            anchor=f"x{axis}",
            range=[0, top],
            nticks=4,
            ticksuffix=" %",
            showticklabels=column == 0,
        )
        figure["annotations"] += [
            words(palette, f"<b>{each.name}</b><br>{_facts(each)}", left, high, yshift=2, font=small)
        ]
        x = [time.isoformat() for time in times]
        for name, line, style in _lines(each, palette):
            shown = name not in named
            named.add(name)
            data.append(
                {
                    "type": "scatter",
                    "name": name,
                    "legendgroup": name,
                    "showlegend": shown,
                    "x": x,
                    "y": [None if v is None else v * 100 for v in line],
                    "xaxis": f"x{axis}",
                    "yaxis": f"y{axis}",
                    "connectgaps": False,
                    "hovertemplate": "%{y:.1f} %",
                    **style,
                }
            )
    return {"data": data, "layout": figure}


def _lines(each: KvUse, palette: Palette) -> list[tuple[str, Sequence[float | None], Json]]:
    """Name, shares and look of the lines; what fills the gap between tokens and blocks comes right after the tokens."""
    blocks: Json = {"mode": "lines+markers", "marker": {"size": 2.5}, "line": {"color": palette.strong, "width": 2}}
    if not each.occupancy_known:
        return [("blocks in use", each.used, blocks)]
    tokens: Json = {
        "mode": "lines", "line": {"color": palette.medium, "width": 1.6, "dash": "dash"},
    }  # fmt: skip
    kept: Json = {"mode": "lines", "line": {"color": palette.quiet, "width": 1.2, "dash": "dot"}}
    return [
        ("slots that hold a token", each.stored, tokens),
        ("blocks in use", each.used, blocks | {"fill": "tonexty", "fillcolor": palette.faint}),
        ("in use or cached", _kept(each), kept),
    ]


def _kept(each: KvUse) -> tuple[float | None, ...]:
    return tuple(
        None if used is None or cached is None else used + cached
        for used, cached in zip(each.used, each.cached, strict=True)
    )


def _facts(each: KvUse) -> str:
    most = "" if each.used_max is None else f"max {percent_text(each.used_max)}"
    most += "" if each.blocks is None else f" of {count_text(round(each.blocks))}"
    if each.wasted_ratio is not None:
        return f"{most}; {percent_text(each.wasted_ratio)} empty"
    return most if each.occupancy_known else f"{most}; tokens unknown"
