"""Phases of the median and of the tail side by side: share of the mean measured time, with the time in words."""

from __future__ import annotations

from vllm_slo.analytics.phases import MEDIAN_BAND, PARTS, Group, Phases
from vllm_slo.dashboards import names
from vllm_slo.dashboards.figure import Json
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.share_bars import Panel, share_bars
from vllm_slo.dashboards.units import count_text, percent_text, quantile_text, seconds_text


def phases_figure(phases: Phases, palette: Palette) -> Json:
    """Two panels of bars on one scale of percent. The bars of a panel sum to its mean time; a part can be negative."""
    parts = PARTS[phases.measure]
    panels = [
        Panel(
            title=_title(phases, group, tail=tail),
            colour=colour,
            shares=[_share(group, part) for part in parts],
            texts=[_label(group, part) for part in parts],
        )
        for group, colour, tail in ((phases.median, palette.weak, False), (phases.tail, palette.strong, True))
    ]
    return share_bars([names.PHASES[part] for part in parts], panels, palette)


def tail_text(phases: Phases) -> str:
    """Which requests the tail holds."""
    return f"at or over {quantile_text(phases.tail_quantile)} ({seconds_text(phases.tail_from)})"


def _title(phases: Phases, group: Group | None, tail: bool) -> str:
    """What a group is, how many requests it has and their mean time."""
    if tail:
        what = f"Tail: {tail_text(phases)}"
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
