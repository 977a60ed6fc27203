"""What blocked the queue: the queue bar of the phases, taken apart."""

from __future__ import annotations

import streamlit as st

from vllm_slo.analytics.blocked import REASONS, UNKNOWN, Blocked, BlockedSeries, blocked, blocked_series
from vllm_slo.analytics.blockers import blockers
from vllm_slo.analytics.parts import Tail
from vllm_slo.analytics.phases import Phases
from vllm_slo.dashboards import names
from vllm_slo.dashboards.blocked_table import blocked_table, reasons_table
from vllm_slo.dashboards.blockers_table import blockers_table
from vllm_slo.dashboards.figure import CONFIG, Json
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.phases_figure import tail_text
from vllm_slo.dashboards.sections.view import View, note, section
from vllm_slo.dashboards.share_bars import Panel, share_bars
from vllm_slo.dashboards.strips_figure import Strip, strips_figure
from vllm_slo.dashboards.units import count_text, percent_text, quantile_text, seconds_text, step_text

NEGLIGIBLE = 0.01
"""Below this share of the measured time the queue is not what makes the tail slow."""
TAIL, EVERY = "tail", "all"


def blocked_section(view: View, slow: Phases | None) -> None:
    """The split for the tail that the phases chose, and for all requests; over time; by shard and bucket."""
    tail = None if slow is None else Tail(slow.measure, slow.tail_from)
    every = view.snapshot.ask(blocked, view.selection, view.counts.basis)
    worst = view.snapshot.ask(blocked, view.selection, view.counts.basis, tail) if tail else None
    if every.overall is None:
        return
    slowest = worst.overall if worst else None
    section("blocked", headline(slowest, slow), _under(every.overall, slowest, slow))
    figure = blocked_figure(every.overall, slowest, slow, view.palette)
    st.plotly_chart(figure, key="blocked", theme=None, config=CONFIG)
    group = st.segmented_control(
        "Requests",
        [TAIL, EVERY] if slowest else [EVERY],
        default=TAIL if slowest else EVERY,
        required=True,
        format_func={TAIL: "The tail", EVERY: "All requests"}.__getitem__,
        key="blocked_group",
        label_visibility="collapsed",
    )
    of_tail = group == TAIL and worst is not None
    chosen = worst if of_tail and worst is not None else every
    step = view.step
    series = view.snapshot.ask(
        blocked_series, view.selection, view.counts.basis, step, *([tail] if of_tail and tail else [])
    )
    assert chosen.overall is not None
    strips = blocked_strips(series, chosen.overall, view.palette)
    st.plotly_chart(strips, key="blocked_series", theme=None, config=CONFIG)
    absent = [names.QUEUE[reason] for reason in REASONS if reason != UNKNOWN and not chosen.overall.of(reason)]
    never = f" No known wait for: {', '.join(absent)}." if absent else ""
    note(f"Seconds waited, of the requests that arrived in each {step_text(step)}, all on one scale.{never}")
    whose = "the tail" if of_tail else "all requests"
    table = blocked_table(
        f"Mean queue time of {whose}, and what blocked most of it", str(group), chosen, view.buckets, view.palette
    )
    st.html(f"<div class='slo-heats wide'>{table}</div>")
    if tail and (in_the_way := view.snapshot.ask(blockers, view.selection, tail)):
        st.html(f"<div class='slo-health'><h4>Whom the tail waited for longest</h4></div>{blockers_table(in_the_way)}")
    with st.expander("Every reason by shard and bucket, in seconds"):
        st.html(reasons_table(chosen))


