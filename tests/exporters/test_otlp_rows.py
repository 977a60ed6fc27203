"""Times, durations and gates: the numbers that everything later stands on."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime
from decimal import ROUND_HALF_EVEN, Decimal

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_slo.exporters.otlp.quality import REASONS, Measure, TimeFlags, request_quality, span_quality
from vllm_slo.exporters.otlp.resources import Resource
from vllm_slo.exporters.otlp.rows import Common, ids_array, measure, seconds_array, spans_table
from vllm_slo.exporters.schema import QUALITY_REASONS, SPANS, TEXT

SECOND = 10**9
RECEIVED = 1_796_080_000 * SECOND
NOBODY = Resource(None, None, None, None, None, False)


@given(st.lists(st.floats(min_value=-999_999_999.0, max_value=999_999_999.0), min_size=1))
@example([1 / 1024, -1 / 1024, 3 / 1024, math.nextafter(1 / 1024, 1), math.nextafter(1 / 1024, 0)])
@example([0.0, -0.0, 5e-324, 1e-9, 0.1, 999_999_999.9999999])
def test_seconds_become_the_nearest_nanosecond_half_to_even(values: list[float]) -> None:
    exact = [Decimal(v).scaleb(9) for v in values]
    result = measure(np.array(values))
    assert result.known.all()
    for nanoseconds, wanted in zip(result.nanoseconds.tolist(), exact, strict=True):
        nearest = int(wanted.quantize(Decimal(1), rounding=ROUND_HALF_EVEN))
        if nanoseconds != nearest:
            assert abs(abs(wanted - nearest) - Decimal("0.5")) < Decimal(2) ** -48
            assert nanoseconds % 2 == 0


@given(st.lists(st.integers(-(10**18) + 1, 10**18 - 1), min_size=1))
def test_nanoseconds_survive_the_decimal_column_exactly(values: list[int]) -> None:
    known = np.array([v % 3 != 0 for v in values])
    array = seconds_array(Measure(np.array(values, dtype=np.int64), known))
    array.validate(full=True)
    expected = [Decimal(v).scaleb(-9) if k else None for v, k in zip(values, known.tolist(), strict=True)]
    assert array.to_pylist() == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e9, -1e9, 1e300])
def test_what_is_no_duration_is_unknown(value: float) -> None:
    result = measure(np.array([value, 1.5]))
    assert result.known.tolist() == [False, True]
    assert seconds_array(result).to_pylist() == [None, Decimal("1.5")]


def row(start: int, end: int, startup: bool = False) -> dict[str, object]:
    common = Common(
        start=np.array([start], dtype=np.uint64),
        end=np.array([end], dtype=np.uint64),
        trace_id=ids_array([b"\1" * 16]),
        span_id=ids_array([b"\1" * 8]),
        parent_span_id=ids_array([None]),
        resource=np.array([0]),
        resources=[NOBODY],
        received_ns=RECEIVED,
    )
    columns = {name: pa.array(["x"], TEXT) for name in ("name", "kind")}
    table = spans_table(common, np.array([startup]), columns)
    assert table.schema == SPANS.schema
    table.validate(full=True)
    return dict(table.to_pylist()[0])


def test_times_are_cut_to_the_microsecond_and_the_duration_keeps_nanoseconds() -> None:
    found = row(RECEIVED + 1_999, RECEIVED + 3_001)
    assert found["start_time"] == datetime.fromtimestamp(RECEIVED // SECOND, UTC).replace(microsecond=1)
    assert found["duration_seconds"] == Decimal("0.000001002")
    assert found["quality"] is None


@pytest.mark.parametrize(
    ("start", "end", "quality"),
    [
        (RECEIVED, RECEIVED, None),
        (RECEIVED + 300 * SECOND, RECEIVED + 301 * SECOND, None),
        (RECEIVED + 301 * SECOND, RECEIVED + 302 * SECOND, "clock_skew"),
        (RECEIVED, RECEIVED - 1, "end_before_start"),
        (RECEIVED, 0, "end_before_start"),
        (0, 0, "clock_skew"),
        (0, RECEIVED, "clock_skew"),
        (1_420_070_400 * SECOND - 1, RECEIVED, "clock_skew"),
        (1_420_070_400 * SECOND, RECEIVED, None),
        (RECEIVED, 2**63 - 1, None),
        (RECEIVED, 2**63, "clock_skew"),
        (2**64 - 1, 2**64 - 1, "clock_skew"),
        (2**64 - 1, 0, "end_before_start"),
    ],
)
def test_odd_times_are_kept_and_marked(start: int, end: int, quality: str | None) -> None:
    found = row(start, end)
    assert found["quality"] == quality
    duration = Decimal(end - start).scaleb(-9)
    assert found["duration_seconds"] == (duration if abs(end - start) < 10**18 else None)


@pytest.mark.parametrize(
    ("start", "day"),
    [
        (RECEIVED - 86_400 * SECOND, date(2026, 11, 29)),
        (RECEIVED + 86_400 * SECOND, date(2026, 12, 1)),
        (RECEIVED + 86_400 * SECOND + 1, date(2026, 11, 30)),
        (1_420_070_400 * SECOND, date(2015, 1, 1)),
        (1_420_070_400 * SECOND - 1, date(2026, 11, 30)),
        (0, date(2026, 11, 30)),
        (2**64 - 1, date(2026, 11, 30)),
    ],
)
def test_the_partition_is_the_day_of_the_start_unless_that_is_implausible(start: int, day: date) -> None:
    assert row(start, start)["day"] == day


def test_a_start_up_span_is_marked_last() -> None:
    assert row(RECEIVED, RECEIVED, startup=True)["quality"] == "startup"
    assert row(RECEIVED, RECEIVED - 1, startup=True)["quality"] == "end_before_start"


GOOD = {
    "time_to_first_token_seconds": 0.6,
    "request_duration_seconds": 2.0,
    "queue_seconds": 0.1,
    "prefill_seconds": 0.4,
    "decode_seconds": 1.4,
}
UPTIME = 812_345.678


def quality(tokens: bool = True, skew: bool = False, backwards: bool = False, **changed: float) -> str | None:
    measures = {name: measure(np.array([value])) for name, value in (GOOD | changed).items()}
    flags = TimeFlags(end_before_start=np.array([backwards]), clock_skew=np.array([skew]))
    known = {"prompt_tokens": np.array([tokens]), "completion_tokens": np.array([True])}
    (reason,) = request_quality(flags, measures, known).to_pylist()
    assert reason is None or isinstance(reason, str)
    return reason


def test_a_sound_request_counts() -> None:
    assert quality() is None


@pytest.mark.parametrize("column", sorted(GOOD))
def test_a_missing_duration_is_a_missing_milestone(column: str) -> None:
    assert quality(**{column: math.nan}) == "missing_milestone"


def test_a_missing_token_count_is_a_missing_milestone() -> None:
    assert quality(tokens=False) == "missing_milestone"


@pytest.mark.parametrize(
    "column", ["time_to_first_token_seconds", "queue_seconds", "prefill_seconds", "decode_seconds"]
)
def test_a_phase_of_the_hosts_uptime_is_seen(column: str) -> None:
    assert quality(**{column: UPTIME}) == "uptime_sized_time"


def test_vllms_error_spans_are_both_and_carry_the_first_reason() -> None:
    assert quality(queue_seconds=-UPTIME, prefill_seconds=UPTIME) == "uptime_sized_time"


@pytest.mark.parametrize("column", sorted(GOOD))
def test_a_negative_phase_is_seen(column: str) -> None:
    reason = "negative_time" if column != "request_duration_seconds" else "uptime_sized_time"
    assert quality(**{column: -0.5}) == reason


def test_a_phase_may_exceed_the_duration_by_a_second_because_two_clocks_measure() -> None:
    assert quality(decode_seconds=3.0) is None
    assert quality(decode_seconds=3.000000001) == "uptime_sized_time"


def test_the_front_ends_part_may_be_negative_by_a_second_because_two_clocks_measure() -> None:
    assert quality(queue_seconds=1.2) is None
    assert quality(queue_seconds=1.200000001) == "negative_time"


def test_time_gates_come_after_the_phases() -> None:
    assert quality(backwards=True, skew=True) == "end_before_start"
    assert quality(skew=True) == "clock_skew"
    assert quality(skew=True, queue_seconds=-1.0) == "negative_time"


def test_the_reasons_are_those_of_the_schema_in_its_order() -> None:
    assert tuple(QUALITY_REASONS) == REASONS


def test_no_rows_have_no_reasons() -> None:
    nothing = np.zeros(0, dtype=np.bool_)
    assert span_quality(TimeFlags(nothing, nothing), nothing).to_pylist() == []
