"""Where the time of typical and of slow requests goes."""

from __future__ import annotations

import streamlit as st

from vllm_slo.analytics.phases import PARTS, TAIL_QUANTILES, Measure, Phases, phases
from vllm_slo.dashboards import names
from vllm_slo.dashboards.figure import CONFIG
from vllm_slo.dashboards.phases_figure import phases_figure
from vllm_slo.dashboards.sections.view import View, exactness, note, section
from vllm_slo.dashboards.units import quantile_text


def time_spent(view: View) -> Phases | None:
    """Draws the phases, and gives them to the sections that look closer at the same tail."""
    section(
        "time_spent",
        "Where the time goes",
        "Mean phases of typical requests beside those of the slowest. Parts sum to the measured time; "
        "a residual below zero means that the first token was handed over later than the last.",
    )
    with st.container(horizontal=True):
        measure: Measure = st.segmented_control(
            "Measured time",
            list(PARTS),
            default="request_duration",
            required=True,
            format_func=lambda name: names.METRICS[name],
            key="measure",
            label_visibility="collapsed",
        )
        tail = st.segmented_control(
            "Tail",
            TAIL_QUANTILES,
            default=0.99,
            required=True,
            format_func=lambda q: f"tail from {quantile_text(q)}",
            key="tail",
            label_visibility="collapsed",
        )
    found = view.snapshot.ask(phases, view.selection, view.counts.basis, measure, tail)
    if found is None:
        st.info("No request of this selection has this time.")
        return None
    st.plotly_chart(phases_figure(found, view.palette), key="phases", theme=None, config=CONFIG)
    gone = (
        " Rows of the first days are gone: the means are of those that are left." if view.counts.older_rows_gone else ""
    )
    note(f"Bounds of the groups {exactness(view.counts)}; means of rows, exact.{gone}")
    return found
