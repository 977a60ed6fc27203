"""Duplicates and further completions against a slow twin, whatever is in memory."""

from __future__ import annotations

import random
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lake_rows import NOON, request, requests, rows, spans
from vllm_slo.analytics.dedup import Checked, Dedup
from vllm_slo.analytics.lake import Lake
from vllm_slo.exporters.schema import QUALITY_REASONS, REQUESTS

MEGABYTE = 1 << 20


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.open(tmp_path)


def _enter(lake: Lake, dedup: Dedup, table: pa.Table, number: int, name: str = "requests") -> Checked:
    checked = dedup.check(name, table)
    lake.append(name, checked.rows, ("spool", number), checked_version=checked.version)
    dedup.committed(name, ("spool", number))
    return checked


class Twin:
    """The rule, one row at a time, remembering everything."""

    def __init__(self) -> None:
        self.ids: set[tuple[Any, ...]] = set()
        self.first: dict[tuple[Any, ...], bytes] = {}

    def check(self, table: pa.Table) -> list[dict[str, Any]]:
        kept = []
        for row in table.to_pylist():
            span = (row["day"], row["trace_id"], row["span_id"])
            if span in self.ids:
                continue
            self.ids.add(span)
            family = (row["request_id"], row["start_time"], row["service_instance_id"])
            if row["request_id"] is not None and self.first.setdefault(family, row["span_id"]) != row["span_id"]:
                row["quality"] = row["quality"] or "shared_request_id"
            kept.append(row)
        return kept


