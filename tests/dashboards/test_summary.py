from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from vllm_slo.analytics.counts import Counts
from vllm_slo.analytics.coverage import Coverage
from vllm_slo.analytics.percentiles import QUANTILES, Cell, PercentileTable
from vllm_slo.dashboards.summary import Tile, tiles

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
STOCK = Counts(counted=100, errors=0, untold=100, left_out={}, basis="rows")
SCRAPED = Coverage("a", 100, 120, NOON, NOON, failed=3)


def errors(counts: Counts, *covered: Coverage) -> Tile:
    return next(tile for tile in tiles(counts, {}, covered) if tile.key == "errors")


def test_errors_that_no_span_tells_are_unknown_and_not_zero() -> None:
    assert errors(STOCK).value == "unknown"
    assert errors(STOCK, replace(SCRAPED, failed=None)).value == "unknown"
    assert errors(STOCK, replace(SCRAPED, finished=None, failed=None)).value == "unknown"


def test_errors_come_from_the_counters_of_vllm_where_spans_do_not_tell() -> None:
    found = errors(STOCK, SCRAPED, replace(SCRAPED, instance="b", finished=80, failed=0))
    assert (found.value, found.note) == ("3", "of 200 finished, by vLLM's counters")


def test_errors_of_rows_that_tell_are_a_share_of_all_and_a_lower_bound_when_some_do_not() -> None:
    every = errors(replace(STOCK, errors=5, untold=0), SCRAPED)
    assert (every.value, every.statistic, every.note) == ("5", "", "5.0 % of 100")
    some = errors(replace(STOCK, errors=5, untold=60), SCRAPED)
    assert (some.value, some.statistic, some.note) == ("5", "or more", "60 requests do not tell")


def test_requests_that_did_not_finish_are_errors_though_they_are_in_no_latency() -> None:
    probed = replace(STOCK, errors=25, untold=0, left_out={"superseded": 7, "unfinished": 25})
    assert (errors(probed).value, errors(probed).note) == ("25", "20.0 % of 125")
    assert next(tile for tile in tiles(probed, {}) if tile.key == "requests").value == "125"
    left_out = next(tile for tile in tiles(probed, {}) if tile.key == "left_out")
    assert (left_out.value, left_out.note) == ("25", "25 not finished"), "a second record is no request left out"
    every = errors(replace(probed, counted=0))
    assert (every.value, every.note) == ("25", "100 % of 25")


def test_nothing_counted_is_no_data() -> None:
    assert errors(replace(STOCK, counted=0, untold=0)).value == "no data"


def test_a_figure_from_rollups_says_how_exact_it_is() -> None:
    cell = Cell(None, None, 5000, tuple(float(i) for i in range(len(QUANTILES))), 9.0)
    exact = PercentileTable("queue", "rows", (), (), (), cell)
    assert "±" not in tiles(STOCK, {"queue": exact})[-1].note
    assert tiles(STOCK, {"queue": replace(exact, basis="rollups")})[-1].note.endswith("±1.1 %")
