"""Engine load over time."""

from __future__ import annotations

import streamlit as st

from vllm_slo.analytics.engine_series import engine_series, engine_step
from vllm_slo.dashboards.engine_figure import engine_figure
from vllm_slo.dashboards.figure import CONFIG
from vllm_slo.dashboards.sections.view import View, section
from vllm_slo.dashboards.units import step_text


def engines(view: View) -> None:
    """Requests running and waiting; a word where nothing was sampled."""
    step = view.snapshot.ask(engine_step, view.selection, view.step)
    found = view.snapshot.ask(engine_series, view.selection, step)
    if not found:
        section(
            "engines", "Engine load", "No samples in this selection: start the receiver with --scrape URL to have them."
        )
        return
    section("engines", "Engine load", f"Requests in the engines, mean of each {step_text(step)}. Gaps: not sampled.")
    st.plotly_chart(engine_figure(found, step, view.palette), key="engines", theme=None, config=CONFIG)
