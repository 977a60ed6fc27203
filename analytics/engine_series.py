"""Engine load over time: requests running and waiting, as sampled from vLLM's own metrics or by the probe."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import duckdb

from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection
from vllm_slo.analytics.series import STEPS, moment, start_of_step, steps

GAUGES: tuple[str, ...] = ("requests_running", "requests_waiting")


FEW = 4
"""Fewer gaps between samples than this show no rhythm."""

BEST_SOURCE = "qualify dense_rank() over (partition by instance, step order by source <> 'probe') = 1"
"""SQL, over groups by instance, step and source: the probe's where there are any."""


@dataclass(frozen=True)
class EngineSeries:
    """One engine: ``name`` is its shard (and instance and rank where needed); ``values`` per gauge, None: no sample."""

    name: str
    times: tuple[datetime, ...]
    values: dict[str, tuple[float | None, ...]]


def engine_step(connection: duckdb.DuckDBPyConnection, selection: Selection, finest: timedelta) -> timedelta:
    """The finest step of at least ``finest`` that holds a sample of every engine that is sampled without pause.

    An engine that is both scraped and has the probe is as fine as the finer of the two. The usual rhythm of all stands
    in for one that was sampled a few times only. All as in the hour up to the newest sample of the selection.
    """
    within = f"engine_samples where {selection.within('time')}"
    ((interval,),) = records(
        connection,
        "with gaps as (select service_instance_id as instance, source, epoch_us(time) - lag(epoch_us(time)) over "
        f"(partition by service_instance_id, engine, source order by time) as gap from {within} "
        f"and time >= (select max(time) from {within}) - interval 1 hour), "
        "rhythms as (select instance, source, median(gap) as gap, count(gap) as n from gaps group by all) "
        f"select coalesce((select max(least) from (select min(gap) as least from rhythms where n >= {FEW} "
        "group by instance)), (select median(gap) from gaps))",
    )
    wanted = max(finest, timedelta(microseconds=1.5 * (interval or 0)))
    return next((step for step in STEPS if step >= wanted), STEPS[-1])


def engine_series(
    connection: duckdb.DuckDBPyConnection, selection: Selection, step: timedelta
) -> tuple[EngineSeries, ...]:
    """The mean of every gauge a step and engine, filtered by time, model and shard. Empty without samples.

    The probe's samples where a server has any in a step, else those that were scraped.
    """
    means = ", ".join(f"avg({gauge})" for gauge in GAUGES)
    found = records(
        connection,
        "with means as (select service_instance_id as instance, engine, source, max(shard) as shard, "
        f"{start_of_step('time', step)} as step, {means} from engine_samples "
        f"where {selection.within('time')} and {selection.engines()} and requests_running is not null group by all) "
        "select coalesce(max(shard) over (partition by instance), instance) as name, "
        f"columns(* exclude (source, shard)) from means {BEST_SOURCE} order by all",
    )
    times = steps(selection, step)
    engines: dict[tuple[str, str, str | None], dict[datetime, tuple[float | None, ...]]] = {}
    for name, instance, engine, at, *values in found:
        engines.setdefault((name, instance, engine), {})[moment(at)] = tuple(values)
    names = engine_names(list(engines))
    nothing: tuple[float | None, ...] = (None,) * len(GAUGES)
    return tuple(
        EngineSeries(
            names[key],
            times,
            {gauge: tuple(sampled.get(time, nothing)[i] for time in times) for i, gauge in enumerate(GAUGES)},
        )
        for key, sampled in engines.items()
    )


def engine_names(keys: list[tuple[str, str, str | None]]) -> dict[tuple[str, str, str | None], str]:
    """The shortest of shard, shard/instance and shard/instance/engine that tells the engines apart."""
    for parts in (1, 2, 3):
        names = {key: " / ".join(dict.fromkeys(str(part) for part in key[:parts])) for key in keys}
        if len(set(names.values())) == len(keys):
            return names
    return names
