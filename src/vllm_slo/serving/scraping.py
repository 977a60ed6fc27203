"""Scraped batches -> the lake, each stored once, and the models they name -> the decoders.

A page of vLLM names the model but no shard, a stock span the shard but no model: each learns from the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.analytics import events
from vllm_slo.analytics.lake import Lake
from vllm_slo.exporters.schema import ENGINE_SAMPLES
from vllm_slo.exporters.vllm.changes import Event

Models = dict[str, str]
Shards = Mapping[str, str]


class LakeSink:
    """Takes the batches of one scraper. ``writer`` names it in the lake's transactions; ``learned`` gets new models.

    ``shards`` are those of the instances whose spans came so far; samples of targets without one take it from there.
    A batch that failed half-way comes again as the same object: it keeps its number, so what is stored stays once.
    """

    def __init__(self, lake: Lake, writer: str, learned: Callable[[Models], None], shards: Shards) -> None:
        self._lake = lake
        self._writer = writer
        self._learned = learned
        self._shards = shards
        self._number = lake.applied(ENGINE_SAMPLES.name, writer) or 0
        self._batch: pa.Table | None = None
        self._models: Models = {}

    def __call__(self, rows: pa.Table, happened: list[Event]) -> None:
        """Store one batch. Raises what the lake raises; then the batch may be given again."""
        if rows is not self._batch:
            self._batch = rows
            self._number += 1
        if rows.num_rows:
            self._lake.append(ENGINE_SAMPLES.name, sharded(rows, self._shards), (self._writer, self._number))
        if happened:
            events.add(self._lake, events.table(happened))
        found = {**self._models, **models(rows)}
        if found != self._models:
            self._models = found
            self._learned(found)


def sharded(rows: pa.Table, shards: Shards) -> pa.Table:
    """The samples with unknown shards filled in where their instance's shard is known."""
    known = pa.array([shards.get(instance) for instance in rows["service_instance_id"].to_pylist()], pa.string())
    position = rows.schema.get_field_index("shard")
    return rows.set_column(position, rows.schema.field(position), pc.coalesce(rows["shard"], known))


def shards_of(requests: pa.Table) -> Shards:
    """Service instance -> shard of rows of `requests`; the last one wins."""
    pairs = requests.select(["service_instance_id", "shard"]).group_by(["service_instance_id", "shard"]).aggregate([])
    return {row["service_instance_id"]: row["shard"] for row in pairs.to_pylist() if row["service_instance_id"]}


def models(rows: pa.Table) -> Models:
    """Service instance -> model, of instances that name exactly one."""
    pairs = rows.select(["service_instance_id", "model"]).group_by(["service_instance_id", "model"]).aggregate([])
    found: dict[str, set[str]] = {}
    for pair in pairs.to_pylist():
        if pair["model"]:
            found.setdefault(pair["service_instance_id"], set()).add(pair["model"])
    return {instance: next(iter(names)) for instance, names in found.items() if len(names) == 1}
