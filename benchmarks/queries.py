"""How long each query of the overview page takes on a lake of synthetic requests, warm, on two threads.

Every query runs once unmeasured, then five times; best and median are printed. `by hand` lines run the core aggregate
as one SQL statement without the project's code around it, so that overhead shows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import duckdb

from generate import Fleet, write
from vllm_slo.analytics.blocked import blocked, blocked_series
from vllm_slo.analytics.blockers import blockers
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.computing import computing
from vllm_slo.analytics.counts import answerable
from vllm_slo.analytics.coverage import coverage
from vllm_slo.analytics.engine_series import engine_series, engine_step
from vllm_slo.analytics.extent import extent
from vllm_slo.analytics.health import freshness
from vllm_slo.analytics.instances import instances
from vllm_slo.analytics.kv import kv_use
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.marks import marks
from vllm_slo.analytics.outcomes import outcomes
from vllm_slo.analytics.parts import Tail
from vllm_slo.analytics.percentiles import percentiles
from vllm_slo.analytics.phases import phases
from vllm_slo.analytics.preemption import preemption_cost
from vllm_slo.analytics.query import connect
from vllm_slo.analytics.selection import Selection
from vllm_slo.analytics.series import series, step_for
from vllm_slo.analytics.settings import QuerySettings

RUNS = 5
THREADS = 2
DAY_BY_HAND = (
    "select shard, bucket, metric, bin, sum(count) from rollups where level = 'day' and bin is not null "
    "and metric in ('time_to_first_token', 'time_per_output_token', 'request_duration', 'queue') group by all"
)
TAIL_BY_HAND = (
    "select sum(request_duration_seconds), sum(queue_seconds), sum(prefill_seconds), sum(decode_seconds), "
    "sum(time_to_first_token_seconds) from requests where quality is null and request_duration_seconds >= {bound}"
)


def queries(connection: duckdb.DuckDBPyConnection) -> dict[str, Callable[[], object]]:
    """The page's queries by name: over the whole day, a ragged stretch of it, one shard, the last hour, and the longest
    stretch of the longest prompts whose figures are exact."""
    found = extent(connection)
    assert found is not None, "the lake is empty"
    day = Selection.around(found.start, found.end)
    ragged = Selection.around(
        found.start + timedelta(hours=7, minutes=13), found.start + timedelta(hours=19, minutes=41)
    )
    shard = Selection.around(found.start, found.end, shards=found.shards[:1])
    hour = Selection.around(found.end - timedelta(hours=1), found.end)
    named: dict[str, Callable[[], object]] = {
        "extent": lambda: extent(connection),
        "freshness": lambda: freshness(connection, found.end),
    }
    exact = most_exact(connection, day)
    for name, selection in (("day", day), ("ragged", ragged), ("shard", shard), ("hour", hour), ("exact", exact)):
        seen = answerable(connection, selection).counts
        step = step_for(selection, seen.counted, seen.basis, seen.finest)
        bound = on_selection(connection, selection, seen.basis, step)
        named |= {f"{query}_{name}": call for query, call in bound.items()}
    slow = phases(connection, day, "rollups")
    assert slow is not None, "the lake has no requests that count"
    named["by_hand_day_histogram"] = lambda: connection.sql(DAY_BY_HAND).fetchall()
    named["by_hand_tail_sums"] = lambda: connection.sql(TAIL_BY_HAND.format(bound=slow.tail_from)).fetchall()
    return named


def most_exact(connection: duckdb.DuckDBPyConnection, day: Selection) -> Selection:
    """A stretch of the day with the last bucket, cut at its start until it is answered from rows."""
    selection = replace(day, buckets=Buckets().names[-1:])
    while answerable(connection, selection).counts.basis != "rows":
        kept = (selection.end - selection.start) * 0.97
        selection = Selection.around(selection.end - kept, selection.end, buckets=selection.buckets)
    return selection


def on_selection(
    connection: duckdb.DuckDBPyConnection, selection: Selection, basis: str, step: timedelta
) -> dict[str, Callable[[], object]]:
    """The page's queries for one selection."""
    slow = phases(connection, selection, basis, "request_duration", 0.99)
    assert slow is not None, "the selection has no requests that count"
    tail = Tail("request_duration", slow.tail_from)
    return {
        "counts": lambda: answerable(connection, selection),
        "coverage": lambda: coverage(connection, selection),
        "percentiles": lambda: percentiles(connection, selection, basis),
        "phases_first_token_p99": lambda: phases(connection, selection, basis, "time_to_first_token", 0.99),
        "phases_duration_p99": lambda: phases(connection, selection, basis, "request_duration", 0.99),
        "phases_duration_p95": lambda: phases(connection, selection, basis, "request_duration", 0.95),
        "series_first_token": lambda: series(connection, selection, basis, "time_to_first_token", step),
        "series_duration": lambda: series(connection, selection, basis, "request_duration", step),
        "events": lambda: marks(connection, selection),
        "engine_step": lambda: engine_step(connection, selection, step),
        "engine_series": lambda: engine_series(connection, selection, max(step, timedelta(seconds=10))),
        "blocked": lambda: blocked(connection, selection, basis),
        "blocked_tail": lambda: blocked(connection, selection, basis, tail),
        "blockers": lambda: blockers(connection, selection, tail),
        "computing": lambda: computing(connection, selection, basis),
        "computing_tail": lambda: computing(connection, selection, basis, "request_duration", tail),
        "blocked_series": lambda: blocked_series(connection, selection, basis, step),
        "blocked_series_tail": lambda: blocked_series(connection, selection, basis, step, tail),
        "preemption": lambda: preemption_cost(connection, selection, basis, step),
        "outcomes": lambda: outcomes(connection, selection, basis, step),
        "instances": lambda: instances(connection, selection),
        "kv_use": lambda: kv_use(connection, selection, max(step, timedelta(seconds=10))),
    }


def measure(call: Callable[[], object]) -> list[float]:
    """Milliseconds of each of RUNS calls, after one unmeasured."""
    call()
    taken = []
    for _ in range(RUNS):
        began = time.perf_counter()
        call()
        taken.append((time.perf_counter() - began) * 1000)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rows", type=int, default=10_000_000, help="synthetic requests to generate where --lake has none"
    )
    parser.add_argument(
        "--lake", type=Path, help="a lake of `generate.py`; made when absent, kept. Default: a temporary one"
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.open(arguments.lake or folder)
        if not lake.files("requests"):
            write(lake, arguments.rows, 500_000, Fleet(), Buckets())
        connection = connect(lake, Buckets(), QuerySettings(threads=THREADS))
        rows = lake.table_stats()["requests"].rows
        figures: dict[str, float] = {"rows": rows}
        for name, call in queries(connection).items():
            taken = measure(call)
            figures[f"{name}_ms_best"], figures[f"{name}_ms_median"] = (
                round(min(taken), 1),
                round(statistics.median(taken), 1),
            )
            print(f"{name:<32} best {min(taken):7.1f} ms   median {statistics.median(taken):7.1f} ms", flush=True)
    page = {k: v for k, v in figures.items() if k.endswith("_ms_median") and not k.startswith("by_hand")}
    worst = max(page, key=lambda k: page[k])
    figures["worst_ms"] = page[worst]
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    print(
        f"{rows:,} requests: slowest page query {worst.removesuffix('_ms_median')}, "
        f"median {page[worst]:.0f} ms on {THREADS} threads"
    )


if __name__ == "__main__":
    main()
