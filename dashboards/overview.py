"""The first page: how slow, where, in which phase, why, since when, and whether the numbers can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import streamlit as st

from vllm_slo.analytics.counts import Answerable, Counts
from vllm_slo.analytics.coverage import coverage
from vllm_slo.analytics.extent import Extent
from vllm_slo.analytics.health import ReceiverState
from vllm_slo.analytics.outcomes import outcomes
from vllm_slo.analytics.percentiles import percentiles
from vllm_slo.dashboards import names
from vllm_slo.dashboards.answers import Snapshot
from vllm_slo.dashboards.palette import Palette
from vllm_slo.dashboards.sections.blocked import blocked_section
from vllm_slo.dashboards.sections.computing import computing_section
from vllm_slo.dashboards.sections.endings import endings
from vllm_slo.dashboards.sections.engines import engines
from vllm_slo.dashboards.sections.health import health
from vllm_slo.dashboards.sections.kv import kv
from vllm_slo.dashboards.sections.latency import latency
from vllm_slo.dashboards.sections.over_time import over_time
from vllm_slo.dashboards.sections.preemption import preemption
from vllm_slo.dashboards.sections.time_spent import time_spent
from vllm_slo.dashboards.sections.unseen import unseen
from vllm_slo.dashboards.sections.view import View
from vllm_slo.dashboards.summary import summary, tiles
from vllm_slo.dashboards.units import count_text


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
    ended = snapshot.ask(outcomes, selection, counted.basis, view.step)
    probed = ended.told > 0 and not view.of_clients
    st.html(summary(tiles(counted, tables, covered)))
    if counted.counted == 0:
        _nothing_counts(counted)
    else:
        latency(view)
        slow = time_spent(view)
        if probed:
            blocked_section(view, slow)
            computing_section(view, slow)
        over_time(view)
    if probed:
        endings(view, ended)
    engines(view)
    kv(view)
    if probed:
        preemption(view)
    elif counted.requests and not view.of_clients:
        unseen(view)
    health(view, receiver, now)


def _nothing_counts(counted: Counts) -> None:
    if counted.requests == 0:
        st.info("No request arrived in this selection. Choose a longer time range, or more models, shards or buckets.")
        return
    reasons = ", ".join(f"{count_text(n)} × {names.reason(r)}" for r, n in counted.requests_left_out.items())
    st.warning(
        f"All {count_text(counted.requests)} requests of this selection are left out of statistics: {reasons}. "
        "What each reason means stands in docs/tables.md under quality."
    )
