"""Percentiles of four times by context bucket and shard."""

from __future__ import annotations

from collections.abc import Sequence

import streamlit as st

from vllm_slo.analytics.coverage import Coverage
from vllm_slo.analytics.percentiles import METRICS, QUANTILES
from vllm_slo.dashboards.heat_table import heat_table
from vllm_slo.dashboards.sections.view import View, section
from vllm_slo.dashboards.units import count_text, quantile_text


def latency(view: View) -> None:
    """Four tables and the choice of the percentile."""
    section(
        "latency", "Latency by context bucket and shard", f"{view.palette.slower} is slower. {_covered(view.covered)}"
    )
    quantile = st.segmented_control(
        "Percentile",
        QUANTILES,
        default=0.95,
        required=True,
        format_func=quantile_text,
        key="percentile",
        label_visibility="collapsed",
    )
    left_out = view.counts.requests - view.counts.counted
    drawn = [
        heat_table(view.tables[metric], quantile, view.counts.counted, left_out, view.buckets, view.palette)
        for metric in METRICS
    ]
    st.html(f"<div class='slo-heats'>{''.join(drawn)}</div>")


def _covered(covered: Sequence[Coverage]) -> str:
    """One sentence: of how many requests that finished a span was received."""
    known = [(c.covered, c.finished) for c in covered if c.covered is not None and c.finished is not None]
    unknown = len(covered) - len(known)
    if not known:
        return "Coverage is unknown: no vLLM was scraped, so a request whose span was lost is not noticed."
    received, finished = (sum(pair[i] for pair in known) for i in (0, 1))
    words = f"Coverage: spans of {count_text(received)} of {count_text(finished)} requests finished between scrapes"
    return f"{words}; unknown for {count_text(unknown)} more instances." if unknown else f"{words}."
