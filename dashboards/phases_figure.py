"""Phases of the median and of the tail side by side: share of the mean measured time, with the time in words."""

from __future__ import annotations

from vllm_slo.analytics.phases import MEDIAN_BAND, PARTS, Group, Phases
from vllm_slo.dashboards import names
from vllm_slo.dashboards.figure import Json, layout, words
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.units import count_text, percent_text, quantile_text, seconds_text

PANELS = ((0.0, 0.47), (0.53, 1.0))
WIDEST_PERCENT = 128
"""End of the scale: 100 % and room for the words behind a bar."""


def phases_figure(phases: Phases, palette: Palette) -> Json:
    """Two panels of bars on one scale of percent. The bars of a panel sum to its mean time; a part can be negative."""
    parts = PARTS[phases.measure]
    labels = [names.PHASES[part] for part in parts]
    figure = layout(palette, height=66 + 32 * len(parts), margin={"t": 56, "b": 4, "l": 70, "r": 20})
    figure |= {"hovermode": False, "yaxis": {"autorange": "reversed", "showgrid": False, "ticks": ""}}
    groups = ((phases.median, palette.weak, ""), (phases.tail, palette.strong, "2"))
    lowest = min(0.0, *(_share(group, part) for group, _, _ in groups for part in parts))
    data = []
    for (group, colour, axis), domain in zip(groups, PANELS, strict=True):
        shares = [_share(group, part) * 100 for part in parts]
        shared = {"y": labels, "xaxis": f"x{axis}", "hoverinfo": "skip"}
        data += [
            {
                "type": "bar",
                "orientation": "h",
                "x": shares,
                "marker": {"color": colour, "line": {"color": palette.text, "width": 0.5}},
                **shared,
            },
            {
                "type": "scatter",
                "mode": "text",
                "x": [max(share, 0.0) + 1 for share in shares],
                "text": [_label(group, part) for part in parts],
                "textposition": "middle right",
                "textfont": {"color": palette.text},
                "cliponaxis": False,
                **shared,
            },
        ]
        figure[f"xaxis{axis}"] = {
            "domain": domain,
            "range": [min(-1.0, lowest * 100 * 1.1), WIDEST_PERCENT],
            "visible": False,
        }
        figure["shapes"].append(
            {"type": "line", "xref": f"x{axis}", "yref": "paper", "x0": 0, "x1": 0, "y0": 0, "y1": 1,
             "line": {"color": palette.quiet, "width": 1}}
        )  # fmt: skip
        figure["annotations"].append(words(palette, _title(phases, tail=axis == "2"), domain[0], 1.0, yshift=4))
    return {"data": data, "layout": figure}


def _title(phases: Phases, tail: bool) -> str:
    """What a group is, how many requests it has and their mean time."""
    group = phases.tail if tail else phases.median
    if tail:
        what = f"Tail: at or over {quantile_text(phases.tail_quantile)} ({seconds_text(phases.tail_from)})"
    else:
        low, high = (quantile_text(q) for q in MEDIAN_BAND)
        what = f"Median: {low} to {high} ({seconds_text(phases.median_from)} to {seconds_text(phases.median_to)})"
    if group is None:
        return f"{what}<br>no request"
    plural = "" if group.rows == 1 else "s"
    few = f", too few for {quantile_text(phases.tail_quantile)}" if tail and not phases.tail_is_enough else ""
    return f"{what}<br><b>mean {seconds_text(group.measured)}</b>, {count_text(group.rows)} request{plural}{few}"


def _share(group: Group | None, part: str) -> float:
    if group is None or not group.measured_nanoseconds:
        return 0.0
    return dict(group.parts_nanoseconds)[part] / group.measured_nanoseconds


def _label(group: Group | None, part: str) -> str:
    if group is None:
        return "no data"
    return f"<b>{seconds_text(group.mean(part))}</b>  {percent_text(_share(group, part))}"
