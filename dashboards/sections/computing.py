"""What prefill and decode were made of: the other bars of the phases, taken apart."""

from __future__ import annotations

import streamlit as st

from vllm_slo.analytics.computing import PARTS, UNKNOWN, Computing, computing
from vllm_slo.analytics.parts import Tail
from vllm_slo.analytics.phases import Phases
from vllm_slo.dashboards import names
from vllm_slo.dashboards.figure import CONFIG, Json
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.phases_figure import tail_text
from vllm_slo.dashboards.sections.view import View, section
from vllm_slo.dashboards.share_bars import Panel, share_bars
from vllm_slo.dashboards.units import count_text, percent_text, seconds_text

NEGLIGIBLE = 0.01
"""Below this share of the measured time prefill and decode are not what makes the tail slow."""
WHOLES = {"time_to_first_token": "prefill", "request_duration": "prefill and decode"}


def computing_section(view: View, slow: Phases | None) -> None:
    """The split for the tail that the phases chose, beside all requests."""
    if slow is None:
        return
    tail = Tail(slow.measure, slow.tail_from)
    every = view.snapshot.ask(computing, view.selection, view.counts.basis, slow.measure)
    worst = view.snapshot.ask(computing, view.selection, view.counts.basis, slow.measure, tail)
    if every is None:
        return
    section("computing", headline(worst, slow), under(every, worst, slow))
    figure = computing_figure(every, worst, slow, view.palette)
    st.plotly_chart(figure, key="computing", theme=None, config=CONFIG)


def headline(tail: Computing | None, slow: Phases) -> str:
    """The answer: what took most of the tail's prefill and decode, or that it is unknown."""
    whole = WHOLES[slow.measure]
    if tail is None or slow.tail is None:
        return f"What made {whole} long"
    if tail.whole_nanoseconds < NEGLIGIBLE * slow.tail.measured_nanoseconds:
        return f"The tail is hardly in {whole}: {seconds_text(tail.mean_whole)} on average"
    if tail.leading is None:
        return f"What made {whole} of the tail long is unknown: the probe has no record of its requests"
    unknown = f", {percent_text(tail.share(UNKNOWN))} unknown" if tail.of(UNKNOWN) else ""
    return f"{percent_text(tail.share(tail.leading))} of tail {whole}: {names.COMPUTING[tail.leading]}{unknown}"


def under(every: Computing, tail: Computing | None, slow: Phases) -> str:
    """How much of the tail this is, and of how many requests it is known."""
    parts = []
    if tail is not None and slow.tail is not None and slow.tail.measured_nanoseconds:
        share = tail.whole_nanoseconds / slow.tail.measured_nanoseconds
        parts.append(f"{WHOLES[slow.measure].capitalize()}: {percent_text(share)} of the tail's time.")
    parts.append(
        "Own is what the request's own prompt and tokens took; the rest is what others, the batch and preemption add."
    )
    if every.known < every.rows:
        known = f"{count_text(every.known)} of {count_text(every.rows)} requests"
        if tail is not None:
            known += f", {count_text(tail.known)} of {count_text(tail.rows)} in the tail,"
        parts.append(f"{known} have a record of the probe in the engine; the others' time is unknown.")
    return " ".join(parts)


def computing_figure(every: Computing, tail: Computing | None, slow: Phases, palette: Palette) -> Json:
    """All requests beside the tail; the bars of a panel sum to its mean time in prefill and decode."""
    shown = [p for p in PARTS[slow.measure] if p != UNKNOWN or every.of(UNKNOWN) or every.known < every.rows]
    panels = [
        Panel(
            title=f"{title}<br>" + ("no request" if group is None else _mean(group)),
            colour=colour,
            shares=[group.share(part) if group else 0.0 for part in shown],
            texts=[_label(group, part) for part in shown],
        )
        for title, group, colour in (
            ("All requests", every, palette.weak),
            (f"Tail: {tail_text(slow)}", tail, palette.strong),
        )
    ]
    return share_bars([names.COMPUTING_BARS[part] for part in shown], panels, palette, hatched=["Unknown"])


def _mean(group: Computing) -> str:
    plural = "" if group.rows == 1 else "s"
    return (
        f"<b>mean {seconds_text(group.mean_whole)}</b> in {WHOLES[group.measure]}, "
        f"{count_text(group.rows)} request{plural}"
    )


def _label(group: Computing | None, part: str) -> str:
    if group is None:
        return "no data"
    if group.known == 0 and part != UNKNOWN:
        return "unknown"
    return f"<b>{seconds_text(group.mean(part))}</b>  {percent_text(group.share(part))}"
