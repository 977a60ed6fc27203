"""Which row of one request counts when its rows come one after the other. Pure.

Rows are of one request when request id, start time and service instance are equal. In the order of their coming:

* the same trace and span id: the same row once more, left out
* a record of the probe whose engine request id is there, with all it is made of: merged before, left out
* a record of the probe whose engine request id is there without it: `late_record`
* a record of the probe whose request a stock row counts for: `late_record`
* a record of the probe beside one with another engine request id: `shared_request_id` (a child of n > 1)
* a stock row of a request that the probe reported: `superseded`
* any other row beside one with another span id: `shared_request_id`

What never reached the engine has no siblings.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import pyarrow as pa

from vllm_slo.analytics.merge import words_of

DUPLICATE = "duplicate"
COLUMNS = (
    "trace_id",
    "span_id",
    "start_time",
    "request_id",
    "service_instance_id",
    "source",
    "records",
    "engine_request_id",
    "quality",
)
"""What of a row of `requests` is looked at; of `spans`, those that it has."""


class Identity(NamedTuple):
    """A row as far as its siblings are concerned; ``time`` in microseconds."""

    trace_id: bytes | None
    span_id: bytes | None
    time: int
    request_id: str | None = None
    service_instance_id: str | None = None
    source: str | None = None
    records: str | None = None
    engine_request_id: str | None = None
    quality: str | None = None

    @property
    def reached_the_engine(self) -> bool:
        """Whether it is a record of the probe about a request of the engine."""
        return self.source == "probe" and self.engine_request_id is not None


@dataclass
class _Family:
    """What is known of one request: spans of other rows, whether a stock row counts, records by engine request id."""

    spans: set[bytes] = field(default_factory=set)
    stock_counts: bool = False
    engine: dict[str, set[str]] = field(default_factory=dict)


class Siblings:
    """Remembers rows and says what a further one is."""

    def __init__(self) -> None:
        self._ids: set[tuple[bytes, bytes]] = set()
        self._families: dict[tuple[str, int, str | None], _Family] = {}

    def note(self, row: Identity) -> None:
        """A row that is there."""
        if row.trace_id is None or row.span_id is None:
            return
        self._ids.add((row.trace_id, row.span_id))
        if row.request_id is None or (row.source == "probe" and row.engine_request_id is None):
            return
        family = self._families.setdefault((row.request_id, row.time, row.service_instance_id), _Family())
        if row.engine_request_id is not None and row.reached_the_engine:
            family.engine.setdefault(row.engine_request_id, set()).update(words_of(row.records))
        else:
            family.spans.add(row.span_id)
            family.stock_counts |= row.source == "stock" and row.quality != "superseded"

    def verdict(self, row: Identity) -> str | None:
        """DUPLICATE, the mark that the row gets, or null; rows without ids are never anything."""
        if row.trace_id is None or row.span_id is None:
            return None
        if (row.trace_id, row.span_id) in self._ids:
            return DUPLICATE
        family = self._families.get((row.request_id or "", row.time, row.service_instance_id))
        if row.request_id is None or family is None:
            return None
        if row.engine_request_id is not None and row.reached_the_engine:
            known = family.engine.get(row.engine_request_id)
            if known is not None:
                return DUPLICATE if words_of(row.records) - {"stock"} <= known else "late_record"
            if family.stock_counts:
                return "late_record"
            return "shared_request_id" if family.engine else None
        if row.source == "probe":
            return None
        if row.source == "stock" and family.engine:
            return "superseded"
        return "shared_request_id" if family.spans - {row.span_id} else None


def identities(rows: pa.Table, times: Iterable[int]) -> list[Identity]:
    """Each row; ``times`` are their starts in microseconds."""
    empty: list[None] = [None] * rows.num_rows
    names = [name for name in COLUMNS if name != "start_time"]
    columns = [rows[name].to_pylist() if name in rows.column_names else empty for name in names]
    return [Identity(trace, span, time, *rest) for time, trace, span, *rest in zip(times, *columns, strict=True)]
