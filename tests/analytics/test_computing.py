"""What prefill and decode were made of, and who was in the way: against slow twins in plain Python."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from fixtures.latency_lake import BUCKETS, NOON
from fixtures.probe_lake import Told, add, fill, seconds, table, told
from vllm_slo.analytics.blockers import MOST, Blocker, blockers
from vllm_slo.analytics.computing import PARTS, UNKNOWN, computing
from vllm_slo.analytics.counts import Basis
from vllm_slo.analytics.parts import Tail
from vllm_slo.analytics.phases import Measure
from vllm_slo.analytics.query import connect
from vllm_slo.analytics.selection import Selection
from vllm_slo.exporters.schema import REQUESTS

TRAFFIC = told(1500, seed=33)
WHOLE = Selection.around(NOON - timedelta(hours=1), NOON + timedelta(hours=4))
SELECTIONS = {
    "everything": WHOLE,
    "with the probe": replace(WHOLE, shards=("a",)),
    "without": replace(WHOLE, shards=("stock",)),
}


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    made = fill(tmp_path_factory.mktemp("lake"), TRAFFIC[::2])
    add(made, TRAFFIC[1::2], first=10_000)
    return connect(made, BUCKETS)


def part(each: Told, name: str, measure: Measure) -> int:
    """Nanoseconds of one part of one request."""
    first = measure == "time_to_first_token"
    if name == UNKNOWN:
        return 0 if each.known else each.prefill + (0 if first else each.decode)
    if not each.known:
        return 0
    if name in ("preempted", "recompute"):
        return each.parts[f"{name}_before_first_token"] + (0 if first else int(getattr(each, name)))
    return each.parts[name]


@pytest.mark.parametrize("seconds_from", [None, 1.0])
@pytest.mark.parametrize("measure", list(PARTS))
@pytest.mark.parametrize("basis", ["rows", "rollups"])
@pytest.mark.parametrize("name", SELECTIONS)
def test_parts_of_prefill_and_decode_are_summed_to_the_nanosecond(
    lake: duckdb.DuckDBPyConnection, name: str, basis: Basis, measure: Measure, seconds_from: float | None
) -> None:
    tail = None if seconds_from is None else Tail(measure, seconds_from)
    shards = SELECTIONS[name].shards
    rows = [
        each
        for each in TRAFFIC
        if each.quality is None
        and (shards is None or each.shard in shards)
        and (tail is None or getattr(each, measure) >= tail.seconds * 1e9)
    ]
    found = computing(lake, SELECTIONS[name], basis, measure, tail)
    assert found is not None
    assert (found.rows, found.known) == (len(rows), sum(each.known for each in rows))
    assert {p: found.of(p) for p in PARTS[measure]} == {
        p: sum(part(r, p, measure) for r in rows) for p in PARTS[measure]
    }
    whole = sum(each.prefill + (each.decode if measure == "request_duration" else 0) for each in rows)
    assert found.whole_nanoseconds == whole
    assert (found.leading is None) == (name == "without")


def test_without_a_request_there_is_nothing_to_tell(lake: duckdb.DuckDBPyConnection) -> None:
    assert computing(lake, replace(WHOLE, shards=("no such shard",)), "rows") is None


def blocked_rows(*waits: tuple[str, str, float], quality: str | None = None) -> pa.Table:
    """Slow requests that waited for another: kind, id and seconds."""
    rows = table([Told(parts={"decode_work": 10**10}, quality=quality)] * len(waits), first=500).to_pylist()
    for row, (kind, name, took) in zip(rows, waits, strict=True):
        row[f"{kind}_blocker"], row[f"{kind}_blocker_seconds"] = name, seconds(round(took * 1e9))
    return pa.Table.from_pylist(rows, schema=REQUESTS.schema)


def test_those_in_the_way_are_named_by_what_they_cost_the_tail_with_what_is_known_of_them(tmp_path: Path) -> None:
    early = NOON - timedelta(minutes=50)
    made = fill(tmp_path, [Told(at=early, prompt_tokens=9000, quality="unfinished", finish_reason="abort"), Told()])
    long, quick = "cmpl-0-0-00000000", "cmpl-1-0-00000001"
    many = [("token_budget", f"cmpl-{i}", 0.001) for i in range(MOST)]
    made.append(
        "requests",
        blocked_rows(
            ("token_budget", long, 2.0), ("token_budget", long, 1.5), ("kv_blocks", long, 0.5),
            ("kv_blocks", quick, 0.25), ("token_budget", "it's gone", 3.0), ("kv_blocks", "never", 0.0), *many,
        ),
    )  # fmt: skip
    made.append("requests", blocked_rows(("token_budget", quick, 100.0), quality="unfinished"))
    connection = connect(made, BUCKETS)
    selection = Selection.around(NOON, NOON + timedelta(minutes=1))
    found = blockers(connection, selection, Tail("request_duration", 5.0))
    assert found[:4] == (
        Blocker(long, "queue_token_budget", 2, 3_500_000_000, "long", 9000),
        Blocker("it's gone", "queue_token_budget", 1, 3_000_000_000),
        Blocker(long, "queue_kv_blocks", 1, 500_000_000, "long", 9000),
        Blocker(quick, "queue_kv_blocks", 1, 250_000_000, "short", 100),
    )
    assert len(found) == MOST
    assert blockers(connection, selection, Tail("request_duration", 50.0)) == (), "the tail alone is asked about"
