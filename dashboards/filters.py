"""The filters at the top of a page, and the selection that they stand for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta

import streamlit as st

from vllm_slo.analytics.extent import Extent
from vllm_slo.analytics.selection import Selection
from vllm_slo.dashboards import names

PRESETS: dict[str, timedelta | None] = {
    "All data": None,
    "Newest 15 minutes": timedelta(minutes=15),
    "Newest hour": timedelta(hours=1),
    "Newest 6 hours": timedelta(hours=6),
    "Newest 24 hours": timedelta(hours=24),
    "Newest 7 days": timedelta(days=7),
    "Newest 30 days": timedelta(days=30),
}
"""Ranges that end with the newest data, not with the clock: a recording keeps showing what it holds."""
CUSTOM = "Custom"
CLIENT = "client"
OLD = timedelta(hours=1)


def default_preset(extent: Extent, now: datetime) -> str:
    """The last hour while data arrives; everything once the newest data is older than that."""
    return "All data" if now - extent.end > OLD else "Newest hour"


def preset_range(preset: str, extent: Extent) -> tuple[datetime, datetime]:
    """Start and end of a preset."""
    length = PRESETS[preset]
    start = extent.start if length is None else max(extent.start, extent.end - length)
    return start, extent.end


def bucket_order(extent: Extent, configured: Sequence[str]) -> list[str | None]:
    """Buckets to choose from: configured ones in their order, then others that the data still has."""
    return [*configured, *(b for b in extent.buckets if b not in configured)]


def filters(extent: Extent, buckets: Sequence[str], now: datetime) -> Selection | None:
    """Draws the filters; None, with a word to the user, while a custom range ends before it starts."""
    options = [*PRESETS, CUSTOM]
    strange = _strangers(
        {
            "range": options,
            "model": [names.model(value) for value in extent.models],
            "shard": [names.shard(value) for value in extent.shards],
            "bucket": [names.bucket(value) for value in bucket_order(extent, buckets)],
        }
    )
    with st.container(horizontal=True, vertical_alignment="bottom", gap="small"):
        preset = st.selectbox(
            "Time range (UTC)",
            options,
            index=options.index(default_preset(extent, now)),
            key="range",
            bind="query-params",
            width=190,
        )
        if preset == CUSTOM:
            start, end = _custom(extent)
        else:
            start, end = preset_range(preset or options[0], extent)
        models = _choice("Model", extent.models, names.model, "model")
        shards = _choice("Shard", extent.shards, names.shard, "shard")
        chosen = _choice("Context bucket", bucket_order(extent, buckets), names.bucket, "bucket")
        sources = _reporters(extent)
        st.toggle("Live", key="live", help="Draws the page anew every ten seconds.")
    if strange:
        st.warning(f"The address asks for what is not here, and was changed: {', '.join(strange)}.")
    if end <= start:
        st.warning("The range ends before it starts. Choose an end after the start.")
        return None
    return Selection.around(start, end, models, shards, chosen, sources)


def _strangers(known: Mapping[str, Sequence[str]]) -> list[str]:
    """Choices in the address that are not to be had; to be asked before the widgets, which remove them and show all."""
    return [f"{key} {value}" for key in known for value in st.query_params.get_all(key) if value not in known[key]]


def _reporters(extent: Extent) -> tuple[str | None, ...] | None:
    """Rows of servers, or those of clients by choice; never both, which would count requests twice. None for all."""
    servers = tuple(source for source in extent.sources if source != CLIENT)
    if CLIENT not in extent.sources or not servers:
        return None
    seen = st.selectbox("Seen by", ["server", CLIENT], key="seen", bind="query-params", width=120)
    return (CLIENT,) if seen == CLIENT else servers


def _custom(extent: Extent) -> tuple[datetime, datetime]:
    minute = timedelta(minutes=1)
    start = st.datetime_input("From", _bare(extent.start), key="from", step=minute, format="YYYY-MM-DD", width=210)
    end = st.datetime_input("To", _bare(extent.end), key="to", step=minute, format="YYYY-MM-DD", width=210)
    first = extent.start if start is None else start.replace(tzinfo=UTC)
    return first, extent.end if end is None else end.replace(tzinfo=UTC)


def _bare(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(tzinfo=None)


def _choice(
    label: str, values: Sequence[str | None], called: Callable[[str | None], str], key: str
) -> tuple[str | None, ...] | None:
    """The values chosen; None for all, which is also what choosing nothing means."""
    chosen = st.multiselect(
        label,
        values,
        format_func=called,
        key=key,
        placeholder="all",
        bind="query-params",
        width=230,
        disabled=len(values) < 2,
    )
    return tuple(chosen) or None
