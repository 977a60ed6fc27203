"""How requests ended: finished, given up, failed, refused, or unknown."""

from __future__ import annotations

from html import escape

import streamlit as st

from vllm_slo.analytics.outcomes import Outcomes
from vllm_slo.dashboards import names
from vllm_slo.dashboards.figure import CONFIG, Json
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.sections.view import View, note, section
from vllm_slo.dashboards.strips_figure import Strip, strips_figure
from vllm_slo.dashboards.units import count_text, percent_text, step_text


def endings(view: View, ended: Outcomes) -> None:
    """The share that did not finish, over time and in total, with what the HTTP side knows."""
    section("endings", headline(ended), under(ended))
    if ended.unfinished:
        st.plotly_chart(endings_figure(ended, view.palette), key="endings", theme=None, config=CONFIG)
        note(f"Requests a minute, mean of each {step_text(ended.step)}; all requests on a scale of their own.")
    st.html(f"<div class='slo-health'>{_ended(ended)}{_http(ended)}</div>")


def headline(ended: Outcomes) -> str:
    """The share of requests that did not finish, of those that tell."""
    lost = sum(ended.unfinished.values())
    if not lost:
        return f"All {count_text(ended.told)} requests that tell how they ended finished"
    return f"{percent_text(lost / ended.told)} of {count_text(ended.told)} requests did not finish"


def under(ended: Outcomes) -> str:
    """The commonest ending, and of how many requests nothing is known."""
    parts = []
    if ended.unfinished:
        parts = [", ".join(f"{count_text(n)} {names.ENDINGS[reason]}" for reason, n in _most(ended)) + "."]
    rest = ended.requests - ended.told
    if rest:
        parts.append(
            f"{count_text(rest)} more are known from stock spans alone: how many besides them were given up, failed or "
            "were refused is not visible without the probe."
        )
    return " ".join(parts)


def endings_figure(ended: Outcomes, palette: Palette) -> Json:
    """A strip of all requests, and one for each ending other than finishing."""
    minutes = ended.step.total_seconds() / 60
    every = [n / minutes for n in ended.arrived]
    lines = {reason: [n / minutes for n in ended.series[reason]] for reason in ended.series}
    # A step in which only stock servers had requests says nothing about endings.
    silent = [arrived > 0 and told == 0 for arrived, told in zip(ended.arrived, ended.told_by_step, strict=True)]
    strips = [
        Strip("all requests", every, [_rate(v) for v in every], f"<b>{count_text(ended.requests)}</b>", "arrived")
    ]
    strips += [
        Strip(
            name=names.ENDINGS[reason],
            values=[None if unknown else v for v, unknown in zip(line, silent, strict=True)],
            texts=["unknown" if unknown else _rate(v) for v, unknown in zip(line, silent, strict=True)],
            total=_total(ended.unfinished[reason], ended.told),
            scale="ended",
            strong=True,
        )
        for reason, line in lines.items()
    ]
    tops = {
        "arrived": _number(max(every, default=0.0)),
        "ended": _number(max((v for line in lines.values() for v in line), default=0.0)),
    }
    return strips_figure(strips, ended.times, ended.step, palette, tops)


def _ended(ended: Outcomes) -> str:
    rows = [("finished", ended.finished)]
    rows += [(names.ENDINGS[reason], n) for reason, n in _most(ended)]
    body = "".join(_row(label, f"{count_text(n)} ({percent_text(n / ended.told)})") for label, n in rows)
    if rest := ended.requests - ended.told:
        body += _row("unknown: stock span alone", count_text(rest))
    return _table("How they ended", body + _row("all requests", count_text(ended.requests)))


def _http(ended: Outcomes) -> str:
    lost = sum(ended.unfinished.values())
    if not lost:
        return ""
    caption = "HTTP status of those that did not finish"
    if not ended.edge:
        return _table(caption, _row("unknown", "the HTTP middleware of the probe does not run"))
    words = {429: "429 too many requests", 503: "503 overloaded", None: "no answer was sent"}
    rows = [(words.get(status, f"{status}xx"), n) for status, n in ended.http.items()]
    body = "".join(_row(label, count_text(n)) for label, n in rows)
    if lost > ended.edge:
        body += _row("unknown: no HTTP side", count_text(lost - ended.edge))
    if aborted := ended.unfinished.get("abort", 0):
        body += _row(
            "aborted because the client went away", f"{count_text(ended.disconnected)} of {count_text(aborted)}"
        )
    return _table(caption, body)


def _most(ended: Outcomes) -> list[tuple[str, int]]:
    return sorted(ended.unfinished.items(), key=lambda item: -item[1])


def _row(label: str, value: str) -> str:
    return f"<tr><th scope='row'>{escape(label)}</th><td>{escape(value)}</td></tr>"


def _table(caption: str, body: str) -> str:
    return f"<div class='scroll'><table><caption>{escape(caption)}</caption><tbody>{body}</tbody></table></div>"


def _total(count: int, told: int) -> str:
    return f"<b>{count_text(count)}</b>  {percent_text(count / told)}"


def _rate(value: float) -> str:
    return f"{_number(value)} a minute"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.3g}"
