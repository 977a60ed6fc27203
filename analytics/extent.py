"""What there is to choose from: the range of time that the data covers, its models, shards, buckets and sources."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import duckdb

from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import literal


@dataclass(frozen=True)
class Extent:
    """First and last minute with requests, and the values that their rows carry (None: rows without one), sorted.

    Hour or day instead of minute where retention took the minutes.
    """

    start: datetime
    end: datetime
    models: tuple[str | None, ...]
    shards: tuple[str | None, ...]
    buckets: tuple[str | None, ...]
    sources: tuple[str | None, ...]


def extent(connection: duckdb.DuckDBPyConnection) -> Extent | None:
    """The extent of all requests whose time is plausible; None when there are none at all. Read from rollups."""
    where = "metric = 'requests' and quality is distinct from 'clock_skew'"
    ((first, last),) = records(connection, f"select min(time), max(time) from rollups where level = 'day' and {where}")
    if first is None:
        return None
    (start, _), (newest, width) = (_edge(connection, where, edge, day) for edge, day in (("min", first), ("max", last)))
    values = records(
        connection, f"select distinct model, shard, bucket, source from rollups where level = 'day' and {where}"
    )
    models, shards, buckets, sources = (_sorted({row[i] for row in values}) for i in range(4))
    return Extent(start, newest + width, models, shards, buckets, sources)


def _edge(connection: duckdb.DuckDBPyConnection, where: str, edge: str, day: datetime) -> tuple[datetime, timedelta]:
    """The first or last minute of a day that has requests, found over its hour; the hour or the day without finer."""
    found, within = day, timedelta(days=1)
    for level, finer in (("hour", timedelta(hours=1)), ("minute", timedelta(minutes=1))):
        ((narrower,),) = records(
            connection,
            f"select {edge}(time) from rollups where level = '{level}' and day = date '{found:%Y-%m-%d}' and {where} "
            f"and time >= {literal(found)} and time < {literal(found + within)}",
        )
        if narrower is not None:
            found, within = narrower, finer
    return found.astimezone(UTC), within


def _sorted(values: set[str | None]) -> tuple[str | None, ...]:
    return tuple(sorted(values, key=lambda value: (value is None, value or "")))
