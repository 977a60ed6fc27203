"""Whether the numbers can be trusted: how fresh they are and what waits, was refused or left out on the way in."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime, timedelta

import duckdb

from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import literal
from vllm_slo.analytics.series import moment


@dataclass(frozen=True)
class ReceiverState:
    """What the spool folder tells about the receiver, counted since that folder was made.

    ``waiting_since`` is the last write to the oldest segment that the lake does not have yet, None when nothing waits.
    ``counted_at`` is when the counts were saved, None when no receiver ever ran there; then the counts say nothing.
    """

    counted_at: datetime | None = None
    waiting_bytes: int = 0
    waiting_since: datetime | None = None
    accepted: int = 0
    duplicates: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    quarantined_segments: int = 0


@dataclass(frozen=True)
class Freshness:
    """The newest request of the lake, by arrival at vLLM, and when the receiver took the last of its neighbours."""

    last_start: datetime
    last_received: datetime


def freshness(connection: duckdb.DuckDBPyConnection, newest: datetime) -> Freshness | None:
    """The newest request, looked for in the hour up to ``newest`` (the end of the extent); None when none is left."""
    ((start, received),) = records(
        connection,
        "select epoch_us(max(start_time)), epoch_us(max(received_time)) from requests "
        f"where start_time >= {literal(newest - timedelta(hours=1))} and start_time < {literal(newest)}",
    )
    return None if start is None else Freshness(moment(start), moment(received))
