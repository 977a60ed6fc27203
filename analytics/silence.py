"""Requests that vLLM finished after the newest one of the lake: what no figure of a range that ends there can show."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import duckdb

from vllm_slo.analytics.coverage import coverage
from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import MINUTE, Selection, literal
from vllm_slo.analytics.series import moment

ON_THE_WAY = timedelta(seconds=30)
"""A span may still be on its way: vLLM sends every 5 s, and the lake is written every few seconds."""
LOOKED_BACK = timedelta(days=1)
"""How far back from the newest sample a lake without requests is searched."""


@dataclass(frozen=True)
class Silence:
    """An instance that by its own count finished more requests in (``since``, ``until``] than the lake has."""

    instance: str
    missing: int
    since: datetime
    until: datetime


def silence(connection: duckdb.DuckDBPyConnection, newest: datetime | None) -> tuple[Silence, ...]:
    """Instances with requests finished after ``newest``, the end of the extent, that are not in the lake; by name.

    None as ``newest``: the lake has no requests. Empty where nothing was scraped since, and while spans may still be
    on their way.
    """
    after = "" if newest is None else f" where day >= date '{newest:%Y-%m-%d}' and time >= {literal(newest)}"
    ((last,),) = records(connection, f"select epoch_us(max(time)) from engine_samples{after}")
    if last is None:
        return ()
    end = (moment(last) - ON_THE_WAY).replace(second=0, microsecond=0)
    start = newest or end - LOOKED_BACK
    if end - start < MINUTE:
        return ()
    return tuple(
        Silence(found.instance, found.finished - found.received, found.since, found.until)
        for found in coverage(connection, Selection.around(start, end))
        if found.finished is not None and found.finished > found.received
    )
