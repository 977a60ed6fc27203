"""Events of a range of time, for the pictures that show them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

import duckdb

from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection, literal
from vllm_slo.analytics.series import moment

MOST_MARKS = 200


@dataclass(frozen=True)
class Mark:
    """One event; ``where`` is the shard or instance concerned, None for all; ``end`` only for those that last."""

    time: datetime
    end: datetime | None
    kind: str
    title: str
    where: str | None


def marks(connection: duckdb.DuckDBPyConnection, selection: Selection, most: int = MOST_MARKS) -> tuple[Mark, ...]:
    """The newest ``most`` events that touch the selection's range, models and shards, in order of time.

    An event that names no model or shard concerns all of them.
    """
    concerns = [
        f"({column} is null or {column} in ({', '.join(literal(v) for v in values if v is not None) or 'null'}))"
        for column, values in (("model", selection.models), ("shard", selection.shards))
        if values is not None
    ]
    found = records(
        connection,
        "select epoch_us(time), epoch_us(end_time), kind, title, coalesce(shard, service_instance_id) from events "
        f"where time < {literal(selection.end)} and coalesce(end_time, time) >= {literal(selection.start)} "
        f"and {' and '.join(concerns) or 'true'} order by time desc, event_id limit {most}",
    )
    return tuple(
        Mark(moment(time), None if end is None else moment(end), kind, title, where)
        for time, end, kind, title, where in reversed(found)
    )
