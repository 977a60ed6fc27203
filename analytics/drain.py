"""Decoded rows -> the lake, exactly once for each table, whatever dies in between.

Order of the commits of one segment: spans, requests, rollups. Each carries the writer and number as a Delta application
transaction, so a replay skips what is there. If requests went in and rollups did not, the replay reads the rows back
from the files of that very transaction (they carry its name, and maintenance leaves them alone until the rollups are
in), so rollups count exactly the rows that the table holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from vllm_slo.analytics import events, rollup, samples
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.datafile import Writer
from vllm_slo.analytics.dedup import Dedup
from vllm_slo.analytics.lake import CommitConflict, Lake
from vllm_slo.analytics.merge import merge

ALONE = "vllm-slo-dedup"
"""Application transaction shared by all writers that remove duplicates: of two at once, one looks again."""
_NOTHING = pa.table({})
ATTEMPTS = 50
"""Tries against other writers; each failed one means that another writer got through."""


@dataclass(frozen=True)
class Applied:
    """Rows that this call committed, rows it found in the lake already, further completions it marked.

    ``replayed``: requests were committed under this number before, and those of this call were not looked at.
    """

    requests: int = 0
    spans: int = 0
    engine_samples: int = 0
    events: int = 0
    duplicates: int = 0
    shared: int = 0
    replayed: bool = False


class Drain:
    """Applies segments to a lake. One thread at a time; other processes may drain into the same lake."""

    def __init__(self, lake: Lake, buckets: Buckets, dedup: Dedup | None = None) -> None:
        self._lake = lake
        self._buckets = buckets
        self._dedup = dedup or Dedup(lake)

    def apply(self, writer_id: str, number: int, tables: Mapping[str, pa.Table]) -> Applied:
        """Commit the rows of one segment, given by the name of their table; records of one request become one row.

        A writer applies its numbers in ascending order and does not go on past a number that failed: numbers at or
        below the last one committed count as replays. Replaying a segment, whole or half applied, gives the same lake.
        Empty tables are skipped. Raises LakeError when the lake cannot be written; call again with the same arguments.
        """
        writer = (writer_id, number)
        given = {name: rows for name, rows in tables.items() if rows.num_rows}
        spans, requests = given.get("spans", _NOTHING), given.get("requests", _NOTHING)
        spans_in, span_doubles, _ = self._new_rows("spans", spans, writer)
        samples_in, sample_doubles = self._samples(given.get("engine_samples"), writer)
        events_in, event_doubles = self._events(given.get("events"))
        merged = merge(requests)
        requests_in, request_doubles, shared = self._new_rows("requests", merged.rows, writer)
        if requests.num_rows and not self._is_applied("rollups", writer):
            kept = self._written(writer) if requests_in is None else requests_in
            if kept.num_rows:
                self._lake.append("rollups", rollup.rows(kept, self._buckets), writer)
        if requests_in is not None:
            request_doubles += merged.duplicates
        return Applied(
            requests=requests_in.num_rows if requests_in is not None else 0,
            spans=spans_in.num_rows if spans_in is not None else 0,
            engine_samples=samples_in,
            events=events_in,
            duplicates=span_doubles + sample_doubles + event_doubles + request_doubles,
            shared=shared,
            replayed=requests_in is None,
        )

    def _samples(self, rows: pa.Table | None, writer: Writer) -> tuple[int, int]:
        """Samples committed and duplicates; none of either when the number was applied before."""
        if rows is None or self._is_applied("engine_samples", writer):
            return 0, 0
        added = samples.add(self._lake, rows, writer)
        return added, rows.num_rows - added

    def _events(self, rows: pa.Table | None) -> tuple[int, int]:
        """Events committed and those that were there: an event has its id, so a replay finds it."""
        if rows is None:
            return 0, 0
        added = events.add(self._lake, rows)
        return added, rows.num_rows - added

    def _new_rows(self, table: str, rows: pa.Table, writer: Writer) -> tuple[pa.Table | None, int, int]:
        """The rows committed, duplicates and further completions; no rows (null) when the number was applied before."""
        if rows.num_rows == 0:
            return rows, 0, 0
        for attempt in range(ATTEMPTS):
            if self._is_applied(table, writer):
                return None, 0, 0
            checked = self._dedup.check(table, rows)
            if checked.rows.num_rows == 0:
                return checked.rows, checked.duplicates, checked.shared
            try:
                if not self._lake.append(table, checked.rows, writer, alone=ALONE, checked_version=checked.version):
                    return None, 0, 0
            except CommitConflict:
                if attempt == ATTEMPTS - 1:
                    raise
                continue
            self._dedup.committed(table, writer)
            return checked.rows, checked.duplicates, checked.shared
        raise AssertionError("unreachable")

    def _is_applied(self, table: str, writer: Writer) -> bool:
        highest = self._lake.applied(table, writer[0])
        return highest is not None and highest >= writer[1]

    def _written(self, writer: Writer) -> pa.Table:
        self._lake.refresh("requests")
        return self._lake.read("requests", [f for f in self._lake.data_files("requests") if f.writer == writer])