def _crowded(seed: int, count: int) -> pa.Table:
    """Few ids, few request ids, few start times on three days: collisions of every kind."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        span = chance.randrange(60)
        start = NOON + timedelta(days=span % 3, seconds=span % 5)
        made.append(
            request(
                span,
                start_time=start,
                request_id=chance.choice(
                    [None, "", "x", "cmpl-long-enough-to-pass-thirty-two-bytes-0", f"r{span % 4}"]
                ),
                service_instance_id=chance.choice(["a", "b", None]),
                quality=chance.choice([None, None, "negative_time"]),
            )
        )
    return rows(REQUESTS, made)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(0, 10_000), min_size=1, max_size=4), st.sampled_from([128 * MEGABYTE, 1 << 16]))
def test_batches_give_what_the_slow_twin_gives(tmp_path_factory: Any, seeds: list[int], memory: int) -> None:
    lake = Lake.open(tmp_path_factory.mktemp("lake"))
    dedup, twin = Dedup(lake, memory), Twin()
    for number, seed in enumerate(seeds):
        table = _crowded(seed, 40)
        checked = _enter(lake, dedup, table, number)
        expected = twin.check(table)
        assert checked.rows.to_pylist() == expected
        assert checked.duplicates == 40 - len(expected)
        assert checked.shared == sum(row["quality"] == "shared_request_id" for row in checked.rows.to_pylist())


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 10_000), min_size=2, max_size=4))
def test_a_restart_before_every_batch_changes_nothing(tmp_path_factory: Any, seeds: list[int]) -> None:
    place, twin = tmp_path_factory.mktemp("lake"), Twin()
    for number, seed in enumerate(seeds):
        table = _crowded(seed, 40)
        lake = Lake.open(place)
        assert _enter(lake, Dedup(lake), table, number).rows.to_pylist() == twin.check(table)


def test_a_retried_batch_disappears_whole(lake: Lake) -> None:
    dedup = Dedup(lake)
    _enter(lake, dedup, requests(range(500)), 1)
    again = dedup.check("requests", requests(range(500)))
    assert (again.rows.num_rows, again.duplicates) == (0, 500)


def test_spans_are_compared_with_spans_alone(lake: Lake) -> None:
    dedup = Dedup(lake)
    _enter(lake, dedup, requests(range(5)), 1)
    assert _enter(lake, dedup, spans(range(5)), 1, "spans").rows.num_rows == 5
    assert dedup.check("spans", spans(range(3, 8))).duplicates == 2


def test_rows_without_ids_are_never_duplicates(lake: Lake) -> None:
    dedup = Dedup(lake)
    nameless = requests([1, 1], trace_id=None, span_id=None, request_id=None)
    _enter(lake, dedup, nameless, 1)
    assert dedup.check("requests", nameless).duplicates == 0


def test_the_first_of_n_completions_stands_for_the_request(lake: Lake) -> None:
    dedup = Dedup(lake)
    first = requests([1], request_id="r", start_time=NOON)
    others = requests([2, 3], request_id="r", start_time=NOON)
    assert _enter(lake, dedup, first, 1).shared == 0
    checked = _enter(lake, dedup, others, 2)
    assert checked.rows["quality"].to_pylist() == ["shared_request_id"] * 2
    assert dedup.check("requests", first).duplicates == 1


def test_a_reused_request_id_at_another_time_or_instance_is_another_request(lake: Lake) -> None:
    dedup = Dedup(lake)
    table = rows(
        REQUESTS,
        [
            request(1, request_id="r", start_time=NOON),
            request(2, request_id="r", start_time=NOON + timedelta(microseconds=1)),
            request(3, request_id="r", start_time=NOON, service_instance_id="b"),
        ],
    )
    assert _enter(lake, dedup, table, 1).shared == 0


def test_an_older_mark_is_kept(lake: Lake) -> None:
    dedup = Dedup(lake)
    _enter(lake, dedup, requests([1], request_id="r", start_time=NOON), 1)
    marked = requests([2], request_id="r", start_time=NOON, quality="negative_time")
    checked = dedup.check("requests", marked)
    assert (checked.rows["quality"].to_pylist(), checked.shared) == (["negative_time"], 0)


def test_rows_of_another_writer_are_seen_even_when_merged_at_once(tmp_path: Path) -> None:
    mine, theirs = Lake.open(tmp_path), Lake.open(tmp_path)
    dedup = Dedup(mine)
    _enter(mine, dedup, requests(range(10)), 1)
    theirs.append("requests", requests(range(10, 20)), ("other", 1))
    assert dedup.check("requests", requests(range(10, 20))).duplicates == 10
    theirs.append("requests", requests(range(20, 30)), ("other", 2))
    theirs.refresh("requests")
    files = theirs.data_files("requests")
    theirs.replace("requests", files, theirs.read("requests", files), same_rows=True)
    assert dedup.check("requests", requests(range(30))).duplicates == 30
    assert dedup.check("requests", requests(range(30, 33))).duplicates == 0


def test_memory_stays_bounded_over_many_days(lake: Lake) -> None:
    dedup = Dedup(lake, memory_bytes=MEGABYTE)
    for day in range(12):
        table = requests(range(100), start_time=NOON + timedelta(days=day), day=(NOON + timedelta(days=day)).date())
        _enter(lake, dedup, table.slice(0, 100), day)
        assert dedup.size_bytes <= MEGABYTE
    assert dedup.check("requests", requests(range(100), start_time=NOON)).duplicates == 100


class Watched(Dedup):
    """Counts the files read back from the lake."""

    learned = 0

    def _learn(self, *given: Any) -> None:
        self.learned += 1
        super()._learn(*given)


def test_days_in_use_do_not_push_each_other_out_of_memory(lake: Lake) -> None:
    """Two tables and two days at once, in memory for two small filters: nothing is read back from the lake."""
    dedup = Watched(lake, memory_bytes=MEGABYTE)
    for number in range(12):
        table = requests(range(number * 5000, number * 5000 + 5000), start_time=NOON + timedelta(days=number % 2))
        _enter(lake, dedup, table, number)
        _enter(lake, dedup, spans(range(number * 3000, number * 3000 + 3000)), number, "spans")
    assert dedup.learned == 0
    assert dedup.size_bytes <= 2 * MEGABYTE
    assert dedup.check("requests", requests(range(5000), start_time=NOON)).duplicates == 5000


def test_a_day_is_loaded_ahead_on_request(lake: Lake) -> None:
    lake.append("requests", requests(range(100)))
    dedup = Dedup(lake)
    dedup.load("requests", "2026-11-30")
    assert dedup.size_bytes > 0
    assert dedup.check("requests", requests(range(99, 101))).duplicates == 1


def test_a_few_rows_for_a_large_day_are_looked_up_without_loading_it(lake: Lake) -> None:
    lake.append("requests", requests(range(2000)))
    dedup = Dedup(lake)
    assert dedup.check("requests", requests([5, 3000])).duplicates == 1
    assert dedup.size_bytes == 0
    for _ in range(50):
        assert dedup.check("requests", requests([6, 3000])).duplicates == 1
    assert dedup.size_bytes > 0


def test_ids_of_unusual_length_are_compared_exactly(lake: Lake) -> None:
    dedup = Dedup(lake)
    odd = [b"", b"1", b"1234567", b"12345678", b"0" * 40, b"1" + b"0" * 39]
    table = rows(REQUESTS, [request(i, trace_id=t, start_time=NOON, request_id=None) for i, t in enumerate(odd)])
    same_span = table.set_column(
        table.schema.get_field_index("span_id"), table.schema.field("span_id"), pa.array([b"s"] * 6, pa.binary())
    )
    assert _enter(lake, dedup, same_span, 1).rows.num_rows == 6
    assert dedup.check("requests", same_span).duplicates == 6


def test_a_day_before_1970_and_one_far_ahead_are_days_too(lake: Lake) -> None:
    dedup = Dedup(lake)
    odd = [datetime(1969, 12, 31, 23, tzinfo=NOON.tzinfo), datetime(2200, 1, 1, tzinfo=NOON.tzinfo)]
    table = rows(REQUESTS, [request(i, start_time=t) for i, t in enumerate(odd)])
    _enter(lake, dedup, table, 1)
    assert dedup.check("requests", table).duplicates == 2


class ProbeTwin:
    """The rule for rows of requests that the probe reported, one at a time, remembering everything."""

    def __init__(self) -> None:
        self.kept: list[dict[str, Any]] = []

    def check(self, table: pa.Table) -> list[dict[str, Any]]:
        new = []
        for row in table.to_pylist():
            family = [
                other
                for other in self.kept
                if all(other[name] == row[name] for name in ("request_id", "start_time", "service_instance_id"))
                and row["request_id"] is not None
                and not (other["source"] == "probe" and other["engine_request_id"] is None)
            ]
            probe = [other for other in family if other["source"] == "probe"]
            others = [other for other in family if other["source"] != "probe"]
            if any((row["trace_id"], row["span_id"]) == (o["trace_id"], o["span_id"]) for o in self.kept):
                continue
            mark = None
            if row["source"] == "probe" and row["engine_request_id"] is not None:
                same = [other for other in probe if other["engine_request_id"] == row["engine_request_id"]]
                known = {word for other in same for word in other["records"].split("+")}
                if same and set(row["records"].split("+")) - {"stock"} <= known:
                    continue
                if same or any(o["source"] == "stock" and o["quality"] != "superseded" for o in others):
                    mark = "late_record"
                elif probe:
                    mark = "shared_request_id"
            elif row["source"] == "stock" and probe:
                mark = "superseded"
            elif row["source"] != "probe" and any(other["span_id"] != row["span_id"] for other in others):
                mark = "shared_request_id"
            order = list(QUALITY_REASONS)
            if mark and (row["quality"] is None or order.index(mark) < order.index(row["quality"])):
                row["quality"] = mark
            self.kept.append(row)
            new.append(row)
        return new


def _probed(seed: int, count: int) -> pa.Table:
    """Records of few requests as `merge` leaves them: whole, in part, children, stock rows, edge rows, retries."""
    chance = random.Random(seed)
    made = []
    for _ in range(count):
        number = chance.randrange(6)
        records = chance.choice(["engine", "frontend", "engine+frontend", "engine+frontend+stock", "stock", "edge"])
        probe = records != "stock"
        child = chance.choice(["", "", "0_", "1_"])
        made.append(
            request(
                chance.randrange(200),
                start_time=NOON + timedelta(seconds=number % 2),
                request_id=chance.choice([f"r{number}", f"r{number}", f"r{number}", None]),
                source="probe" if probe else chance.choice(["stock", "stock", "client"]),
                records=records,
                engine_request_id=f"{child}r{number}-abcdef01" if probe and records != "edge" else None,
                quality=chance.choice([None, None, "unfinished", "negative_time", "superseded" if not probe else None]),
            )
        )
    return rows(REQUESTS, made)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=4), st.sampled_from([128 * MEGABYTE, 1 << 16]), st.booleans()
)
def test_rows_of_the_probe_in_batches_give_what_the_slow_twin_gives(
    tmp_path_factory: Any, seeds: list[int], memory: int, restarted: bool
) -> None:
    place, twin = tmp_path_factory.mktemp("lake"), ProbeTwin()
    lake = Lake.open(place)
    dedup = Dedup(lake, memory)
    for number, seed in enumerate(seeds):
        table = _probed(seed, 40)
        if restarted:
            lake = Lake.open(place)
            dedup = Dedup(lake, memory)
        checked = _enter(lake, dedup, table, number)
        assert checked.rows.to_pylist() == twin.check(table)


def test_of_two_completions_that_come_with_their_stock_rows_one_counts(lake: Lake) -> None:
    stock = [
        request(number, records="stock", quality="superseded", request_id="r", start_time=NOON) for number in (1, 2)
    ]
    children = [
        request(
            10 + number,
            records="engine+frontend",
            source="probe",
            engine_request_id=f"{number}_r-00000000",
            request_id="r",
            start_time=NOON,
        )
        for number in (0, 1)
    ]
    checked = Dedup(lake).check("requests", rows(REQUESTS, [*stock, *children]))
    assert checked.rows["quality"].to_pylist() == ["superseded", "superseded", None, "shared_request_id"]


def test_stock_rows_that_were_merged_are_looked_up_nowhere(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    dedup = Dedup(lake)
    both = [
        request(1, records="engine", source="probe", engine_request_id="r-1"),
        request(2, records="stock", quality="superseded", request_id=request(1)["request_id"], start_time=NOON),
    ]
    both[0]["start_time"] = NOON
    looked: list[Any] = []
    monkeypatch.setattr(dedup, "_resolve", lambda *given: looked.append(given))
    dedup.check("requests", rows(REQUESTS, both))
    assert not looked
