"""Metrics pages -> rows of engine_samples."""

from __future__ import annotations

import gzip
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from vllm_slo.exporters.schema import ENGINE_SAMPLES
from vllm_slo.exporters.vllm.metrics import Target, read

WHEN = datetime(2026, 11, 30, 22, 0, tzinfo=UTC)
TARGET = Target("http://127.0.0.1:8000/metrics", "general-0", "general")
COUNTED = re.compile(r"^vllm:(?P<name>[a-z0-9_]+)\{(?P<labels>[^}]*)\} (?P<value>\S+)$", re.M)


def slow_twin(text: str) -> dict[str, float]:
    """The columns of a page of one model and engine, by regular expressions only."""
    found: dict[str, float] = {}

    def add(column: str, name: str, labels: str = "") -> None:
        values = [
            float(match["value"])
            for match in COUNTED.finditer(text)
            if match["name"] == name and re.search(labels, match["labels"])
        ]
        if values:
            found[column] = sum(values)

    add("requests_running", "num_requests_running")
    add("requests_waiting", "num_requests_waiting")
    add("requests_waiting_capacity", "num_requests_waiting_by_reason", 'reason="capacity"')
    add("requests_waiting_deferred", "num_requests_waiting_by_reason", 'reason="deferred"')
    add("kv_cache_usage_ratio", "kv_cache_usage_perc")
    add("requests_finished_total", "request_success_total")
    add("requests_finished_error_total", "request_success_total", 'finished_reason="(error|abort)"')
    add("admission_rejections_total", "admission_rejections_total")
    add("preemptions_total", "num_preemptions_total")
    for column in (
        "prompt_tokens",
        "prompt_tokens_cached",
        "generation_tokens",
        "prefix_cache_queries",
        "prefix_cache_hits",
    ):
        add(f"{column}_total", f"{column}_total")
    for column, name in (
        ("queue_seconds", "request_queue_time_seconds"),
        ("time_to_first_token_seconds", "time_to_first_token_seconds"),
        ("request_duration_seconds", "e2e_request_latency_seconds"),
    ):
        for part in ("sum", "count"):
            add(f"{column}_{part}", f"{name}_{part}")
    for column, label in (("kv_blocks_total", "num_gpu_blocks"), ("kv_block_size_tokens", "block_size")):
        match = re.search(rf'^vllm:cache_config_info\{{.*[{{,]{label}="(\d+)"', text, re.M)
        if match:
            found[column] = float(match[1])
    return found


def test_every_recorded_page_gives_what_a_slow_twin_reads(captures: Path) -> None:
    files = sorted(captures.glob("*/metrics-*/*.txt.gz"))
    assert files
    ids = {
        "day",
        "time",
        "source",
        "service_instance_id",
        "shard",
        "model",
        "engine",
        "vllm_version",
        "process_start_time",
    }
    for file in files:
        text = gzip.decompress(file.read_bytes()).decode()
        scrape = read(text, WHEN, TARGET, "0.32.0")
        assert scrape.rows.schema.equals(ENGINE_SAMPLES.schema)
        (row,) = scrape.rows.to_pylist()
        expected = slow_twin(text)
        assert set(expected) == {column.name for column in ENGINE_SAMPLES.columns if column.since == 1} - ids
        assert {column: row[column] for column in expected} == pytest.approx(expected)
        assert (row["model"], row["engine"], row["service_instance_id"], row["shard"]) == (
            "tiny-llama",
            "0",
            "general-0",
            "general",
        )
        assert row["process_start_time"] == scrape.process_start
        assert row["time"] == WHEN


def test_a_server_of_2024_gives_one_row_a_model_and_nulls_for_what_it_lacks(public_data: Path) -> None:
    text = (public_data / "3_metrics/kubeai/hack/vllm-mock-metrics/metrics.txt").read_text()
    llama, other = read(text, WHEN, TARGET).rows.to_pylist()
    assert llama["model"] == "neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8"
    assert llama["engine"] is None
    assert llama["kv_cache_usage_ratio"] == 0.0026235242675994863
    assert (llama["requests_running"], llama["requests_waiting"]) == (3, 2)
    assert (llama["kv_blocks_total"], llama["kv_block_size_tokens"]) == (4574, 16)
    assert (llama["requests_finished_total"], llama["requests_finished_error_total"]) == (6, None)
    assert llama["queue_seconds_sum"] is None
    assert llama["process_start_time"] == datetime(2024, 8, 14, 17, 33, 58, 940000, tzinfo=UTC)
    assert (other["model"], other["requests_waiting"], other["requests_running"]) == ("other/OTHER", 3, None)


