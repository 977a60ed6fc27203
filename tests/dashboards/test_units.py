from __future__ import annotations

import doctest
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.dashboards import units


def test_the_examples_in_the_docstrings_hold() -> None:
    failed, tried = doctest.testmod(units)
    assert (failed, tried >= 5) == (0, True)


@given(st.floats(min_value=1e-6, max_value=1e4))
def test_a_duration_reads_back_within_its_three_digits(seconds: float) -> None:
    number, unit = units.seconds_text(seconds).split(" ")
    read = float(number.replace(",", "")) * {"ms": 1e-3, "s": 1.0}[unit]
    assert abs(read - seconds) <= max(0.0051 * seconds, 0.51e-6)


def test_a_range_names_its_date_once() -> None:
    start = datetime(2026, 6, 1, 12, tzinfo=UTC)
    assert units.range_text(start, start.replace(hour=13)) == "1 Jun 2026 12:00 – 13:00 UTC"
    assert units.range_text(start, start.replace(day=2)) == "1 Jun 2026 12:00 – 2 Jun 2026 12:00 UTC"