def headline(tail: Blocked | None, slow: Phases | None) -> str:
    """The answer: what the tail waited for, whether it waited at all, or that it is unknown."""
    if tail is None or slow is None or slow.tail is None:
        return "What blocked the queue"
    if tail.queue_nanoseconds < NEGLIGIBLE * slow.tail.measured_nanoseconds:
        return f"The tail hardly waits in the queue: {seconds_text(tail.mean_queue)} on average"
    if tail.known == 0:
        return "What blocked the queue of the tail is unknown: the probe has no record of its requests"
    if tail.leading is None:
        return "What blocked the queue of the tail is unknown"
    unknown = f", {percent_text(tail.share(UNKNOWN))} unknown" if tail.of(UNKNOWN) else ""
    return f"{percent_text(tail.share(tail.leading))} of tail queue time: {names.QUEUE[tail.leading]}{unknown}"


def _under(every: Blocked, tail: Blocked | None, slow: Phases | None) -> str:
    parts = []
    if tail is not None and slow is not None and slow.tail is not None and slow.tail.measured_nanoseconds:
        share = tail.queue_nanoseconds / slow.tail.measured_nanoseconds
        parts.append(f"The queue: {percent_text(share)} of the tail's time.")
    parts += ["Queue time by what kept the requests waiting; a request behind a blocked one shares its reason."]
    if every.known < every.rows:
        known = f"{count_text(every.known)} of {count_text(every.rows)} requests"
        if tail is not None:
            known += f", {count_text(tail.known)} of {count_text(tail.rows)} in the tail,"
        parts.append(f"{known} have a record of the probe in the engine; what blocked the others is unknown.")
    if slow is not None and not slow.tail_is_enough:
        parts.append(f"The tail has too few requests for {quantile_text(slow.tail_quantile)}.")
    return " ".join(parts)


def blocked_figure(every: Blocked, tail: Blocked | None, slow: Phases | None, palette: Palette) -> Json:
    """All requests beside the tail; the bars of a panel sum to its mean queue time."""
    reasons = [r for r in REASONS if r != UNKNOWN or every.of(UNKNOWN) or every.known < every.rows]
    which = f"Tail: {tail_text(slow)}" if slow else "Tail"
    panels = [
        Panel(
            title=f"{title}<br>" + ("no request" if group is None else _mean(group)),
            colour=colour,
            shares=[group.share(reason) if group else 0.0 for reason in reasons],
            texts=[_label(group, reason) for reason in reasons],
        )
        for title, group, colour in (("All requests", every, palette.weak), (which, tail, palette.strong))
    ]
    labels = [names.QUEUE[reason].capitalize() if reason != "queue_kv_blocks" else "KV blocks" for reason in reasons]
    return share_bars(labels, panels, palette, hatched=["Unknown"])


def blocked_strips(series: BlockedSeries, whole: Blocked, palette: Palette) -> Json:
    """A strip for each reason that anybody waited for, on one scale."""
    reasons = [reason for reason in REASONS if whole.of(reason)] or ["queue_step"]
    strips = []
    highest = 0.0
    for reason in reasons:
        values = [None if each is None else each.of(reason) / 1e9 for each in series.blocked]
        highest = max(highest, *(value for value in values if value is not None), 0.0)
        strips.append(
            Strip(
                name=names.QUEUE[reason],
                values=values,
                texts=[
                    "" if each is None else f"{seconds_text(each.of(reason) / 1e9)} of {count_text(each.rows)} requests"
                    for each in series.blocked
                ],
                total=f"<b>{seconds_text(whole.of(reason) / 1e9)}</b>  {percent_text(whole.share(reason))}",
                scale="seconds",
                strong=reason == whole.leading,
                hatched=reason == UNKNOWN,
            )
        )
    return strips_figure(strips, series.times, series.step, palette, {"seconds": seconds_text(highest)})


def _mean(group: Blocked) -> str:
    plural = "" if group.rows == 1 else "s"
    return f"<b>mean wait {seconds_text(group.mean_queue)}</b>, {count_text(group.rows)} request{plural}"


def _label(group: Blocked | None, reason: str) -> str:
    if group is None:
        return "no data"
    if group.known == 0 and reason != UNKNOWN:
        return "unknown"
    return f"<b>{seconds_text(group.mean(reason))}</b>  {percent_text(group.share(reason))}"
