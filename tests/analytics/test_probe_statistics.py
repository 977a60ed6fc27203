"""What blocked the queue, what preemption cost, how requests ended, KV use: against slow twins in plain Python."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import duckdb
import pytest

from fixtures.latency_lake import BUCKETS, NOON
from fixtures.probe_lake import VERSION, Told, add, fill, samples, told
from vllm_slo.analytics.blocked import REASONS, UNKNOWN, blocked, blocked_series
from vllm_slo.analytics.counts import Basis, counts
from vllm_slo.analytics.engine_series import engine_series, engine_step
from vllm_slo.analytics.instances import instances
from vllm_slo.analytics.kv import kv_use
from vllm_slo.analytics.outcomes import outcomes
from vllm_slo.analytics.parts import Tail
from vllm_slo.analytics.percentiles import percentiles
from vllm_slo.analytics.phases import phases
from vllm_slo.analytics.preemption import NOTHING, preemption_cost
from vllm_slo.analytics.query import connect
from vllm_slo.analytics.selection import Selection
from vllm_slo.analytics.series import steps
from vllm_slo.exporters.records import QUEUE_PARTS
from vllm_slo.exporters.schema import UNFINISHED

TRAFFIC = told(3000, seed=21)
WHOLE = Selection.around(NOON - timedelta(hours=1), NOON + timedelta(hours=4))
SELECTIONS = {
    "everything": WHOLE,
    "ragged range": Selection.around(NOON + timedelta(minutes=7), NOON + timedelta(hours=2, minutes=31)),
    "a shard with the probe": Selection(WHOLE.start, WHOLE.end, shards=("a",)),
    "a shard without": Selection(WHOLE.start, WHOLE.end, shards=("stock",)),
    "one bucket": Selection(WHOLE.start, WHOLE.end, buckets=("long",)),
    "nothing": Selection(WHOLE.start, WHOLE.end, shards=("no such shard",)),
}
BASES: tuple[Basis, ...] = ("rows", "rollups")
STEP = timedelta(minutes=30)


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    made = fill(tmp_path_factory.mktemp("lake"), TRAFFIC[::2])
    add(made, TRAFFIC[1::2], first=10_000)
    return connect(made, BUCKETS)


def chosen(selection: Selection) -> list[Told]:
    return [
        each
        for each in TRAFFIC
        if selection.start <= each.at < selection.end
        and (selection.shards is None or each.shard in selection.shards)
        and (selection.buckets is None or _bucket(each) in selection.buckets)
    ]


def _bucket(each: Told) -> str | None:
    """A request that was refused at the door has no known length."""
    return None if each.finish_reason in ("rejected", "invalid", "failed") else each.bucket


def counted(selection: Selection) -> list[Told]:
    return [each for each in chosen(selection) if each.quality is None]


def by_reason(requests: list[Told]) -> tuple[int, ...]:
    """Nanoseconds of REASONS, one request at a time."""
    sums = dict.fromkeys(REASONS, 0)
    for each in requests:
        if each.known:
            for part in QUEUE_PARTS:
                sums[part] += each.parts[part]
        else:
            sums[UNKNOWN] += each.queue
    return tuple(sums[reason] for reason in REASONS)


@pytest.mark.parametrize("tail", [None, Tail("time_to_first_token", 0.7), Tail("request_duration", 3.0)])
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("name", SELECTIONS)
def test_queue_time_by_reason_is_summed_exactly_by_shard_and_bucket(
    lake: duckdb.DuckDBPyConnection, name: str, basis: Basis, tail: Tail | None
) -> None:
    rows = [
        each for each in counted(SELECTIONS[name]) if tail is None or getattr(each, tail.measure) >= tail.seconds * 1e9
    ]
    found = blocked(lake, SELECTIONS[name], basis, tail)
    assert set(found.cells) == {(each.shard, each.bucket) for each in rows}
    groups: list[tuple[object, Callable[[Told], bool]]] = [(found.overall, lambda _: True)] if rows else []
    groups += [(b, lambda r, k=key: (r.shard, r.bucket) == k) for key, b in found.cells.items()]  # type: ignore[misc]
    groups += [(b, lambda r, k=key: r.shard == k) for key, b in found.by_shard().items()]  # type: ignore[misc]
    groups += [(b, lambda r, k=key: r.bucket == k) for key, b in found.by_bucket().items()]  # type: ignore[misc]
    for group, belongs in groups:
        members = [each for each in rows if belongs(each)]
        assert group.rows == len(members)  # type: ignore[attr-defined]
        assert group.known == sum(each.known for each in members)  # type: ignore[attr-defined]
        assert group.nanoseconds == by_reason(members)  # type: ignore[attr-defined]
        assert group.queue_nanoseconds == sum(each.queue for each in members)  # type: ignore[attr-defined]
    assert (found.overall is None) == (not rows)


@pytest.mark.parametrize("tail", [None, Tail("request_duration", 3.0)])
@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("minutes", [1, 30, 60])
def test_queue_time_by_reason_over_time_has_every_request_in_its_step(
    lake: duckdb.DuckDBPyConnection, basis: Basis, minutes: int, tail: Tail | None
) -> None:
    selection, step = SELECTIONS["ragged range"], timedelta(minutes=minutes)
    found = blocked_series(lake, selection, basis, step, tail)
    assert found.times == steps(selection, step)
    for time, group in zip(found.times, found.blocked, strict=True):
        members = [each for each in counted(selection) if time <= each.at < time + step]
        members = [each for each in members if tail is None or getattr(each, tail.measure) >= tail.seconds * 1e9]
        if group is None:
            assert not members
        else:
            assert (group.rows, group.nanoseconds) == (len(members), by_reason(members))


def test_the_tail_of_the_queue_is_the_queue_of_the_phases_tail(lake: duckdb.DuckDBPyConnection) -> None:
    slow = phases(lake, WHOLE, "rows")
    assert slow is not None
    assert slow.tail is not None
    found = blocked(lake, WHOLE, "rows", Tail("request_duration", slow.tail_from)).overall
    assert found is not None
    assert found.rows == slow.tail.rows
    assert found.queue_nanoseconds == dict(slow.tail.parts_nanoseconds)["queue"]


def test_a_queue_that_nobody_looked_into_is_all_unknown(tmp_path: Path) -> None:
    waits = {"queue_token_budget": 5_000_000}
    found = blocked(connect(fill(tmp_path, [Told(parts=waits, records="stock")]), BUCKETS), WHOLE, "rows").overall
    assert found is not None
    assert (found.known, found.leading, found.share("queue_token_budget"), found.share(UNKNOWN)) == (0, None, 0.0, 1.0)


def test_shares_are_of_the_whole_queue_time_and_the_leading_reason_is_a_known_one(tmp_path: Path) -> None:
    requests = [
        Told(parts={"queue_token_budget": 3_000_000, "queue_step": 1_000_000}),
        Told(parts={"queue_step": 4_000_000}, records=None),
    ]
    found = blocked(connect(fill(tmp_path, requests), BUCKETS), WHOLE, "rows").overall
    assert found is not None
    assert (found.rows, found.known, found.leading) == (2, 1, "queue_token_budget")
    assert (found.share("queue_token_budget"), found.share(UNKNOWN)) == (0.375, 0.5)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("name", SELECTIONS)
def test_what_preemption_cost_equals_sums_over_the_requests(
    lake: duckdb.DuckDBPyConnection, name: str, basis: Basis
) -> None:
    rows = counted(SELECTIONS[name])
    known = [each for each in rows if each.known]
    hit = [each for each in known if each.preemptions]
    found = preemption_cost(lake, SELECTIONS[name], basis, STEP)
    assert (found.rows, found.known) == (len(rows), len(known))
    assert found.overall.requests == len(hit)
    for field in ("preemptions", "lost_tokens", "recomputed_tokens"):
        assert getattr(found.overall, field) == sum(getattr(each, field) for each in hit)
    assert found.overall.preempted_nanoseconds == sum(
        each.preempted + each.parts["preempted_before_first_token"] for each in hit
    )
    assert found.overall.recompute_nanoseconds == sum(
        each.recompute + each.parts["recompute_before_first_token"] for each in hit
    )
    assert found.decode_nanoseconds == sum(each.decode for each in known)
    assert found.in_decode_nanoseconds == sum(each.preempted + each.recompute for each in known)
    lost = [each for each in chosen(SELECTIONS[name]) if each.quality == "unfinished" and each.known]
    assert found.unfinished == sum(each.preemptions for each in lost)
    for time, group in zip(found.times, found.series, strict=True):
        members = [each for each in known if time <= each.at < time + STEP]
        if not members:
            assert group is None
        else:
            assert group is not None
            assert group.preemptions == sum(each.preemptions for each in members)


def test_a_server_that_preempts_nobody_has_zeros_and_one_without_the_probe_has_none(tmp_path: Path) -> None:
    decode = {"decode_work": 1_000_000_000}
    calm = connect(fill(tmp_path / "calm", [Told(parts=decode)]), BUCKETS)
    minute = Selection.around(NOON, NOON + timedelta(minutes=1))
    found = preemption_cost(calm, minute, "rows", timedelta(minutes=1))
    assert (found.overall, found.decode_share, found.series) == (NOTHING, 0.0, (NOTHING,))
    stock = connect(fill(tmp_path / "stock", [Told(parts=decode, records="stock")]), BUCKETS)
    found = preemption_cost(stock, minute, "rows", timedelta(minutes=1))
    assert (found.known, found.decode_share, found.series) == (0, None, (None,))


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("name", SELECTIONS)
def test_requests_are_counted_once_by_how_they_ended(lake: duckdb.DuckDBPyConnection, name: str, basis: Basis) -> None:
    rows = [each for each in chosen(SELECTIONS[name]) if each.quality != "superseded"]
    lost = [each for each in rows if each.quality == "unfinished"]
    found = outcomes(lake, SELECTIONS[name], basis, STEP)
    assert found.requests == len(rows)
    assert found.told == sum(each.source == "probe" for each in rows)
    assert found.unfinished == {r: n for r in UNFINISHED if (n := sum(each.finish_reason == r for each in lost))}
    assert found.finished == sum(each.source == "probe" and each.quality != "unfinished" for each in rows)
    assert found.disconnected == sum(each.finish_reason == "abort" and bool(each.client_disconnected) for each in lost)
    classes = Counter(s if (s := each.http_status or 0) in (429, 503) else s // 100 for each in lost)
    assert found.http == dict(sorted(classes.items()))
    assert found.edge == sum(classes.values())
    for i, time in enumerate(found.times):
        here = [each for each in rows if time <= each.at < time + STEP]
        assert found.arrived[i] == len(here)
        assert found.told_by_step[i] == sum(each.source == "probe" for each in here)
        for reason, line in found.series.items():
            assert line[i] == sum(each.quality == "unfinished" and each.finish_reason == reason for each in here)


@pytest.mark.parametrize("exact_rows", [0, 10**6])
def test_requests_without_a_full_life_are_in_no_latency_and_shown_by_reason(
    lake: duckdb.DuckDBPyConnection, exact_rows: int
) -> None:
    found = counts(lake, WHOLE, exact_rows)
    marks = Counter(each.quality for each in TRAFFIC if each.quality)
    assert found.left_out == dict(sorted(marks.items()))
    assert set(marks) == {"unfinished", "superseded", "negative_time"}
    assert found.unfinished == found.errors == marks["unfinished"]
    assert found.untold == sum(each.source == "stock" for each in counted(WHOLE))
    assert found.requests == len(TRAFFIC) - marks["superseded"]
    for table in percentiles(lake, WHOLE, found.basis).values():
        assert table.rows_used <= len(counted(WHOLE))
    assert percentiles(lake, WHOLE, found.basis)["queue"].rows_used == len(counted(WHOLE))


def test_the_level_of_each_server_is_what_its_rows_are_made_of(lake: duckdb.DuckDBPyConnection) -> None:
    found = {each.name: each for each in instances(lake, WHOLE)}
    assert {name: each.level for name, each in found.items()} == {"a": "probe", "b": "probe", "stock": "stock"}
    for name, each in found.items():
        rows = [r for r in TRAFFIC if r.shard == name]
        own = [r for r in rows if r.quality != "superseded"]
        made = [(r.records or "stock").split("+") for r in own]
        assert each.rows == len(own)
        assert each.superseded == len(rows) - len(own)
        assert each.parts == tuple(sum(part in kinds for kinds in made) for part in ("engine", "frontend", "edge"))
        assert each.stock == sum("stock" in kinds for kinds in made)
        assert (each.merged, each.alone) == (sum(len(k) > 1 for k in made), sum(len(k) == 1 for k in made))
        assert each.version == (None if name == "stock" else VERSION)
    assert found["a"].running == ("engine", "frontend", "edge")
    assert found["stock"].running == ()


def test_a_server_that_only_sends_samples_is_seen_with_what_its_probe_dropped(tmp_path: Path) -> None:
    lake = fill(tmp_path, [Told(records="engine")])
    lake.append("engine_samples", samples("idle", 5, probe_dropped_total=lambda i: float(i), probe_errors_total=2.0))
    lake.append("engine_samples", samples("bare", 5, "scrape"))
    found = {each.name: each for each in instances(connect(lake, BUCKETS), WHOLE)}
    assert found["a"].running == ("engine",)
    assert (found["idle"].level, found["idle"].running, found["idle"].rows) == ("probe", ("engine",), 0)
    assert (found["idle"].dropped, found["idle"].errors) == (4.0, 2.0)
    assert found["idle"].last_seen == NOON + timedelta(seconds=4)
    assert (found["bare"].level, found["bare"].dropped) == ("stock", None)


def test_a_probe_is_silent_when_its_server_goes_on_without_it(tmp_path: Path) -> None:
    later, idle = NOON + timedelta(minutes=5), timedelta(minutes=3)
    rows = [
        *(Told(shard=name) for name in ("off", "on", "bare", "front")),
        *(Told(shard=name, at=later, records="stock") for name in ("off", "on", "bare")),
    ]
    lake = fill(tmp_path, rows)
    lake.append("engine_samples", samples("off", 60))
    lake.append("engine_samples", samples("on", 360))
    lake.append("engine_samples", samples("scraped", 60))
    for name in ("scraped", "front", "stock"):
        lake.append("engine_samples", samples(name, 2, "scrape", start=later - idle, every=60.0))
    selection = Selection.around(NOON, later + timedelta(minutes=2))
    found = {each.name: each.silent_since for each in instances(connect(lake, BUCKETS), selection)}
    assert found["off"] == found["scraped"] == NOON + timedelta(seconds=59)
    assert found["on"] is None, "a stock row alone is no sign while samples come"
    assert found["bare"] is not None
    assert NOON <= found["bare"] < NOON + timedelta(minutes=1)
    assert found["front"] is None, "a probe without samples says nothing of an idle server"
    assert found["stock"] is None


def test_a_late_record_is_counted_apart_and_is_no_request(tmp_path: Path) -> None:
    lake = fill(tmp_path, [Told(), Told(records="engine", quality="late_record")])
    (found,) = instances(connect(lake, BUCKETS), WHOLE)
    assert (found.rows, found.late, found.merged, found.alone) == (1, 1, 1, 0)
    assert counts(connect(lake, BUCKETS), WHOLE).requests == 1


def test_kv_use_is_the_mean_of_its_samples_and_waste_a_ratio_of_sums(tmp_path: Path) -> None:
    lake = fill(tmp_path, [])
    lake.append("engine_samples", samples("a", 120))
    lake.append("engine_samples", samples("a", 24, "scrape", every=5.0))
    lake.append("engine_samples", samples("b", 8, "scrape", every=15.0))
    selection = Selection.around(NOON, NOON + timedelta(minutes=3))
    probed, scraped = kv_use(connect(lake, BUCKETS), selection, timedelta(minutes=1))
    used = [100 + i for i in range(120)]
    assert (probed.name, probed.source, probed.blocks) == ("a", "probe", 1000)
    assert probed.used[:2] == pytest.approx([sum(used[:60]) / 60_000, sum(used[60:]) / 60_000])
    assert probed.stored[:2] == pytest.approx([sum(16 * u - 37 for u in m) / 960_000 for m in (used[:60], used[60:])])
    assert probed.cached[:2] == pytest.approx([0.05, 0.05])
    assert (probed.used[2], probed.stored[2]) == (None, None), "a minute without samples is a gap"
    assert probed.used_max == pytest.approx(0.219)
    assert probed.wasted_ratio == pytest.approx(37 * 120 / (16 * sum(used)))
    assert probed.occupancy_known
    assert (scraped.name, scraped.source, scraped.wasted_ratio) == ("b", "scrape", None)
    assert scraped.used[0] == pytest.approx(sum(range(4)) / 400)
    assert set(scraped.stored) == set(scraped.cached) == {None}
    assert not scraped.occupancy_known


def test_engines_of_one_server_are_told_apart(tmp_path: Path) -> None:
    lake = fill(tmp_path, [])
    for rank in ("0", "1"):
        lake.append("engine_samples", samples("a", 5, engine=rank, kv_blocks_used=100.0 * (int(rank) + 1)))
    found = kv_use(connect(lake, BUCKETS), Selection.around(NOON, NOON + timedelta(minutes=1)), timedelta(minutes=1))
    assert [(each.name, each.used_max) for each in found] == [("a / 0", 0.1), ("a / 1", 0.2)]


def test_a_server_that_got_the_probe_is_drawn_from_scrapes_before_it_and_from_the_probe_after(tmp_path: Path) -> None:
    lake = fill(tmp_path, [])
    lake.append("engine_samples", samples("a", 24, "scrape", every=5.0, kv_cache_usage_ratio=0.9, requests_running=9.0))
    lake.append("engine_samples", samples("a", 60, start=NOON + timedelta(minutes=1), kv_blocks_used=300.0))
    connection, minute = connect(lake, BUCKETS), timedelta(minutes=1)
    selection = Selection.around(NOON, NOON + timedelta(minutes=2))
    (use,) = kv_use(connection, selection, minute)
    assert (use.source, use.used) == ("probe", (pytest.approx(0.9), pytest.approx(0.3)))
    assert use.stored[0] is None
    (load,) = engine_series(connection, selection, minute)
    assert load.values["requests_running"] == (9.0, 3.0)


def test_steps_hold_a_sample_of_the_engine_with_the_slowest_rhythm(tmp_path: Path) -> None:
    lake = fill(tmp_path, [])
    selection = Selection.around(NOON, NOON + timedelta(minutes=5))
    lake.append("engine_samples", samples("a", 300))
    assert engine_step(connect(lake, BUCKETS), selection, timedelta(seconds=1)) == timedelta(seconds=2)
    lake.append("engine_samples", samples("a", 60, "scrape", every=5.0))
    assert engine_step(connect(lake, BUCKETS), selection, timedelta(seconds=1)) == timedelta(seconds=2)
    lake.append("engine_samples", samples("b", 20, "scrape", every=15.0))
    assert engine_step(connect(lake, BUCKETS), selection, timedelta(seconds=1)) == timedelta(seconds=30)
    lake.append("engine_samples", samples("c", 2, "scrape", every=120.0))
    assert engine_step(connect(lake, BUCKETS), selection, timedelta(seconds=1)) == timedelta(seconds=30)


def test_a_clients_rows_are_no_servers_rows(tmp_path: Path) -> None:
    lake = fill(tmp_path, [Told()])
    rows = connect(lake, BUCKETS).sql("select * from stored.requests").to_arrow_table()
    client = rows.set_column(rows.schema.get_field_index("source"), "source", [["client"]])
    lake.append("requests", client.cast(rows.schema))
    connection = connect(lake, BUCKETS)
    assert [each.rows for each in instances(connection, WHOLE)] == [1]
    server = replace(WHOLE, sources=("probe", "stock"))
    assert outcomes(connection, server, "rows", STEP).requests == 1
    found = blocked(connection, server, "rows").overall
    assert found is not None
    assert found.rows == 1
