"""Who was in the way: the requests that others stood behind longest, with what the lake has of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import duckdb

from vllm_slo.analytics.parts import Tail, nanoseconds
from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection, literal
from vllm_slo.analytics.series import moment

MOST = 5
NEAR = timedelta(hours=1)
"""Who is in the way arrived at most so long before, or with a higher priority after, those that wait for it."""


@dataclass(frozen=True)
class Blocker:
    """One request that was in the way, by its engine request id; ``reason`` is a stem of QUEUE_PARTS.

    ``waited`` requests of the selection stood behind it, ``nanoseconds`` in all. What follows is None where the lake
    has no row of it (yet).
    """

    id: str
    reason: str
    waited: int
    nanoseconds: int
    bucket: str | None = None
    prompt_tokens: int | None = None
    tenant: str | None = None


def blockers(connection: duckdb.DuckDBPyConnection, selection: Selection, tail: Tail) -> tuple[Blocker, ...]:
    """The MOST requests that the tail waited for longest; of the time in which each was the main one."""
    told = (
        "select start_time, unnest([token_budget_blocker, kv_blocks_blocker]) as id, "
        "unnest(['queue_token_budget', 'queue_kv_blocks']) as reason, "
        "unnest([token_budget_blocker_seconds, kv_blocks_blocker_seconds]) as took from requests "
        f"where quality is null and {tail.measure}_seconds >= {tail.seconds:.9f} and {selection.requests()}"
    )
    worst = records(
        connection,
        "select id, reason, count(*), sum(took), epoch_us(min(start_time)), epoch_us(max(start_time)) "
        f"from ({told}) where id is not null group by 1, 2 having sum(took) > 0 order by 4 desc, 1 limit {MOST}",
    )
    seen: dict[str, tuple[int, int]] = {}
    for name, _, _, _, first, last in worst:
        known_first, known_last = seen.get(name, (first, last))
        seen[name] = (min(first, known_first), max(last, known_last))
    known = _rows_of(connection, seen)
    return tuple(
        Blocker(name, reason, waited, nanoseconds(took), *known.get(name, (None, None, None)))
        for name, reason, waited, took, _, _ in worst
    )


def _rows_of(connection: duckdb.DuckDBPyConnection, seen: Mapping[str, tuple[int, int]]) -> dict[str, tuple[Any, ...]]:
    """Bucket, prompt tokens and tenant by engine request id, whatever the selection leaves out.

    ``seen``: when the first and the last of those arrived that waited for it, in epoch microseconds. Each has its own
    range of time, so that files and row groups outside are skipped.
    """
    if not seen:
        return {}
    found = records(
        connection,
        " union all ".join(
            f"(select engine_request_id, bucket, prompt_tokens, tenant from requests where engine_request_id = "
            f"{literal(name)} and start_time >= {literal(moment(first) - NEAR)} "
            f"and start_time <= {literal(moment(last) + NEAR)} limit 1)"
            for name, (first, last) in seen.items()
        ),
    )
    return {name: tuple(rest) for name, *rest in found}
