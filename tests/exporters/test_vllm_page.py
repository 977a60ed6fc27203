"""The text of a metrics page."""

from __future__ import annotations

import gzip
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.exporters.vllm.page import parse

PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="a \\"quoted\\" {model}, really"} 3.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 7.0 1796076931000
vllm:e2e_request_latency_seconds_bucket{engine="0",le="0.5",model_name="m"} 1
vllm:e2e_request_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 2
"""


def test_labels_may_hold_quotes_braces_and_commas() -> None:
    (sample,) = parse(PAGE).of("num_requests_running")
    assert sample.labels["model_name"] == 'a "quoted" {model}, really'
    assert sample.value == 3


def test_a_timestamp_is_passed_over() -> None:
    assert parse(PAGE).value("generation_tokens") == 7


def test_the_bounds_are_the_finite_ones() -> None:
    assert parse(PAGE).bounds("e2e_request_latency_seconds") == (0.5,)


def test_a_bad_line_costs_only_itself_and_is_counted() -> None:
    page = parse(PAGE.replace('vllm:num_requests_running{engine="0",', "vllm:num_requests_running{engine=0;"))
    assert page.bad_lines == 1
    assert page.first_bad_line is not None
    assert page.first_bad_line.startswith("vllm:num_requests_running{engine=0;")
    assert page.value("num_requests_running") is None
    assert page.value("generation_tokens") == 7


def test_a_missing_series_has_no_value_and_neither_has_a_nan() -> None:
    page = parse('vllm:kv_cache_usage_perc{model_name="m"} NaN\n')
    assert page.value("kv_cache_usage_perc") is None
    assert page.value("prompt_tokens") is None
    assert math.isnan(next(page.of("kv_cache_usage_perc")).value)


def test_an_old_name_is_used_only_where_todays_is_absent() -> None:
    old = 'vllm:gpu_cache_usage_perc{model_name="m"} 0.25\n'
    both = parse(old + 'vllm:kv_cache_usage_perc{model_name="m"} 0.25\n')
    assert [sample.value for sample in both.of("kv_cache_usage_perc")] == [0.25]
    assert [sample.value for sample in parse(old).of("kv_cache_usage_perc")] == [0.25]
    assert both.old_names == parse(old).old_names == ("gpu_cache_usage_perc",)


def test_an_old_server_is_read_and_its_names_are_told(public_data: Path) -> None:
    page = parse((public_data / "3_metrics/kubeai/hack/vllm-mock-metrics/metrics.txt").read_text())
    assert page.bad_lines == 0
    assert page.value("request_success") == 6
    assert set(page.old_names) >= {"gpu_cache_usage_perc", "num_requests_swapped", "time_per_output_token_seconds"}


@given(st.text(max_size=200))
def test_no_text_is_too_strange(text: str) -> None:
    page = parse(text)
    assert page.bad_lines <= len(text.splitlines())


@given(garbage=st.text(st.characters(exclude_categories=("Cs",)), max_size=80), at=st.integers(0, 7))
def test_garbage_between_the_lines_changes_nothing_else(garbage: str, at: int) -> None:
    lines = PAGE.splitlines()
    mixed = parse("\n".join([*lines[:at], "} " + garbage, *lines[at:]]))
    assert mixed.value("generation_tokens") == 7
    assert mixed.value("num_requests_running") == 3


def test_every_recorded_page_is_read_without_a_bad_line(captures: Path) -> None:
    files = sorted(captures.glob("*/metrics-*/*.txt.gz"))
    assert files
    for file in files:
        page = parse(gzip.decompress(file.read_bytes()).decode())
        assert (page.bad_lines, page.old_names) == (0, ()), file
        assert page.vllm_samples > 300
