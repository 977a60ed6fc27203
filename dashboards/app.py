"""The app around the pages: opens the lake once, draws the page, and explains every state in which it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

import streamlit as st

from vllm_slo.analytics.counts import answerable
from vllm_slo.analytics.extent import extent
from vllm_slo.analytics.health import ReceiverState
from vllm_slo.analytics.query import QueryError, Reader
from vllm_slo.analytics.silence import Silence, silence
from vllm_slo.dashboards.answers import Answers, Snapshot, lost_a_file
from vllm_slo.dashboards.filters import filters
from vllm_slo.dashboards.overview import overview
from vllm_slo.dashboards.palette import Palette, palette
from vllm_slo.dashboards.stylesheet import stylesheet
from vllm_slo.dashboards.units import count_text, range_text
from vllm_slo.exporters.errors import SloError

LIVE_SECONDS = 10
ICON = (
    "data:image/svg+xml,<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'>"
    "<path d='M2 14V9h3v5zm4.5 0V5h3v9zM11 14V1h3v13z' fill='%232f7fbf'/></svg>"
)
"""A bar chart. Given as data, because Streamlit's own icons are fetched from the internet by the browser."""


@dataclass(frozen=True)
class AppSettings:
    """Where the data is and how it is read; ``open_reader`` raises SloError while that is impossible."""

    lake: str
    buckets: tuple[str, ...]
    open_reader: Callable[[], Reader]
    receiver: Callable[[], ReceiverState]
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)


def run(settings: AppSettings) -> None:
    """Draws the whole page once."""
    st.set_page_config(page_title="vllm-slo", page_icon=ICON, layout="wide")
    colours = palette(st.context.theme.type)
    st.html(stylesheet(colours))
    live = bool(st.session_state.get("live"))
    st.fragment(_page, run_every=LIVE_SECONDS if live else None)(settings, colours, live)


def _page(settings: AppSettings, colours: Palette, live: bool) -> None:
    if bool(st.session_state.get("live")) != live:
        st.rerun(scope="app")
    try:
        answers = _answers(settings)
        try:
            _draw(settings, answers.now(), colours)
        except QueryError as error:
            if not lost_a_file(error):
                raise
            _draw(settings, answers.reopened(), colours)
    except SloError as error:
        _title("")
        st.error("The lake cannot be read.")
        st.html(f"<div class='slo-help'><pre>{escape(str(error))}</pre></div>")
        st.button("Try again", icon=":material/refresh:")


def _answers(settings: AppSettings) -> Answers:
    """The answers of a lake, shared by all sessions. A lake that cannot be opened is tried again at the next run."""
    shared: dict[str, Answers] = _shared()
    if settings.lake not in shared:
        shared[settings.lake] = Answers(settings.open_reader())
    return shared[settings.lake]


@st.cache_resource
def _shared() -> dict[str, Answers]:
    return {}


def _draw(settings: AppSettings, snapshot: Snapshot, colours: Palette) -> None:
    now = settings.clock()
    found = snapshot.ask(extent)
    if found is None:
        _title("")
        _silent(snapshot.ask(silence, None))
        _empty(settings)
        return
    title = st.empty()
    selection = filters(found, settings.buckets, now)
    if selection is None:
        return
    answered = snapshot.ask(answerable, selection)
    _title(range_text(answered.selection.start, answered.selection.end), title)
    _silent(snapshot.ask(silence, found.end))
    overview(snapshot, answered, found, settings.buckets, settings.receiver(), colours, now)


def _title(range_shown: str, place: st.delta_generator.DeltaGenerator | None = None) -> None:
    (place or st).html(f"<div class='slo-title'><h2>Latency overview</h2><span>{escape(range_shown)}</span></div>")


def _silent(found: Sequence[Silence]) -> None:
    """A warning above everything else, whatever is selected: figures that end with the newest request look healthy."""
    if not found:
        return
    each = ", ".join(f"{silent.instance}: {count_text(silent.missing)}" for silent in found)
    st.warning(
        f"Spans are missing since {min(silent.since for silent in found):%-d %b %H:%M:%S} UTC. vLLM counted requests "
        f"as finished that are not here ({each}). `vllm-slo doctor` on its address and start line finds why it sends "
        "none; `vllm-slo status` shows spans that were refused or wait."
    )


def _empty(settings: AppSettings) -> None:
    st.info("The lake has no requests yet.")
    st.html(
        "<div class='slo-help'><p>Spans of vLLM's requests appear here a few seconds after they finish. "
        "To send some, start vLLM with</p>"
        "<pre>OTEL_RESOURCE_ATTRIBUTES=service.instance.id=vllm-0 \\\n"
        "vllm serve MODEL --otlp-traces-endpoint grpc://127.0.0.1:4317</pre>"
        "<p>and keep the receiver running on this lake:</p>"
        f"<pre>vllm-slo --lake {escape(settings.lake)} up --scrape http://127.0.0.1:8000/metrics=vllm-0</pre>"
        "<p>Files that were recorded elsewhere are taken in with <code>vllm-slo import FILE</code>; "
        "<code>vllm-slo doctor</code> tells what a server's telemetry will lack.</p></div>"
    )
    st.button("Look again", icon=":material/refresh:")
