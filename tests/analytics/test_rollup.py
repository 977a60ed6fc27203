"""Rollups against a slow twin, and what makes them safe to add up."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake_rows import NOON, random_requests, request, requests, rows
from vllm_slo.analytics import rollup
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.histogram import RELATIVE_ERROR, middles
from vllm_slo.exporters.schema import NON_POSITIVE_BIN, REQUESTS, ROLLUP_METRICS, ROLLUPS

BUCKETS = Buckets()
Cell = tuple[Any, ...]
Cells = dict[Cell, tuple[int, Decimal | None]]


def _cells(table: pa.Table) -> Cells:
    """Cell -> (count, sum); partial rows of one cell added."""
    counts: Counter[Cell] = Counter()
    sums: dict[Cell, Decimal | None] = {}
    for row in table.to_pylist():
        key = tuple(row[name] for name in ROLLUPS.schema.names if name not in ("count", "value_sum"))
        counts[key] += row["count"]
        if row["value_sum"] is not None:
            sums[key] = (sums.get(key) or Decimal(0)) + row["value_sum"]
        else:
            sums.setdefault(key, None)
    return {key: (counts[key], sums[key]) for key in counts}


def _twin(given_rows: pa.Table) -> Cells:
    """The rollups in plain Python, one row at a time."""
    cells: dict[Cell, list[Any]] = {}
    buckets = BUCKETS.of(given_rows["prompt_tokens"]).to_pylist()
    for row, bucket in zip(given_rows.to_pylist(), buckets, strict=True):
        for metric, quality, bin_, value in _facts(row):
            for level, floor in _FLOORS.items():
                labels = (row["shard"], row["model"], row["priority"], row["source"], bucket)
                key = (row["day"], level, floor(row["start_time"]), *labels, metric, quality, bin_)
                cell = cells.setdefault(key, [0, None])
                cell[0] += 1
                if value is not None:
                    cell[1] = (cell[1] or Decimal(0)) + value
    return {key: (count, total) for key, (count, total) in cells.items()}


_FLOORS = {
    "minute": lambda t: t.replace(second=0, microsecond=0),
    "hour": lambda t: t.replace(minute=0, second=0, microsecond=0),
    "day": lambda t: t.replace(hour=0, minute=0, second=0, microsecond=0),
}


def _facts(row: dict[str, Any]) -> Iterable[tuple[str, str | None, int | None, Decimal | None]]:
    yield "requests", row["quality"], None, None
    if row["quality"] not in (None, "unfinished"):
        return
    if row["status"] == "error" or row["finish_reason"] in ("error", "abort", "rejected", "invalid", "failed"):
        yield "errors", None, None, None
    if row["quality"] is not None:
        return
    for metric, column in rollup.PARTS.items():
        if row[column] is not None:
            yield metric, None, None, row[column]
    for metric in ("prompt_tokens", "completion_tokens"):
        if row[metric] is not None:
            yield metric, None, None, Decimal(row[metric])
    durations = {metric: row[column] for metric, column in rollup.HISTOGRAMS.items()}
    decode, tokens = row["decode_seconds"], row["completion_tokens"]
    if decode is not None and tokens is not None and tokens > 1:
        nanoseconds = math.floor(Decimal(2) * decode.scaleb(9) / (tokens - 1) + 1) // 2
        durations["time_per_output_token"] = Decimal(nanoseconds).scaleb(-9)
    for metric, value in durations.items():
        if value is not None:
            bin_ = math.ceil(32 * math.log2(value)) if value > 0 else NON_POSITIVE_BIN
            yield metric, None, bin_, value


@pytest.mark.parametrize("seed", range(5))
def test_rollups_equal_the_slow_twin(seed: int) -> None:
    table = random_requests(400, seed)
    made = rollup.rows(table, BUCKETS)
    assert made.schema == ROLLUPS.schema
    assert _cells(made) == _twin(table)
    assert made.num_rows == len(_twin(table))


def test_merging_parts_gives_the_rollups_of_the_whole() -> None:
    table = random_requests(600, seed=9)
    parts = [rollup.rows(table.slice(at, 100), BUCKETS) for at in range(0, 600, 100)]
    merged = rollup.merge(pa.concat_tables(parts))
    assert merged.num_rows == len(_twin(table))
    assert _cells(merged) == _twin(table)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=3, max_size=3), st.permutations([0, 1, 2]))
def test_merge_commutes_and_associates(sizes: list[int], order: list[int]) -> None:
    parts = [rollup.rows(random_requests(size, seed), BUCKETS) for seed, size in enumerate(sizes)]
    whole = rollup.merge(pa.concat_tables(parts))
    assert rollup.merge(pa.concat_tables([parts[place] for place in order])).equals(whole)
    first, second, third = (parts[place] for place in order)
    nested = rollup.merge(pa.concat_tables([first, rollup.merge(pa.concat_tables([second, third]))]))
    assert nested.equals(whole)
    assert rollup.merge(whole).equals(whole)


def test_merge_takes_dictionary_columns_as_compaction_reads_them() -> None:
    made = rollup.rows(random_requests(200, seed=4), BUCKETS)
    encoded = made
    for name in ("level", "shard", "metric", "quality", "bucket"):
        place = made.schema.get_field_index(name)
        encoded = encoded.set_column(place, name, made[name].combine_chunks().dictionary_encode())
    assert rollup.merge(encoded).equals(rollup.merge(made))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 10**18 - 1), min_size=1, max_size=200), st.floats(0.0, 1.0))
def test_a_quantile_from_the_bins_is_within_1_09_percent(nanoseconds: list[int], q: float) -> None:
    values = np.sort(np.array(nanoseconds, dtype=np.int64))
    ordered_bins = np.sort(rollup.bins(values))
    rank = max(0, math.ceil(q * len(values)) - 1)
    exact = int(values[rank]) / 1e9
    estimate = float(middles(ordered_bins[rank : rank + 1])[0])
    assert abs(estimate - exact) <= exact * (RELATIVE_ERROR + 1e-12)


@given(st.integers(1, 10**18 - 1))
def test_a_bin_holds_what_its_bounds_say(nanoseconds: int) -> None:
    [bin_] = rollup.bins(np.array([nanoseconds])).tolist()
    seconds = nanoseconds / 1e9
    assert 2 ** ((bin_ - 1) / 32) * (1 - 1e-12) < seconds <= 2 ** (bin_ / 32) * (1 + 1e-12)


def test_whole_powers_of_two_are_the_upper_bound_of_their_bin() -> None:
    seconds = {0.125: -96, 0.25: -64, 0.5: -32, 1: 0, 2: 32, 4: 64, 1024: 320}
    assert rollup.bins(np.array([int(s * 1e9) for s in seconds])).tolist() == list(seconds.values())


def test_values_that_are_not_positive_have_a_bin_of_their_own() -> None:
    made = rollup.rows(requests([1], queue_seconds=Decimal(0), decode_seconds=Decimal("-1.5")), BUCKETS)
    cells = {row["metric"]: row for row in made.to_pylist() if row["level"] == "day"}
    assert (cells["queue"]["bin"], cells["queue"]["value_sum"]) == (NON_POSITIVE_BIN, 0)
    assert (cells["decode"]["bin"], cells["decode"]["value_sum"]) == (NON_POSITIVE_BIN, Decimal("-1.5"))


def test_marked_rows_count_only_as_requests_of_their_mark() -> None:
    made = rollup.rows(requests([1, 2], quality="negative_time"), BUCKETS)
    assert {(row["metric"], row["quality"], row["count"]) for row in made.to_pylist()} == {
        ("requests", "negative_time", 2)
    }


def test_every_metric_of_the_schema_is_written() -> None:
    parts = dict.fromkeys(rollup.PARTS.values(), Decimal(0))
    made = rollup.rows(requests([1], status="error", **parts), BUCKETS)
    assert set(made["metric"].to_pylist()) == set(ROLLUP_METRICS)


def test_no_rows_give_no_rollups() -> None:
    assert rollup.rows(requests([]), BUCKETS).equals(ROLLUPS.schema.empty_table())
    assert rollup.merge(ROLLUPS.schema.empty_table()).num_rows == 0


def test_sums_beyond_64_bits_are_exact() -> None:
    huge = 2**63 - 1
    longest = Decimal("999999999.999999999")
    table = requests(range(100), prompt_tokens=huge, request_duration_seconds=longest, start_time=NOON)
    parts = [rollup.rows(table, BUCKETS) for _ in range(3)]
    for times, made in ((1, parts[0]), (3, rollup.merge(pa.concat_tables(parts)))):
        sums = {row["metric"]: row["value_sum"] for row in made.to_pylist() if row["level"] == "minute"}
        assert sums["prompt_tokens"] == 100 * times * huge
        assert sums["request_duration"] == 100 * times * longest


def test_times_far_apart_do_not_mix_cells() -> None:
    times = [NOON - timedelta(days=20_000), NOON, NOON + timedelta(days=80_000)]
    table = rows(REQUESTS, [request(i, start_time=t, prompt_tokens=2**62 * (i % 2)) for i, t in enumerate(times)])
    assert _cells(rollup.rows(table, BUCKETS)) == _twin(table)


def test_a_slice_of_a_table_rolls_up_like_a_copy() -> None:
    table = random_requests(300, seed=8)
    piece = table.slice(100, 100)
    copy = pa.Table.from_pylist(piece.to_pylist(), schema=piece.schema)
    assert rollup.rows(piece, BUCKETS).equals(rollup.rows(copy, BUCKETS))


def test_day_rows_carry_the_midnight_of_their_day() -> None:
    made = rollup.rows(requests([1]), BUCKETS)
    midnights = {row["time"] for row in made.to_pylist() if row["level"] == "day"}
    assert midnights == {datetime(2026, 11, 30, tzinfo=NOON.tzinfo)}
