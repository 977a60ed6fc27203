"""The first page: how slow, where, in which phase, since when, and whether the numbers can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape

import streamlit as st

from vllm_slo.analytics.counts import Answerable, Counts
from vllm_slo.analytics.coverage import Coverage, coverage
from vllm_slo.analytics.engine_series import engine_series, engine_step
from vllm_slo.analytics.extent import Extent
from vllm_slo.analytics.health import ReceiverState, freshness
from vllm_slo.analytics.histogram import RELATIVE_ERROR
from vllm_slo.analytics.marks import marks
from vllm_slo.analytics.percentiles import METRICS, QUANTILES, PercentileTable, percentiles
from vllm_slo.analytics.phases import PARTS, TAIL_QUANTILES, Measure, phases
from vllm_slo.analytics.selection import Selection
from vllm_slo.analytics.series import series, step_for
from vllm_slo.dashboards import names
from vllm_slo.dashboards.answers import Snapshot
from vllm_slo.dashboards.engine_figure import engine_figure
from vllm_slo.dashboards.event_table import event_table
from vllm_slo.dashboards.figure import CONFIG
from vllm_slo.dashboards.health_table import health_table
from vllm_slo.dashboards.heat_table import heat_table
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.phases_figure import phases_figure
from vllm_slo.dashboards.series_figure import series_figure, thin_note
from vllm_slo.dashboards.summary import summary, tiles
from vllm_slo.dashboards.units import count_text, percent_text, quantile_text, step_text


@dataclass(frozen=True)
class View:
    """What every part of the page is drawn from."""

    snapshot: Snapshot
    selection: Selection
    extent: Extent
    buckets: tuple[str, ...]
    counts: Counts
    tables: dict[str, PercentileTable]
    covered: tuple[Coverage, ...]
    palette: Palette


def overview(
    snapshot: Snapshot,
    answered: Answerable,
    extent: Extent,
    buckets: Sequence[str],
    receiver: ReceiverState,
    palette: Palette,
    now: datetime,
) -> None:
    """Draws the page for a selection."""
    selection, counted = answered.selection, answered.counts
    tables = snapshot.ask(percentiles, selection, counted.basis)
    covered = snapshot.ask(coverage, selection)
    view = View(snapshot, selection, extent, tuple(buckets), counted, tables, covered, palette)
    st.html(summary(tiles(counted, tables, covered)))
    if counted.counted == 0:
        _nothing_counts(counted)
    else:
        _percentiles(view)
        _phases(view)
        _series(view)
    _engines(view)
    _section("Ingest health", "What the figures above rest on.")
    fresh = snapshot.ask(freshness, extent.end)
    st.html(health_table(fresh, receiver, counted, covered, now))


def _nothing_counts(counted: Counts) -> None:
    if counted.total == 0:
        st.info("No request arrived in this selection. Choose a longer time range, or more models, shards or buckets.")
        return
    reasons = ", ".join(f"{count_text(n)} × {names.reason(r)}" for r, n in counted.left_out.items())
    st.warning(
        f"All {count_text(counted.total)} requests of this selection are left out of statistics: {reasons}. "
        "What each reason means stands in docs/tables.md under quality."
    )


def _section(title: str, text: str) -> None:
    st.html(f"<div class='slo-section'><h3>{escape(title)}</h3><p>{escape(text)}</p></div>")


def _percentiles(view: View) -> None:
    _section("Latency by context bucket and shard", f"{view.palette.slower} is slower. {_covered(view.covered)}")
    quantile = st.segmented_control(
        "Percentile",
        QUANTILES,
        default=0.95,
        required=True,
        format_func=quantile_text,
        key="percentile",
        label_visibility="collapsed",
    )
    left_out = sum(view.counts.left_out.values())
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


def _phases(view: View) -> None:
    _section(
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
        return
    st.plotly_chart(phases_figure(found, view.palette), key="phases", theme=None, config=CONFIG)
    gone = (
        " Rows of the first days are gone: the means are of those that are left." if view.counts.older_rows_gone else ""
    )
    st.html(f"<p class='slo-note'>Bounds of the groups {_basis(view.counts)}; means of rows, exact.{gone}</p>")


def _basis(counted: Counts) -> str:
    return "exact" if counted.basis == "rows" else f"from rollups, ±{percent_text(RELATIVE_ERROR)}"


def _series(view: View) -> None:
    step = step_for(view.selection, view.counts.counted, view.counts.basis, view.counts.finest)
    _section("Latency over time", f"Percentiles of each {step_text(step)}, by arrival. Gaps: no request arrived.")
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
    note = f"{count_text(sum(found.rows))} requests, {_basis(view.counts)}. {thin_note(found)}"
    st.html(f"<p class='slo-note'>{note}</p>")
    if events:
        with st.expander(f"Events in this range: {count_text(len(events))}"):
            st.html(event_table(events))


def _engines(view: View) -> None:
    finest = step_for(view.selection, view.counts.counted, view.counts.basis, view.counts.finest)
    step = view.snapshot.ask(engine_step, view.selection, finest)
    engines = view.snapshot.ask(engine_series, view.selection, step)
    if not engines:
        _section("Engine load", "No samples in this selection: start the receiver with --scrape URL to have them.")
        return
    _section("Engine load", f"vLLM's own gauges, mean of each {step_text(step)}. Gaps: not scraped.")
    st.plotly_chart(engine_figure(engines, step, view.palette), key="engines", theme=None, config=CONFIG)
