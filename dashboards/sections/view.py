"""What every section is drawn from, and what all of them share."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from html import escape

import streamlit as st

from vllm_slo.analytics.counts import Counts
from vllm_slo.analytics.coverage import Coverage
from vllm_slo.analytics.extent import Extent
from vllm_slo.analytics.histogram import RELATIVE_ERROR
from vllm_slo.analytics.percentiles import PercentileTable
from vllm_slo.analytics.selection import Selection
from vllm_slo.analytics.series import step_for
from vllm_slo.dashboards.answers import Snapshot
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.units import percent_text


@dataclass(frozen=True)
class View:
    """A selection, its counts, and what several sections need of it."""

    snapshot: Snapshot
    selection: Selection
    extent: Extent
    buckets: tuple[str, ...]
    counts: Counts
    tables: dict[str, PercentileTable]
    covered: tuple[Coverage, ...]
    palette: Palette

    @property
    def step(self) -> timedelta:
        """The step of everything that is drawn over time."""
        return step_for(self.selection, self.counts.counted, self.counts.basis, self.counts.finest)

    @property
    def of_clients(self) -> bool:
        """Whether the rows are those of clients, which see nothing of what happens inside a server."""
        return self.selection.sources == ("client",)


def section(key: str, title: str, text: str) -> None:
    """The head of a section: a heading that says the answer where there is one, and a line under it."""
    st.html(
        f"<div class='slo-section' data-section='{key}'><h3>{escape(title)}</h3>"
        + (f"<p>{escape(text)}</p>" if text else "")
        + "</div>"
    )


def note(text: str) -> None:
    """A quiet line under a figure."""
    if text:
        st.html(f"<p class='slo-note'>{escape(text)}</p>")


def exactness(counts: Counts) -> str:
    """Whether figures are exact, in words."""
    return "exact" if counts.basis == "rows" else f"from rollups, ±{percent_text(RELATIVE_ERROR)}"