def test_engines_are_apart_and_a_server_wide_counter_is_on_the_first_only() -> None:
    text = "".join(
        f'vllm:num_requests_running{{engine="{engine}",model_name="m"}} {engine + 1}\n'
        f'vllm:cache_config_info{{engine="{engine}",num_gpu_blocks="{100 + engine}",block_size="16"}} 1.0\n'
        for engine in range(2)
    )
    text += 'vllm:admission_rejections_total{model_name="m",reason="max_num_queued_reqs"} 5.0\n'
    rows = read(text, WHEN, TARGET).rows
    assert rows["engine"].to_pylist() == ["0", "1"]
    assert rows["requests_running"].to_pylist() == [1, 2]
    assert rows["kv_blocks_total"].to_pylist() == [100, 101]
    assert rows["admission_rejections_total"].to_pylist() == [5, None]


def test_a_nan_is_null() -> None:
    text = 'vllm:kv_cache_usage_perc{model_name="m"} NaN\nvllm:num_requests_running{model_name="m"} 0\n'
    (row,) = read(text, WHEN, TARGET).rows.to_pylist()
    assert (row["kv_cache_usage_ratio"], row["requests_running"]) == (None, 0)


def test_replicas_under_ray_are_engines_of_their_own() -> None:
    text = "".join(
        f'ray_vllm_generation_tokens_total{{ReplicaId="{replica}",engine="0",model_name="m"}} {tokens}\n'
        for replica, tokens in (("r1", 10), ("r2", 20))
    )
    rows = read(text, WHEN, TARGET).rows
    assert rows["engine"].to_pylist() == ["r1/0", "r2/0"]
    assert rows["generation_tokens_total"].to_pylist() == [10, 20]


def test_a_page_without_vllm_series_gives_no_row() -> None:
    scrape = read("process_start_time_seconds 1.7e9\nhttp_requests_total 3\n", WHEN, TARGET)
    assert scrape.rows.num_rows == 0
    assert scrape.rows.schema.equals(ENGINE_SAMPLES.schema)


def test_openmetrics_with_exemplars_gives_the_same_rows_as_prometheus_text() -> None:
    registry = CollectorRegistry()
    labels = {"engine": "0", "model_name": "m"}
    Gauge("vllm:num_requests_running", "running", labels, registry=registry).labels(**labels).set(4)
    tokens = Counter("vllm:generation_tokens", "tokens", labels, registry=registry).labels(**labels)
    tokens.inc(17, exemplar={"trace_id": "abc"})
    queue = Histogram("vllm:request_queue_time_seconds", "queue", labels, registry=registry).labels(**labels)
    queue.observe(0.25, exemplar={"trace_id": "abc"})
    prometheus, openmetrics = generate_latest(registry).decode(), generate_openmetrics(registry).decode()
    assert "# {trace_id=" in openmetrics
    expected = read(prometheus, WHEN, TARGET)
    assert expected.rows["generation_tokens_total"].to_pylist() == [17]
    assert read(openmetrics, WHEN, TARGET).rows.equals(expected.rows)
    assert read(openmetrics, WHEN, TARGET).page.bad_lines == 0


def test_the_configuration_holds_cache_bounds_models_and_version(captures: Path) -> None:
    file = sorted(captures.glob("baseline/metrics-general-0/*.txt.gz"))[0]
    found = read(gzip.decompress(file.read_bytes()).decode(), WHEN, TARGET, "0.32.0").configuration
    assert found["vllm_version"] == "0.32.0"
    assert found["models"] == "tiny-llama"
    assert (found["cache.0.num_gpu_blocks"], found["cache.0.block_size"]) == ("2600", "32")
    assert found["bounds.e2e_request_latency_seconds"].startswith("0.3, 0.5, 0.8, 1, 1.5")
