"""KV blocks in use against the tokens that they hold."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from vllm_slo.analytics.engine_series import engine_step
from vllm_slo.analytics.kv import KvUse, kv_use
from vllm_slo.dashboards.figure import CONFIG
from vllm_slo.dashboards.kv_figure import MOST_ENGINES, fullest, kv_figure
from vllm_slo.dashboards.sections.view import View, note, section
from vllm_slo.dashboards.units import count_text, percent_text, step_text


def kv(view: View) -> None:
    """One small panel an engine; nothing where no engine was sampled, which the engine load says."""
    step = view.snapshot.ask(engine_step, view.selection, view.step)
    found = view.snapshot.ask(kv_use, view.selection, step)
    if not found:
        return
    section("kv", *headline(found))
    st.plotly_chart(kv_figure(fullest(found), step, view.palette), key="kv", theme=None, config=CONFIG)
    hidden = len(found) - len(fullest(found))
    more = f" The {MOST_ENGINES} fullest engines, {count_text(hidden)} more are not drawn." if hidden else ""
    note(f"Means of each {step_text(step)} over the engine's KV blocks.{more}{_blind(found)}")


def headline(found: Sequence[KvUse]) -> tuple[str, str]:
    """The fullest engine and the waste, and what the lines are."""
    top = max(found, key=lambda each: each.used_max or 0.0)
    title = f"KV cache: at most {percent_text(top.used_max or 0.0)} of blocks in use"
    title += f" ({top.name})" if len(found) > 1 else ""
    known = [each for each in found if each.occupancy_known]
    if not known:
        return title, "vLLM counts blocks; how many of their slots hold a token is unknown without the probe."
    worst = max((each for each in known if each.wasted_ratio is not None), key=_wasted, default=None)
    if worst is not None:
        title += f"; {percent_text(_wasted(worst))} of used slots empty"
        title += f" ({worst.name})" if len(found) > 1 else ""
    return title, (
        "Between the lines of blocks in use and of slots that hold a token lies internal fragmentation: slots of "
        "half-filled blocks. Cached blocks are free and keep content for reuse."
    )


def _wasted(use: KvUse) -> float:
    return use.wasted_ratio or 0.0


def _blind(found: Sequence[KvUse]) -> str:
    """Why some engines have one line only."""
    names = [each.name for each in found if not each.occupancy_known]
    if not names or len(names) == len(found):
        return ""
    return f" Without the probe only blocks in use are known: {', '.join(names)}."
