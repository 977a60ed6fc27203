"""What the figures of the page rest on."""

from __future__ import annotations

from datetime import datetime

import streamlit as st

from vllm_slo.analytics.health import ReceiverState, freshness
from vllm_slo.analytics.instances import instances
from vllm_slo.dashboards.health_table import health_table
from vllm_slo.dashboards.sections.view import View, section


def health(view: View, receiver: ReceiverState, now: datetime) -> None:
    """Freshness, rows left out, coverage, and what each server runs."""
    section("health", "Ingest health", "What the figures above rest on.")
    fresh = view.snapshot.ask(freshness, view.extent.end)
    servers = view.snapshot.ask(instances, view.selection)
    st.html(health_table(fresh, receiver, view.counts, view.covered, servers, now))
