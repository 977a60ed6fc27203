"""Records become the row that a slow twin makes of them, whatever order they come in; stock rows stay beside it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from datetime import timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lake_rows import request, requests, rows
from probe_spans import Request, body, edge
from vllm_slo.analytics.merge import SHARED, merge
from vllm_slo.exporters.conventions import REQUIRED_COLUMNS
from vllm_slo.exporters.otlp import plain
from vllm_slo.exporters.otlp.decoded import DecodeSettings
from vllm_slo.exporters.records import DECODE_PARTS, PREFILL_PARTS, QUEUE_PARTS
from vllm_slo.exporters.schema import PRECEDENCE, QUALITY_REASONS, REQUESTS, UNFINISHED

Row = dict[str, Any]
START = 1_796_040_000_000_000_000
RANK = {word: place for place, word in enumerate(("engine", "frontend", "edge", "stock"))}


def record(word: str, number: int, **given: Any) -> Row:
    """One record of the numbered request, as the decoders give it."""
    identity = {"engine": 100, "frontend": 200, "frontend+edge": 200, "edge": 300, "stock": 400}[word] + number
    probe = word != "stock"
    return {
        **request(number),
        "span_id": identity.to_bytes(8, "big"),
        "trace_id": identity.to_bytes(16, "big"),
        "source": "probe" if probe else "stock",
        "records": word,
        "engine_request_id": f"cmpl-{number}-0-abcdef01" if probe and word != "edge" else None,
        "finish_reason": "stop" if probe else None,
        **given,
    }


def twin(given: list[Row]) -> list[Row]:
    """What `merge` makes of rows, one at a time in plain Python; in no particular order."""
    made: list[Row] = []
    open_: dict[Any, dict[str, Row]] = {}
    stock: list[Row] = []
    for place, row in enumerate(given):
        if row["source"] != "probe" or row["quality"] not in (None, "end_before_start", "clock_skew"):
            made.append(dict(row))
            if row["source"] == "stock" and row["records"] == "stock":
                stock.append(made[-1])
            continue
        alone = row["engine_request_id"] is None
        key = ("alone", place) if alone else (row["engine_request_id"], row["start_time"], row["service_instance_id"])
        known = open_.setdefault(key, {}).get(row["records"])
        if known is None or (row["span_id"] or b"") < (known["span_id"] or b""):
            open_[key][row["records"]] = row
    for members in open_.values():
        first = next(iter(members.values()))
        reached = first["engine_request_id"] is not None
        ours = [s for s in stock if reached and first["request_id"] is not None and _same_request(s, first)]
        groups = sum(
            any(_same_request(first, other) for other in others.values())
            for others in open_.values()
            if next(iter(others.values()))["engine_request_id"] is not None
        )
        before = sorted(ours, key=lambda s: s["span_id"] or b"")
        certain = bool(ours) and groups == 1 and len({s["span_id"] for s in ours}) == 1
        certain = certain and before[0]["quality"] in (None, "superseded")
        certain = certain and not first["engine_request_id"].partition("_")[0].isdigit()
        full = {**members, **({"stock": {**before[0], "quality": None}} if certain else {})}
        made.append(_folded(full, before[0] if before else None))
        for one in ours:
            one["quality"] = "superseded"
    return made


def _same_request(a: Row, b: Row) -> bool:
    return all(a[name] == b[name] for name in ("request_id", "start_time", "service_instance_id"))


def _folded(members: dict[str, Row], stock: Row | None) -> Row:
    row: Row = {}
    for column in REQUESTS.schema.names:
        order = PRECEDENCE.get(column, PRECEDENCE[""])
        ranked = sorted(members, key=lambda word: (_rank(word, order), _bits(word)))
        values = [members[word][column] for word in ranked]
        if column in SHARED and stock is not None and "stock" not in members:
            values.append(stock[column])
        row[column] = next((value for value in values if value is not None), None)
    words = {word for text in members for word in text.split("+")}
    row["records"] = "+".join(sorted(words, key=RANK.__getitem__))
    row["source"] = "probe"
    row["quality"] = _judged(row, {member["quality"] for member in members.values()})
    return row


def _rank(text: str, order: tuple[str, ...]) -> int:
    return min((order.index(word) for word in text.split("+") if word in order), default=9)


def _bits(text: str) -> int:
    return sum(1 << RANK[word] for word in text.split("+"))


def _judged(row: Row, marks: set[str | None]) -> str | None:
    unfinished = row["finish_reason"] in UNFINISHED
    first = next((mark for mark in ("end_before_start", "clock_skew") if mark in marks), None)
    applies = {
        "missing_milestone": not unfinished and any(row[name] is None for name in REQUIRED_COLUMNS),
        "uptime_sized_time": _too_long(row),
        "negative_time": _negative(row),
        "unequal_parts": _unequal(row),
        str(first): first is not None,
        "unfinished": unfinished,
    }
    return next((reason for reason in QUALITY_REASONS if applies.get(reason)), None)


PHASES = ("queue_seconds", "prefill_seconds", "decode_seconds", "time_to_first_token_seconds")


def _too_long(row: Row) -> bool:
    duration = row["request_duration_seconds"]
    return duration is not None and any(row[p] is not None and row[p] - duration > 1 for p in PHASES)


def _negative(row: Row) -> bool:
    if any(row[p] is not None and row[p] < 0 for p in (*PHASES, "request_duration_seconds")):
        return True
    first, queue, prefill = (row[p] for p in ("time_to_first_token_seconds", "queue_seconds", "prefill_seconds"))
    return None not in (first, queue, prefill) and first - queue - prefill < -1


def _unequal(row: Row) -> bool:
    decode = [f"{stem}_seconds" for stem in (*DECODE_PARTS, "preempted", "recompute")]
    before = ["preempted_before_first_token_seconds", "recompute_before_first_token_seconds"]
    for phase, parts, less in (
        ("queue_seconds", [f"{stem}_seconds" for stem in QUEUE_PARTS], []),
        ("prefill_seconds", [f"{stem}_seconds" for stem in PREFILL_PARTS], []),
        ("decode_seconds", decode, before),
    ):
        if any(row[name] is None for name in (phase, *parts, *less)):
            continue
        if row[phase] != sum(row[name] for name in parts) - sum(row[name] for name in less):
            return True
    return False


def content(found: Iterable[Row]) -> list[str]:
    """Rows in a form and an order in which two lots of them can be compared."""
    return sorted(repr(sorted(row.items())) for row in found)


SECONDS = st.sampled_from([None, None, Decimal(0), Decimal("0.25"), Decimal("1.5"), Decimal(-1), Decimal(90)])
FILLED = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys((*PHASES, "request_duration_seconds"), SECONDS),
        **{f"{stem}_seconds": st.sampled_from([Decimal(0), Decimal("0.25")]) for stem in QUEUE_PARTS},
        **{f"{stem}_seconds": st.sampled_from([Decimal(0), Decimal("0.25")]) for stem in PREFILL_PARTS},
        **{f"{stem}_seconds": st.sampled_from([None, Decimal("0.25")]) for stem in (*DECODE_PARTS, "preempted")},
        "recompute_seconds": st.sampled_from([None, Decimal("0.25")]),
        "finish_reason": st.sampled_from([None, "stop", "abort", "error"]),
        "max_tokens": st.sampled_from([None, 7]),
        "temperature": st.sampled_from([None, 0.5]),
        "completion_tokens": st.sampled_from([None, 3, 4]),
        "tenant": st.sampled_from([None, "t"]),
        "attributes": st.sampled_from([None, "{}"]),
        "http_status": st.sampled_from([None, 200]),
        "client_disconnected": st.sampled_from([None, True]),
        "quality": st.sampled_from(
            [None, None, None, "clock_skew", "end_before_start", "negative_time", "late_record"]
        ),
        "service_instance_id": st.sampled_from([None, "a", "a", "b"]),
        "span_id": st.sampled_from([b"1" * 8, b"2" * 8]),
    },
)


@st.composite
def some_records(draw: st.DrawFn) -> list[Row]:
    found: list[Row] = []
    for _ in range(draw(st.integers(1, 8))):
        number = draw(st.integers(1, 2))
        word = draw(st.sampled_from(["engine", "frontend", "frontend+edge", "edge", "stock", "stock", None]))
        row = record(word or "stock", number) | draw(FILLED)
        child = draw(st.sampled_from(["", "", "0_", "1_"]))
        if row["engine_request_id"] is not None:
            row["engine_request_id"] = child + row["engine_request_id"]
        if word in ("edge", "stock", None):
            row["request_id"] = draw(st.sampled_from([f"cmpl-{number}-0"] * 5 + [None]))
        row["records"] = word
        found.append(row)
    return _without_ties(found)


def _without_ties(given: list[Row]) -> list[Row]:
    """Of records with one identity only the first: a sender that tries again sends the same record."""
    seen: dict[Any, Row] = {}
    for row in given:
        names = ("engine_request_id", "request_id", "start_time", "service_instance_id", "records", "span_id")
        seen.setdefault(tuple(row[name] for name in names), row)
    return list(seen.values())


@settings(max_examples=400, deadline=None)
@given(some_records(), st.randoms(use_true_random=False), st.integers(1, 4))
def test_the_rows_are_those_of_the_slow_twin_in_any_order_and_in_any_chunks(
    given_rows: list[Row], chance: random.Random, chunks: int
) -> None:
    expected = content(twin([dict(row) for row in rows(REQUESTS, given_rows).to_pylist()]))
    shuffled = chance.sample(given_rows, len(given_rows))
    parts = [rows(REQUESTS, shuffled[at::chunks]) for at in range(chunks)]
    merged = merge(pa.concat_tables(parts))
    merged.rows.validate(full=True)
    assert merged.rows.schema == REQUESTS.schema
    assert content(merged.rows.to_pylist()) == expected


def decoded(*spans: Any) -> pa.Table:
    return plain.decode(body(spans), START + 60 * 10**9, DecodeSettings()).requests


def test_engine_and_front_end_make_one_row_and_the_stock_row_stays_beside_it() -> None:
    one = Request("cmpl-1-0", START)
    stock, probe = merge(decoded(one.engine(), one.stock(), one.frontend())).rows.to_pylist()
    assert (stock["source"], stock["records"], stock["quality"]) == ("stock", "stock", "superseded")
    assert (probe["source"], probe["records"], probe["quality"]) == ("probe", "engine+frontend+edge+stock", None)
    assert (probe["queue_kv_blocks_seconds"], probe["http_status"]) == (Decimal("0.017"), 200)
    assert (probe["max_tokens"], probe["temperature"]) == (512, 0.5)
    assert probe["span_id"] == decoded(one.frontend())["span_id"][0].as_py()
    assert (stock["request_id"], stock["start_time"]) == (probe["request_id"], probe["start_time"])


def test_completions_of_one_request_merge_apart_and_none_takes_the_stock_row_of_another() -> None:
    children = [Request("cmpl-2", START, child=number) for number in (0, 1)]
    stock = Request("cmpl-2", START)
    spans = [make for child in children for make in (child.frontend(), child.engine())]
    made = merge(decoded(*spans, stock.stock(**{"gen_ai.latency.time_to_first_token": 9.0}))).rows.to_pylist()
    assert [row["records"] for row in made] == ["stock", "engine+frontend+edge", "engine+frontend+edge"]
    assert [row["temperature"] for row in made] == [0.5, 0.5, 0.5]
    assert made[0]["quality"] == "superseded"
    assert len({row["engine_request_id"] for row in made[1:]}) == 2
    assert made[1]["time_to_first_token_seconds"] == Decimal("0.075")


def test_where_the_front_end_record_is_lost_the_stock_row_tells_what_it_saw() -> None:
    one = Request("cmpl-3-0", START)
    alone = merge(decoded(one.engine())).rows.to_pylist()
    assert [(row["quality"], row["time_to_first_token_seconds"]) for row in alone] == [("missing_milestone", None)]
    _, probe = merge(decoded(one.engine(), one.stock())).rows.to_pylist()
    assert (probe["records"], probe["quality"]) == ("engine+stock", None)
    assert probe["time_to_first_token_seconds"] == Decimal("0.075")


@pytest.mark.parametrize("reason", UNFINISHED)
def test_a_request_that_did_not_end_well_is_unfinished_whatever_it_lacks(reason: str) -> None:
    one = Request("cmpl-4-0", START, finish_reason=reason)
    (row,) = merge(decoded(one.engine())).rows.to_pylist()
    assert row["quality"] == "unfinished"


def test_a_request_that_never_reached_the_engine_is_unfinished_and_merged_with_nothing() -> None:
    one = Request("r", START)
    found = merge(decoded(edge("r", START, 503), one.engine(), one.frontend())).rows.to_pylist()
    assert [(row["records"], row["quality"]) for row in found] == [
        ("edge", "unfinished"),
        ("engine+frontend+edge", None),
    ]


def test_parts_that_do_not_sum_to_their_phase_are_marked() -> None:
    one = Request("cmpl-5-0", START)
    off = one.engine(**{"vllm_slo.queue_nanoseconds": 20_000_001})
    (row,) = merge(decoded(off, one.frontend())).rows.to_pylist()
    assert row["quality"] == "unequal_parts"


def test_a_record_that_came_twice_counts_once() -> None:
    one = Request("cmpl-6-0", START)
    merged = merge(decoded(one.engine(), one.frontend(), one.engine(), one.frontend()))
    assert (merged.rows.num_rows, merged.duplicates) == (1, 2)


def test_rows_without_the_probe_come_back_as_the_same_object() -> None:
    table = requests(range(5), records="stock")
    assert merge(table).rows is table
    assert merge(table.drop_columns(["engine_request_id"])).duplicates == 0


def test_what_was_merged_before_is_left_as_it_is() -> None:
    one = Request("cmpl-7-0", START)
    once = merge(decoded(one.engine(), one.stock(), one.frontend())).rows
    assert merge(once).rows.to_pylist() == once.to_pylist()


def test_twenty_thousand_rows_take_less_than_a_tenth_of_a_second() -> None:
    many = [Request(f"cmpl-{number:x}-0", START + 1000 * number) for number in range(400)]
    block = decoded(*(make for one in many for make in (one.engine(), one.frontend())))
    table = pa.concat_tables(
        [
            block.set_column(
                block.schema.get_field_index("start_time"),
                block.schema.field("start_time"),
                pa.array(
                    [t + timedelta(seconds=copy) for t in block["start_time"].to_pylist()], pa.timestamp("us", "UTC")
                ),
            )
            for copy in range(25)
        ]
    )
    assert table.num_rows == 20_000
    took = []
    for _ in range(5):
        began = time.process_time()
        merged = merge(table)
        took.append(time.process_time() - began)
    assert merged.rows.num_rows == 10_000
    assert set(merged.rows["quality"].to_pylist()) == {None}
    assert min(took) < 0.1, took
