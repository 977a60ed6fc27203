"""What preemption cost."""

from __future__ import annotations

from collections.abc import Callable

import streamlit as st

from vllm_slo.analytics.preemption import PreemptionCost, preemption_cost
from vllm_slo.dashboards.figure import CONFIG, Json
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.sections.view import View, note, section
from vllm_slo.dashboards.strips_figure import Strip, strips_figure
from vllm_slo.dashboards.units import count_text, percent_text, seconds_text, step_text


def preemption(view: View) -> None:
    """A heading with the cost; strips over time only where there was any."""
    found = view.snapshot.ask(preemption_cost, view.selection, view.counts.basis, view.step)
    section("preemption", headline(found), under(found))
    if not found.overall.preemptions:
        return
    st.plotly_chart(preemption_figure(found, view.palette), key="preemption", theme=None, config=CONFIG)
    note(f"By arrival of the request, each {step_text(found.step)}; every strip on its own scale.")


def headline(cost: PreemptionCost) -> str:
    """The share of decode time and the times; unknown where no engine tells."""
    if cost.known == 0:
        return "Preemption is unknown: no request comes from an engine with the probe"
    if not cost.overall.preemptions:
        return "No request was preempted"
    share = "" if cost.decode_share is None else f"Preemption took {percent_text(cost.decode_share)} of decode time: "
    return f"{share}{count_text(cost.overall.preemptions)} preemptions of {count_text(cost.overall.requests)} requests"


def under(cost: PreemptionCost) -> str:
    """Of how many requests this is known, and what it cost."""
    of = f"Of {count_text(cost.known)} requests from engines with the probe"
    if cost.known < cost.rows:
        of += f"; of {count_text(cost.rows - cost.known)} others it is unknown"
    parts = [f"{of}."] if cost.known else []
    if cost.overall.preemptions:
        lost, again = cost.overall.lost_tokens, cost.overall.recomputed_tokens
        parts.append(
            f"{count_text(lost)} computed tokens were thrown away, {count_text(again)} of them computed again; "
            f"{seconds_text(cost.overall.preempted_nanoseconds / 1e9)} waiting to run again and "
            f"{seconds_text(cost.overall.recompute_nanoseconds / 1e9)} computing again."
        )
    if cost.unfinished:
        parts.append(f"{count_text(cost.unfinished)} more preemptions of requests that did not finish.")
    return " ".join(parts)


def preemption_figure(cost: PreemptionCost, palette: Palette) -> Json:
    """Times, tokens and seconds over time."""
    rows: list[tuple[str, str, float, Callable[[float], str]]] = [
        ("preemptions", "preemptions", 1.0, _whole),
        ("tokens thrown away", "lost_tokens", 1.0, _whole),
        ("preempted or computing again", "cost_nanoseconds", 1e-9, seconds_text),
    ]
    strips, tops = [], {}
    for name, field, factor, said in rows:
        values = [None if each is None else getattr(each, field) * factor for each in cost.series]
        tops[field] = said(max((value for value in values if value is not None), default=0.0))
        strips.append(
            Strip(
                name=name,
                values=values,
                texts=["" if value is None else said(value) for value in values],
                total=f"<b>{said(getattr(cost.overall, field) * factor)}</b>",
                scale=field,
                strong=field == "cost_nanoseconds",
            )
        )
    return strips_figure(strips, cost.times, cost.step, palette, tops)


def _whole(number: float) -> str:
    return count_text(round(number))
