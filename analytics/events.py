"""Events written by hand, by continuous integration or by an import: each id once, however often it is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from datetime import UTC, datetime

import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.analytics.lake import CommitConflict, Lake
from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.schema import EVENT_KINDS, EVENTS

ALONE = "vllm-slo-events"
"""Application transaction of all who add events: of two at once, one looks again whether its ids are there."""
ATTEMPTS = 50


class EventError(SloError):
    """An event that cannot be kept."""


def row(
    kind: str,
    title: str,
    time: datetime,
    *,
    end_time: datetime | None = None,
    detail: Mapping[str, object] | None = None,
    instance: str | None = None,
    shard: str | None = None,
    model: str | None = None,
    event_id: str | None = None,
    source: str = "command",
) -> dict[str, object]:
    """One row of ``events``.

    Without ``event_id`` the id is a digest of everything else but the detail, so that the same call gives the same id.
    """
    if kind not in EVENT_KINDS:
        raise EventError(f"kind '{kind}' is unknown; write one of {', '.join(EVENT_KINDS)}")
    if not title.strip():
        raise EventError("the title is empty; write one line for people")
    for name, text in (("id", event_id), ("shard", shard), ("instance", instance), ("model", model)):
        if text is not None and not text.strip():
            raise EventError(f"the {name} is empty, perhaps from a variable that is not set; write one or leave it out")
    if end_time is not None and end_time < time:
        raise EventError(f"the event ends at {end_time.isoformat()}, before it begins at {time.isoformat()}; swap them")
    moments = [moment.astimezone(UTC).isoformat() if moment else None for moment in (time, end_time)]
    identity = json.dumps([kind, title, *moments, instance, shard, model])
    return {
        "event_id": event_id or hashlib.sha256(identity.encode()).hexdigest()[:32],
        "time": time.astimezone(UTC),
        "end_time": end_time.astimezone(UTC) if end_time else None,
        "kind": kind,
        "title": title,
        "detail": json.dumps(detail, sort_keys=True) if detail else None,
        "service_instance_id": instance,
        "shard": shard,
        "model": model,
        "source": source,
    }


def table(rows: list[dict[str, object]]) -> pa.Table:
    """Rows as an Arrow table in the columns of ``events``."""
    return pa.Table.from_pylist(rows, schema=EVENTS.schema)


def add(lake: Lake, events: pa.Table) -> int:
    """Append the events whose id the lake does not have; how many that were. Safe beside other writers."""
    for attempt in range(ATTEMPTS):
        version = lake.refresh(EVENTS.name)
        known = lake.read(EVENTS.name, lake.data_files(EVENTS.name), ["event_id"])["event_id"]
        new = _first_of_each(events.filter(pc.invert(pc.is_in(events["event_id"], value_set=known.combine_chunks()))))
        if new.num_rows == 0:
            return 0
        try:
            lake.append(EVENTS.name, new, alone=ALONE, checked_version=version)
        except CommitConflict:
            if attempt == ATTEMPTS - 1:
                raise
            continue
        return int(new.num_rows)
    raise AssertionError("unreachable")


def _first_of_each(events: pa.Table) -> pa.Table:
    seen: dict[str, int] = {}
    for position, event_id in enumerate(events["event_id"].to_pylist()):
        seen.setdefault(event_id, position)
    return events.take(pa.array(sorted(seen.values()), pa.int64()))
