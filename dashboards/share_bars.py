"""Panels of bars side by side: how much of a whole each part is, with the time in words. Shared by several figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vllm_slo.dashboards.figure import Json, layout, words
from vllm_slo.dashboards.palette import Palette

PANELS = ((0.0, 0.47), (0.53, 1.0))
WIDEST_PERCENT = 128
"""End of the scale: 100 % and room for the words behind a bar."""


@dataclass(frozen=True)
class Panel:
    """One group: its title in two lines, its shares of the whole (a part can be negative), and a text for each."""

    title: str
    colour: str
    shares: Sequence[float]
    texts: Sequence[str]


def share_bars(labels: Sequence[str], panels: Sequence[Panel], palette: Palette, hatched: Sequence[str] = ()) -> Json:
    """Two panels on one scale of percent; the bars of a panel sum to its whole. ``hatched``: labels of the unknown."""
    figure = layout(palette, height=66 + 32 * len(labels), margin={"t": 56, "b": 4, "l": 70, "r": 20})
    figure |= {
        "hovermode": False,
        "yaxis": {"autorange": "reversed", "showgrid": False, "ticks": "", "automargin": True},
    }
    lowest = min(0.0, *(share for panel in panels for share in panel.shares))
    pattern = {"shape": ["/" if label in hatched else "" for label in labels], "fgcolor": palette.text, "size": 6}
    data = []
    for number, (panel, domain) in enumerate(zip(panels, PANELS, strict=True), start=1):
        axis = "" if number == 1 else str(number)
        shares = [share * 100 for share in panel.shares]
        shared = {"y": list(labels), "xaxis": f"x{axis}", "hoverinfo": "skip"}
        data += [
            {
                "type": "bar",
                "orientation": "h",
                "x": shares,
                "marker": {
                    "color": panel.colour,
                    "line": {"color": palette.text, "width": 0.5},
                    **({"pattern": pattern} if hatched else {}),
                },
                **shared,
            },
            {
                "type": "scatter",
                "mode": "text",
                "x": [max(share, 0.0) + 1 for share in shares],
                "text": list(panel.texts),
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
        figure["annotations"].append(words(palette, panel.title, domain[0], 1.0, yshift=4))
    return {"data": data, "layout": figure}
