"""Rows of requests as the tests of the probe read them: durations in whole nanoseconds, times in epoch nanoseconds."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e.probe_load import Seen
from e2e.product import query
from vllm_slo.exporters.records import DECODE_PARTS, PREFILL_PARTS, QUEUE_PARTS

Row = dict[str, Any]

COUNTS = (
    *("request_id", "engine_request_id", "records", "source", "quality", "finish_reason", "prompt_tokens"),
    *("completion_tokens", "cached_tokens", "preemptions", "lost_tokens", "recomputed_tokens", "client_disconnected"),
    *("http_status", "token_budget_blocker", "kv_blocks_blocker", "service_instance_id", "kv_blocks_peak"),
)
DURATIONS = (
    *("queue", "prefill", "decode", *QUEUE_PARTS, *PREFILL_PARTS, *DECODE_PARTS, "preempted", "recompute"),
    *("queue_behind", "request_duration", "time_to_first_token"),
)
TIMES = ("start", "end", "queued", "scheduled", "first_token", "engine_end")
COUNTS_AS = (None, "unfinished")
"""Qualities of rows that stand for their request."""
VISIBLE_WITHIN_SECONDS = 60.0


def rows(lake: Path) -> dict[str, Row]:
    """The engine's row of every request by request id; fails when not exactly one of a request's rows counts.

    On a busy machine a stock span is written before the records of the probe have come; then their row does not count.
    """
    columns = [
        *COUNTS,
        "(token_budget_blocker_seconds::decimal(38, 9) * 1000000000)::bigint as token_budget_blocked",
        *(f"({stem}_seconds::decimal(38, 9) * 1000000000)::bigint as {stem}" for stem in DURATIONS),
        *(f"epoch_ns({name}_time) as {name}_ns" for name in TIMES),
    ]
    found = query(lake, f"select {', '.join(columns)} from requests")
    counting = Counter(row["request_id"] for row in found if row["quality"] in COUNTS_AS)
    assert all(counting[row["request_id"]] == 1 for row in found), counting
    by_engine = [row for row in found if "engine" in row["records"].split("+")]
    by_id = {str(row["request_id"]): row for row in by_engine}
    assert len(by_id) == len(by_engine), "an engine's record is in the lake twice"
    return by_id


def rows_of(lake: Path, seen: Sequence[Seen]) -> list[Row]:
    """The rows of these requests in their order, as soon as all are there."""
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    wanted = {each.request_id for each in seen}
    while True:
        there = query(lake, "select distinct request_id from requests where records like 'engine%'")
        missing = wanted - {row["request_id"] for row in there}
        if not missing:
            by_id = rows(lake)
            return [by_id[each.request_id] for each in seen]
        assert time.monotonic() < deadline, f"{len(missing)} rows are missing, among them {min(missing)}"
        time.sleep(1)


def total(found: Sequence[Row], stem: str) -> int:
    """Nanoseconds over all of them."""
    return sum(row[stem] or 0 for row in found)
