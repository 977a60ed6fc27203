"""Latency over time, with events."""

from __future__ import annotations

import streamlit as st

from vllm_slo.analytics.marks import marks
from vllm_slo.analytics.percentiles import METRICS
from vllm_slo.analytics.series import series
from vllm_slo.dashboards import names
from vllm_slo.dashboards.event_table import event_table
from vllm_slo.dashboards.figure import CONFIG
from vllm_slo.dashboards.sections.view import View, exactness, note, section
from vllm_slo.dashboards.series_figure import series_figure, thin_note
from vllm_slo.dashboards.units import count_text, step_text


def over_time(view: View) -> None:
    """One metric's percentiles, chosen by the reader."""
    step = view.step
    section(
        "over_time",
        "Latency over time",
        f"Percentiles of each {step_text(step)}, by arrival. Gaps: no request arrived.",
    )
    metric = st.segmented_control(
        "Metric",
        METRICS,
        default="request_duration",
        required=True,
        format_func=lambda name: names.METRICS[name],
        key="metric",
        label_visibility="collapsed",
    )
    found = view.snapshot.ask(series, view.selection, view.counts.basis, metric, step)
    events = view.snapshot.ask(marks, view.selection)
    st.plotly_chart(series_figure(found, events, view.palette), key="series", theme=None, config=CONFIG)
    note(f"{count_text(sum(found.rows))} requests, {exactness(view.counts)}. {thin_note(found)}")
    if events:
        with st.expander(f"Events in this range: {count_text(len(events))}"):
            st.html(event_table(events))
