"""What all Plotly figures of the pages share. Figures are plain dictionaries: building them costs next to nothing."""

from __future__ import annotations

from typing import Any

from vllm_slo.dashboards.palette import Palette

Json = dict[str, Any]

CONFIG: Json = {"displayModeBar": False, "responsive": True}
FONT = "Source Sans, Source Sans Pro, Helvetica, Arial, sans-serif"
SMALL, LABEL = 11, 14


def layout(palette: Palette, height: int, margin: Json) -> Json:
    """A layout with the pages' fonts and no legend."""
    return {
        "height": height,
        "margin": margin,
        "font": {"family": FONT, "size": 13, "color": palette.text},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "showlegend": False,
        "hovermode": "x unified",
        "hoverlabel": {"font": {"family": FONT}},
        "bargap": 0.15,
        "shapes": [],
        "annotations": [],
    }


def time_axis(palette: Palette, **more: Any) -> Json:
    """A quiet axis of time."""
    return {
        "type": "date",
        "showgrid": False,
        "zeroline": False,
        "linecolor": palette.line,
        "tickcolor": palette.line,
        "ticks": "outside",
        "hoverformat": "%-d %b %Y %H:%M:%S",
        **more,
    }


def value_axis(palette: Palette, **more: Any) -> Json:
    """A quiet axis of values with thin lines across."""
    return {"gridcolor": palette.line, "zeroline": False, "automargin": True, **more}


def words(palette: Palette, text: str, x: float, y: float, **more: Any) -> Json:
    """An annotation without an arrow; x and y in shares of the figure unless ``xref`` and ``yref`` say otherwise."""
    return {
        "text": text,
        "x": x,
        "y": y,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "left",
        "yanchor": "bottom",
        "align": "left",
        "showarrow": False,
        "font": {"size": LABEL, "color": palette.text},
        **more,
    }
