"""Rows of requests as the tests of the probe read them: durations in whole nanoseconds, times in epoch nanoseconds."""

from __future__ import annotations

import time
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
VISIBLE_WITHIN_SECONDS = 60.0


def rows(lake: Path) -> dict[str, Row]:
    """Every row by request id; fails when a request has two."""
    columns = [
        *COUNTS,
        "(token_budget_blocker_seconds::decimal(38, 9) * 1000000000)::bigint as token_budget_blocked",
        *(f"({stem}_seconds::decimal(38, 9) * 1000000000)::bigint as {stem}" for stem in DURATIONS),
        *(f"epoch_ns({name}_time) as {name}_ns" for name in TIMES),
    ]
    found = query(lake, f"select {', '.join(columns)} from requests")
    by_id = {str(row["request_id"]): row for row in found}
    assert len(by_id) == len(found), "a request is in the lake twice"
    return by_id


def rows_of(lake: Path, seen: Sequence[Seen]) -> list[Row]:
    """The rows of these requests in their order, as soon as all are there."""
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while True:
        by_id = rows(lake)
        missing = [each.request_id for each in seen if each.request_id not in by_id]
        if not missing:
            return [by_id[each.request_id] for each in seen]
        assert time.monotonic() < deadline, f"{len(missing)} rows are missing, among them {missing[:3]}"
        time.sleep(1)


def total(found: Sequence[Row], stem: str) -> int:
    """Nanoseconds over all of them."""
    return sum(row[stem] or 0 for row in found)
