"""Series under every name they have had."""

from __future__ import annotations

import pytest

from vllm_slo.exporters.schema import ENGINE_SAMPLES
from vllm_slo.exporters.vllm.names import (
    COLUMN_SOURCES,
    GONE,
    SERIES,
    canonical,
    gone,
    is_vllm,
)


@pytest.mark.parametrize(
    ("written", "today"),
    [
        ("vllm:num_requests_running", "num_requests_running"),
        ("vllm_num_requests_running", "num_requests_running"),
        ("ray_vllm:num_requests_running", "num_requests_running"),
        ("ray_vllm_num_requests_running", "num_requests_running"),
        ("vllm:request_success_total", "request_success"),
        ("vllm:request_success", "request_success"),
        ("vllm:gpu_cache_usage_perc", "kv_cache_usage_perc"),
        ("vllm:gpu_prefix_cache_hits_total", "prefix_cache_hits"),
        ("vllm:time_per_output_token_seconds_bucket", "inter_token_latency_seconds"),
        ("vllm:request_time_per_output_token_seconds_sum", "request_time_per_output_token_seconds"),
    ],
)
def test_a_series_has_one_name_whatever_the_version_and_the_prefix(written: str, today: str) -> None:
    found = canonical(written)
    assert found is not None
    assert found[0] == today


@pytest.mark.parametrize(
    "name", ["go_goroutines", "sglang:num_running_reqs", "vllm:iteration_tokens_total_sum", "vllm"]
)
def test_a_series_that_is_not_read_has_no_name_here(name: str) -> None:
    assert canonical(name) is None


def test_our_own_series_are_not_taken_for_vllms() -> None:
    assert not is_vllm("vllm_slo_receiver_spans_accepted_total")
    assert is_vllm("vllm:some_new_series")


def test_a_name_of_the_past_without_an_equal_is_recognised() -> None:
    assert gone("vllm:num_requests_swapped") == "num_requests_swapped"
    assert gone("vllm:num_requests_running") is None


def test_no_name_means_two_things() -> None:
    today = [series.name for series in SERIES]
    old = [name for series in SERIES for name in series.old_names]
    every = [*today, *old, *GONE]
    assert len(every) == len(set(every))


def test_every_column_that_is_read_exists_and_every_source_is_in_the_table() -> None:
    columns = [source.column for source in COLUMN_SOURCES]
    assert set(columns) <= set(ENGINE_SAMPLES.schema.names)
    assert len(columns) == len(set(columns))
    assert {source.series for source in COLUMN_SOURCES} <= {series.name for series in SERIES}
