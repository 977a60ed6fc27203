"""Which server runs which level of instrumentation: a stock vLLM, or one with the probe, and which of its parts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime, timedelta

import duckdb

from vllm_slo.analytics.extent import extent
from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import MINUTE, Selection
from vllm_slo.analytics.series import moment
from vllm_slo.exporters.records import PROBE_VERSION

PARTS: tuple[str, ...] = ("engine", "frontend", "edge")
"""Parts of the probe, as the column `records` names them."""
DAY = timedelta(days=1)
SILENT = timedelta(minutes=1)
"""A server that is heard of for so long after the last word of its probe, which speaks each second, has none now."""


@dataclass(frozen=True)
class Instance:
    """One server, as its rows and samples of a range of time tell; None as ``name`` for rows that name no server.

    ``rows`` counts requests; ``parts`` those with a record of each of PARTS, ``stock`` those with vLLM's own span.
    ``merged`` have records of several, ``alone`` of one. ``superseded`` and ``late`` are rows that came in a second
    piece and stand for no request of their own: they are in no other count.
    ``version`` is the probe's, None without it. ``probe_sampled`` tells of the probe's engine samples, ``dropped`` and
    ``errors`` are its highest counts in these, None without; ``gpu``: they tell of a GPU's allocator.
    ``silent_since``: the last word of a probe that was there and is not any more, though the server goes on.
    """

    name: str | None
    shard: str | None
    last_seen: datetime
    rows: int = 0
    parts: tuple[int, ...] = (0, 0, 0)
    stock: int = 0
    merged: int = 0
    alone: int = 0
    superseded: int = 0
    late: int = 0
    version: str | None = None
    probe_sampled: bool = False
    dropped: float | None = None
    errors: float | None = None
    gpu: bool = False
    silent_since: datetime | None = None

    @property
    def running(self) -> tuple[str, ...]:
        """Parts of the probe that were seen."""
        seen = [part for part, count in zip(PARTS, self.parts, strict=True) if count]
        return tuple(["engine", *seen] if self.probe_sampled and "engine" not in seen else seen)

    @property
    def level(self) -> str:
        """`probe` or `stock`."""
        return "probe" if self.running or self.version else "stock"


def instances(connection: duckdb.DuckDBPyConnection, selection: Selection) -> tuple[Instance, ...]:
    """Every server with requests or samples in the selection's range, models and shards, by name; no clients."""
    where = f"{selection.within('start_time')} and {selection.engines()} and source <> 'client'"
    found: dict[str | None, Instance] = {}
    shards: dict[str | None, str | None] = {}
    versions: dict[str | None, tuple[datetime, str]] = {}
    heard: dict[str | None, datetime] = {}
    for name, kinds, mark, resource, shard, ended, count in records(
        connection,
        "select service_instance_id, coalesce(records, source), quality, resource_attributes, any_value(shard), "
        f"epoch_us(max(end_time)), count(*) from requests where {where} group by 1, 2, 3, 4",
    ):
        last, version = moment(ended), _version(resource)
        shards[name] = shard if shards.get(name) is None else shards[name]
        found[name] = _with(found.get(name, Instance(name, shard, last)), kinds, mark, last, count)
        if {*PARTS} & {*kinds.split("+")}:
            heard[name] = max(heard.get(name, last), last)
        if version is not None:
            versions[name] = max(versions.get(name, (last, version)), (last, version))
    sampled = _sampled(connection, selection)
    whole = []
    for name in {*found, *sampled}:
        of_shard, taken, probed, dropped, errors, gpu = sampled.get(name, (None, None, None, None, None, False))
        one = found.get(name)
        seen = max(at for at in (one.last_seen if one else None, taken) if at is not None)
        base = one or Instance(name, of_shard, seen)
        whole.append(
            Instance(
                **{field: getattr(base, field) for field in _COUNTED},
                name=name,
                shard=shards.get(name) or of_shard,
                last_seen=seen,
                version=versions[name][1] if name in versions else None,
                probe_sampled=probed is not None,
                dropped=dropped,
                errors=errors,
                gpu=gpu,
                silent_since=_silent_since(heard.get(name), probed, one.last_seen if one else None, seen),
            )
        )
    return tuple(sorted(whole, key=lambda each: (each.name is None, each.name or "")))


def newest_day(connection: duckdb.DuckDBPyConnection) -> tuple[Instance, ...]:
    """Every server seen in the day up to the newest request or sample of the lake."""
    known = extent(connection)
    ((last,),) = records(connection, "select epoch_us(max(time)) from engine_samples")
    ends = [known.end] if known else []
    ends += [] if last is None else [moment(last) + MINUTE]
    return instances(connection, Selection.around(max(ends) - DAY, max(ends))) if ends else ()


_COUNTED = ("rows", "parts", "stock", "merged", "alone", "superseded", "late")


def _with(one: Instance, kinds: str, mark: str | None, last: datetime, count: int) -> Instance:
    """The instance with ``count`` more rows of a kind."""
    seen = kinds.split("+")
    known = {field: getattr(one, field) for field in _COUNTED}
    if mark in ("superseded", "late_record"):
        known["superseded" if mark == "superseded" else "late"] += count
    else:
        known["rows"] += count
        known["merged" if len(seen) > 1 else "alone"] += count
        known["stock"] += count * ("stock" in seen)
    known["parts"] = tuple(n + count * (part in seen) for part, n in zip(PARTS, one.parts, strict=True))
    return Instance(one.name, one.shard, max(one.last_seen, last), **known)


def _version(resource: str | None) -> str | None:
    """The version of the probe that a resource names."""
    version = json.loads(resource).get(PROBE_VERSION) if resource and PROBE_VERSION in resource else None
    return version if isinstance(version, str) else None


def _silent_since(
    recorded: datetime | None, sampled: datetime | None, requests: datetime | None, seen: datetime
) -> datetime | None:
    """The last word of a probe that fell silent. One that never sampled has nothing to say of an idle server."""
    words = [at for at in (recorded, sampled) if at is not None]
    latest = seen if sampled is not None else requests
    return max(words) if words and latest is not None and latest - max(words) > SILENT else None


_Sampled = tuple[str | None, datetime, datetime | None, float | None, float | None, bool]
"""Shard, last sample, last one of the probe, records dropped, errors, whether a GPU is told of."""


def _sampled(connection: duckdb.DuckDBPyConnection, selection: Selection) -> dict[str | None, _Sampled]:
    return {
        name: (shard, moment(last), None if probed is None else moment(probed), dropped, errors, gpu)
        for name, shard, last, probed, dropped, errors, gpu in records(
            connection,
            "select instance, max(shard), max(last), max(probed), sum(dropped), sum(errors), bool_or(gpu) "
            "from ("
            "select service_instance_id as instance, engine, max(shard) as shard, max(epoch_us(time)) as last, "
            "max(epoch_us(time)) filter (source = 'probe') as probed, max(probe_dropped_total) as dropped, "
            "max(probe_errors_total) as errors, "
            "bool_or(gpu_memory_allocated_bytes is not null) as gpu from engine_samples "
            f"where {selection.within('time')} and {selection.engines()} group by 1, 2) group by 1",
        )
    }
