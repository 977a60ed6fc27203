"""Counts, percentiles, phases and series against slow twins in plain Python, from rows and from rollups."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import duckdb
import pytest

from fixtures.latency_lake import BUCKETS, NOON, Request, fill, traffic
from vllm_slo.analytics.counts import Basis, answerable, counts
from vllm_slo.analytics.histogram import RELATIVE_ERROR
from vllm_slo.analytics.percentiles import METRICS, QUANTILES, needed, percentiles, threshold
from vllm_slo.analytics.phases import MEDIAN_BAND, PARTS, TAIL_QUANTILES, Measure, phases
from vllm_slo.analytics.query import connect
from vllm_slo.analytics.selection import Selection, SelectionError
from vllm_slo.analytics.series import SERIES_QUANTILES, STEPS, series, step_for, steps
from vllm_slo.analytics.settings import QuerySettings

TRAFFIC = traffic(4000, seed=11)
WHOLE = Selection.around(NOON - timedelta(hours=1), NOON + timedelta(hours=4))
SELECTIONS = {
    "everything": WHOLE,
    "ragged range": Selection.around(NOON + timedelta(minutes=7), NOON + timedelta(hours=2, minutes=31)),
    "within an hour": Selection.around(NOON + timedelta(minutes=7), NOON + timedelta(minutes=9)),
    "one shard": Selection(WHOLE.start, WHOLE.end, shards=("b",)),
    "rows without a shard": Selection(WHOLE.start, WHOLE.end, shards=(None,)),
    "a shard or none, one model": Selection(WHOLE.start, WHOLE.end, models=("n",), shards=("a", None)),
    "one bucket": Selection(WHOLE.start, WHOLE.end, buckets=("long",)),
    "unknown lengths": Selection(WHOLE.start, WHOLE.end, buckets=(None,)),
    "nothing": Selection(WHOLE.start, WHOLE.end, shards=("no such shard",)),
}
BASES: tuple[Basis, ...] = ("rows", "rollups")


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    folder = tmp_path_factory.mktemp("lake")
    return connect(fill(folder, TRAFFIC, commits=3), BUCKETS, QuerySettings(threads=2))


def chosen(selection: Selection, requests: Iterable[Request] = TRAFFIC) -> list[Request]:
    return [
        r
        for r in requests
        if selection.start <= r.at < selection.end
        and (selection.models is None or r.model in selection.models)
        and (selection.shards is None or r.shard in selection.shards)
        and (selection.buckets is None or r.bucket in selection.buckets)
    ]


def counted(selection: Selection) -> list[Request]:
    return [r for r in chosen(selection) if r.quality is None]


def quantile_of(values: list[float], wanted: float) -> float:
    """Linear between the two values around rank q * (n - 1)."""
    ordered, rank = sorted(values), wanted * (len(values) - 1)
    low, high = ordered[math.floor(rank)], ordered[math.ceil(rank)]
    return low + (high - low) * (rank - math.floor(rank))


def seconds(request: Request, metric: str) -> float | None:
    nanoseconds = getattr(request, metric)
    return None if nanoseconds is None else nanoseconds / 1e9


def known(requests: Iterable[Request], metric: str) -> list[float]:
    return [value for r in requests if (value := seconds(r, metric)) is not None]


def close(basis: Basis) -> Callable[[float], object]:
    # Rollups hold time per output token to the nanosecond, hence the absolute part.
    relative = 1e-9 if basis == "rows" else RELATIVE_ERROR * 1.0001
    return lambda expected: pytest.approx(expected, rel=relative, abs=1e-9)


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize("exact_rows", [0, 10**6])
def test_counts_are_those_of_the_rows_whichever_answers(
    lake: duckdb.DuckDBPyConnection, name: str, exact_rows: int
) -> None:
    rows = chosen(SELECTIONS[name])
    found = counts(lake, SELECTIONS[name], exact_rows)
    left_out = Counter(r.quality for r in rows if r.quality)
    assert (found.total, found.left_out) == (len(rows), dict(sorted(left_out.items())))
    assert found.errors == sum(r.status == "error" for r in rows if r.quality is None)
    assert found.untold == found.counted - found.errors, "a stock vLLM writes no status"
    assert found.basis == ("rows" if len(rows) <= exact_rows else "rollups")


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("name", SELECTIONS)
def test_percentiles_equal_a_plain_sort_within_the_stated_error(
    lake: duckdb.DuckDBPyConnection, name: str, basis: Basis
) -> None:
    rows = counted(SELECTIONS[name])
    for metric, table in percentiles(lake, SELECTIONS[name], basis).items():
        cells = {(c.shard, c.bucket): c for c in table.cells}
        expected = {(r.shard, r.bucket) for r in rows if seconds(r, metric) is not None}
        assert set(cells) == expected
        totals = [*table.by_shard, *table.by_bucket, *([table.overall] if table.overall else [])]
        groups = (
            [(c, [r for r in rows if (r.shard, r.bucket) == key]) for key, c in cells.items()]
            + [(c, [r for r in rows if r.shard == c.shard]) for c in table.by_shard]
            + [(c, [r for r in rows if r.bucket == c.bucket]) for c in table.by_bucket]
            + ([(table.overall, rows)] if table.overall else [])
        )
        assert len(groups) == len(cells) + len(totals)
        for cell, members in groups:
            values = known(members, metric)
            assert cell.rows == len(values)
            assert cell.maximum == close(basis)(max(values))
            assert list(cell.values) == [close(basis)(quantile_of(values, q)) for q in QUANTILES]
        assert table.rows_used == len(known(rows, metric))


@pytest.mark.parametrize("basis", BASES)
def test_percentiles_never_fall_as_the_quantile_rises(lake: duckdb.DuckDBPyConnection, basis: Basis) -> None:
    for table in percentiles(lake, WHOLE, basis).values():
        for cell in (*table.cells, *table.by_shard, *table.by_bucket):
            assert list(cell.values) == sorted(cell.values)
            assert cell.maximum >= cell.values[-1]


def test_a_quantile_needs_ten_requests_beyond_it() -> None:
    assert [needed(q) for q in QUANTILES] == [20, 100, 200, 1000]


@pytest.mark.parametrize("tail", TAIL_QUANTILES)
@pytest.mark.parametrize("measure", PARTS)
@pytest.mark.parametrize("name", [name for name in SELECTIONS if name != "nothing"])
def test_phases_equal_integer_sums_of_the_groups_members(
    lake: duckdb.DuckDBPyConnection, name: str, measure: Measure, tail: float
) -> None:
    rows = counted(SELECTIONS[name])
    found = phases(lake, SELECTIONS[name], "rows", measure, tail)
    assert found is not None
    low, high, bound = (
        round(quantile_of(known(rows, measure), q) * 1e9) for q in (MEDIAN_BAND[0], MEDIAN_BAND[1], tail)
    )
    middle = [r for r in rows if low <= getattr(r, measure) <= high]
    slow = [r for r in rows if getattr(r, measure) >= bound]
    for group, members in ((found.median, middle), (found.tail, slow)):
        if group is None:
            assert not members
            continue
        assert group.rows == len(members)
        sums = [(part, sum(getattr(r, part) for r in members)) for part in PARTS[measure]]
        assert list(group.parts_nanoseconds) == sums
        assert group.measured_nanoseconds == sum(getattr(r, measure) for r in members)


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("measure", PARTS)
def test_parts_sum_exactly_to_the_measured_time(
    lake: duckdb.DuckDBPyConnection, basis: Basis, measure: Measure
) -> None:
    found = phases(lake, WHOLE, basis, measure)
    assert found is not None
    assert found.median is not None
    assert found.tail is not None
    for group in (found.median, found.tail):
        assert sum(nanoseconds for _, nanoseconds in group.parts_nanoseconds) == group.measured_nanoseconds
        assert sum(group.mean(part) for part in PARTS[measure]) == pytest.approx(group.measured, rel=1e-12)


def test_bounds_from_rollups_are_within_the_stated_error_and_means_are_of_the_rows_they_choose(
    lake: duckdb.DuckDBPyConnection,
) -> None:
    exact, rough = (phases(lake, WHOLE, basis) for basis in BASES)
    assert exact is not None
    assert rough is not None
    assert rough.tail is not None
    for bound in ("median_from", "median_to", "tail_from"):
        assert getattr(rough, bound) == pytest.approx(getattr(exact, bound), rel=RELATIVE_ERROR)
    slow = [r for r in counted(WHOLE) if r.request_duration >= round(rough.tail_from * 1e9)]
    assert (rough.tail.rows, rough.tail.measured_nanoseconds) == (len(slow), sum(r.request_duration for r in slow))


def test_a_request_on_the_bound_belongs_to_the_group(tmp_path: Path) -> None:
    rows = [Request(decode=d) for d in (123_456_789, 123_456_789, 123_456_789)]
    found = phases(connect(fill(tmp_path, rows), BUCKETS), WHOLE, "rows")
    assert found is not None
    assert found.tail is not None
    assert found.tail.rows == 3


@pytest.mark.parametrize("basis", BASES)
@pytest.mark.parametrize("minutes", [1, 10, 60, 180])
@pytest.mark.parametrize("metric", METRICS)
def test_series_equal_a_plain_sort_a_step_and_are_none_where_nothing_arrived(
    lake: duckdb.DuckDBPyConnection, metric: str, minutes: int, basis: Basis
) -> None:
    selection, step = SELECTIONS["ragged range"], timedelta(minutes=minutes)
    found = series(lake, selection, basis, metric, step)
    assert found.times == steps(selection, step)
    for i, start in enumerate(found.times):
        values = known([r for r in counted(selection) if start <= r.at < start + step], metric)
        assert found.rows[i] == len(values)
        for q in SERIES_QUANTILES:
            expected = None if not values else close(basis)(quantile_of(values, q))
            assert found.values[q][i] == expected
    assert sum(found.rows) == len(known(counted(selection), metric))


def test_a_silent_stretch_is_a_gap_in_the_series(tmp_path: Path) -> None:
    rows = [Request(at=NOON), Request(at=NOON + timedelta(minutes=3))]
    connection = connect(fill(tmp_path, rows), BUCKETS)
    selection = Selection.around(NOON, NOON + timedelta(minutes=4))
    for basis in BASES:
        found = series(connection, selection, basis, "queue", timedelta(minutes=1))
        assert [value is None for value in found.values[0.99]] == [False, True, True, False]
        assert found.rows == (1, 0, 0, 1)


def test_results_do_not_depend_on_the_order_or_the_grouping_of_the_commits(tmp_path: Path) -> None:
    shuffled = list(TRAFFIC)
    random.Random(5).shuffle(shuffled)
    results = []
    for name, rows, commits in (("one", TRAFFIC, 1), ("seven", shuffled, 7)):
        connection = connect(fill(tmp_path / name, rows, commits), BUCKETS)
        for basis in BASES:
            step = timedelta(minutes=10)
            results.append(
                (
                    percentiles(connection, WHOLE, basis),
                    phases(connection, WHOLE, basis),
                    series(connection, WHOLE, basis, "queue", step),
                )
            )
    assert results[0] == results[2]
    assert results[1] == results[3]


def test_rollups_answer_where_retention_has_removed_rows(tmp_path: Path) -> None:
    lake = fill(tmp_path, TRAFFIC)
    lake.refresh("requests")
    lake.replace("requests", lake.data_files("requests"), None, same_rows=False)
    found = counts(connect(lake, BUCKETS), WHOLE)
    assert (found.basis, found.older_rows_gone, found.total) == ("rollups", True, len(TRAFFIC))


@pytest.fixture(scope="module")
def thinned(tmp_path_factory: pytest.TempPathFactory) -> duckdb.DuckDBPyConnection:
    """Three days of requests of which retention took all but day rollups of the first, and minutes of the second."""
    lake = fill(tmp_path_factory.mktemp("thinned"), THREE_DAYS)

    def take(table: str, gone: set[tuple[str | None, int]]) -> None:
        lake.refresh(table)
        files = [
            file
            for file in lake.data_files(table)
            if (dict(file.partition).get("level"), int(dict(file.partition)["day"][-2:])) in gone
        ]
        assert files
        lake.replace(table, files, None, same_rows=False)

    take("requests", {(None, 1), (None, 2)})
    take("rollups", {("minute", 1), ("minute", 2), ("hour", 1)})
    return connect(lake, BUCKETS)


THREE_DAYS = [Request(at=NOON + timedelta(minutes=7 * i), decode=i * 10**7) for i in range(450)]


@pytest.mark.parametrize(
    ("start", "end", "expected_start", "expected_end"),
    [
        ((1, 13, 5), (1, 13, 9), (1, 0, 0), (2, 0, 0)),
        ((2, 13, 5), (2, 13, 9), (2, 13, 0), (2, 14, 0)),
        ((2, 13, 5), (3, 13, 9), (2, 13, 0), (3, 13, 9)),
        ((1, 13, 5), (3, 13, 9), (1, 0, 0), (3, 13, 9)),
    ],
)
def test_a_range_whose_minutes_are_gone_is_widened_to_what_is_known(
    thinned: duckdb.DuckDBPyConnection,
    start: tuple[int, int, int],
    end: tuple[int, int, int],
    expected_start: tuple[int, int, int],
    expected_end: tuple[int, int, int],
) -> None:
    def at(moment: tuple[int, int, int]) -> datetime:
        return datetime(2026, 6, *moment, tzinfo=UTC)

    found = answerable(thinned, Selection(at(start), at(end)))
    assert (found.selection.start, found.selection.end) == (at(expected_start), at(expected_end))
    within = [r for r in THREE_DAYS if at(expected_start) <= r.at < at(expected_end)]
    assert within
    assert (found.counts.basis, found.counts.counted, found.counts.older_rows_gone) == ("rollups", len(within), True)
    assert percentiles(thinned, found.selection, "rollups")["queue"].rows_used == len(within)
    step = step_for(found.selection, len(within), "rollups", found.counts.finest)
    assert sum(series(thinned, found.selection, "rollups", "queue", step).rows) == len(within)


def test_a_range_whose_rows_are_there_is_answered_as_asked(thinned: duckdb.DuckDBPyConnection) -> None:
    asked = Selection(datetime(2026, 6, 3, 9, 1, tzinfo=UTC), datetime(2026, 6, 3, 10, 2, tzinfo=UTC))
    found = answerable(thinned, asked)
    assert (found.selection, found.counts.basis, found.counts.older_rows_gone) == (asked, "rows", False)


def test_rows_stand_in_for_minutes_that_are_gone(tmp_path: Path) -> None:
    lake = fill(tmp_path, THREE_DAYS)
    lake.refresh("rollups")
    minutes = [
        file for file in lake.data_files("rollups") if file.partition == (("level", "minute"), ("day", "2026-06-02"))
    ]
    assert minutes
    lake.replace("rollups", minutes, None, same_rows=False)
    older = [file for file in lake.data_files("rollups") if ("day", "2026-06-01") in file.partition]
    lake.replace("rollups", [file for file in older if ("level", "minute") in file.partition], None, same_rows=False)
    connection = connect(lake, BUCKETS)
    asked = Selection(datetime(2026, 6, 2, 9, 1, tzinfo=UTC), datetime(2026, 6, 2, 10, 2, tzinfo=UTC))
    found = answerable(connection, asked)
    assert (found.selection, found.counts.basis) == (asked, "rows")
    assert found.counts.total == sum(asked.start <= r.at < asked.end for r in THREE_DAYS)
    too_many = answerable(connection, asked, exact_rows=1)
    assert too_many.selection.start.minute == too_many.selection.end.minute == 0


@pytest.mark.parametrize("count", [1, 3])
def test_equal_requests_are_both_typical_and_the_slowest(tmp_path: Path, count: int) -> None:
    found = phases(connect(fill(tmp_path, [Request()] * count), BUCKETS), WHOLE, "rows")
    assert found is not None
    assert found.median is not None
    assert found.median == found.tail
    assert (found.median.rows, found.median.measured_nanoseconds) == (count, count * Request().request_duration)


def test_an_empty_selection_has_no_statistics(lake: duckdb.DuckDBPyConnection) -> None:
    for basis in BASES:
        assert threshold(lake, SELECTIONS["nothing"], basis, "queue", (0.5,)) is None
        assert phases(lake, SELECTIONS["nothing"], basis) is None
        assert percentiles(lake, SELECTIONS["nothing"], basis)["queue"].overall is None


def test_values_in_quotes_are_values(tmp_path: Path) -> None:
    name = "o'shard\"; --"
    connection = connect(fill(tmp_path, [Request(shard=name), Request(shard="a")]), BUCKETS)
    selection = Selection(WHOLE.start, WHOLE.end, shards=(name,))
    assert [counts(connection, selection, limit).counted for limit in (0, 10)] == [1, 1]


@pytest.mark.parametrize(
    ("length", "rows", "basis", "expected"),
    [
        (timedelta(minutes=9), 3000, "rows", timedelta(seconds=10)),
        (timedelta(hours=1), 100_000, "rows", timedelta(seconds=30)),
        (timedelta(hours=1), 10_000_000, "rollups", timedelta(minutes=1)),
        (timedelta(days=1), 10_000_000, "rollups", timedelta(minutes=10)),
        (timedelta(days=7), 10_000_000, "rollups", timedelta(hours=2)),
        (timedelta(minutes=1), 1, "rows", timedelta(seconds=15)),
        (timedelta(hours=1), 0, "rows", timedelta(seconds=30)),
    ],
)
def test_steps_are_fine_enough_to_see_and_coarse_enough_to_say_something(
    length: timedelta, rows: int, basis: Basis, expected: timedelta
) -> None:
    step = step_for(Selection.around(NOON, NOON + length), rows, basis)
    assert step == expected
    assert step in STEPS


def test_a_selection_covers_the_whole_minutes_around_a_range() -> None:
    found = Selection.around(datetime(2026, 6, 1, 12, 0, 59, tzinfo=UTC), datetime(2026, 6, 1, 12, 2, 0, 1, tzinfo=UTC))
    assert (found.start, found.end) == (NOON, NOON + timedelta(minutes=3))
    assert Selection.around(NOON, NOON).end == NOON + timedelta(minutes=1)


@pytest.mark.parametrize(
    ("start", "end"),
    [(NOON, NOON), (NOON.replace(second=1), NOON + timedelta(hours=1)), (NOON.replace(tzinfo=None), NOON)],
)
def test_a_range_that_cannot_be_asked_for_is_refused(start: datetime, end: datetime) -> None:
    with pytest.raises(SelectionError):
        Selection(start, end)
