"""A result of a real `vllm bench serve` as rows of requests."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest

from vllm_slo.exporters.importers import bench
from vllm_slo.exporters.importers.items import Rows, Unreadable
from vllm_slo.exporters.otlp.decoded import DecodeSettings, ShardRule
from vllm_slo.exporters.schema import REQUESTS

TEXT = (Path(__file__).resolve().parent.parent / "fixtures" / "bench_serve" / "detailed.json").read_bytes()
UTC_ZONE = ZoneInfo("UTC")


def result(**changes: Any) -> dict[str, Any]:
    """The recorded result, changed."""
    value: dict[str, Any] = json.loads(TEXT) | changes
    return {key: item for key, item in value.items() if item is not ...}


def read(settings: DecodeSettings | None = None, zone: ZoneInfo = UTC_ZONE, **changes: Any) -> Rows:
    """The rows of the recorded result, changed."""
    value = result(**changes)
    item = bench.read(value, json.dumps(value).encode(), "line 1", settings or DecodeSettings(), zone)
    assert isinstance(item, Rows)
    return item


def test_the_figures_are_those_that_vllm_printed() -> None:
    value, rows = result(), read().rows
    assert rows.schema == REQUESTS.schema
    first = np.array(rows["time_to_first_token_seconds"].to_pylist(), dtype=float)
    whole = np.array(rows["request_duration_seconds"].to_pylist(), dtype=float)
    assert rows.num_rows == value["completed"] == 24
    assert first.mean() * 1000 == pytest.approx(value["mean_ttft_ms"], abs=1e-5)
    assert np.median(first) * 1000 == pytest.approx(value["median_ttft_ms"], abs=1e-5)
    assert np.percentile(first, 99) * 1000 == pytest.approx(value["p99_ttft_ms"], abs=1e-5)
    tokens = np.array(rows["completion_tokens"].to_pylist(), dtype=float)
    assert ((whole - first) / (tokens - 1)).mean() * 1000 == pytest.approx(value["mean_tpot_ms"], abs=1e-5)
    assert sum(rows["prompt_tokens"].to_pylist()) == value["total_input_tokens"]
    assert sum(rows["completion_tokens"].to_pylist()) == value["total_output_tokens"]


def test_the_last_request_ends_when_the_run_did_in_the_time_zone_of_the_client() -> None:
    ended = datetime(2026, 12, 1, 0, 21, 31, tzinfo=UTC)
    rows = read().rows
    assert max(rows["end_time"].to_pylist()) == ended
    starts = rows["start_time"].to_pylist()
    recorded = result()["start_times"]
    assert (starts[5] - starts[0]).total_seconds() == pytest.approx(recorded[5] - recorded[0], abs=2e-6)
    berlin = read(zone=ZoneInfo("Europe/Berlin")).rows
    assert max(berlin["end_time"].to_pylist()) == ended - timedelta(hours=1)


def test_rows_say_that_they_are_the_clients_and_which_run_they_are_of() -> None:
    row = read().rows.to_pylist()[0]
    assert (row["source"], row["service_name"], row["model"], row["shard"]) == (
        "client",
        "vllm bench serve",
        "tiny-llama",
        "bench",
    )
    assert row["queue_seconds"] is None
    assert row["quality"] is None
    assert row["status"] == "ok"
    ruled = DecodeSettings(shard_rules=(ShardRule("backend", "vl*", "by-rule"),))
    assert set(read(ruled, **{"vllm.shard": ...}).rows["shard"].to_pylist()) == {"by-rule"}


def test_the_same_result_has_the_same_ids_and_another_has_others() -> None:
    def ids(rows: Rows) -> set[tuple[bytes, bytes]]:
        return set(zip(rows.rows["trace_id"].to_pylist(), rows.rows["span_id"].to_pylist(), strict=True))

    assert ids(read()) == ids(read())
    assert len(ids(read())) == 24
    assert not ids(read()) & ids(read(burstiness=2.0))


def test_generated_texts_are_dropped_and_counted() -> None:
    item = read()
    assert item.dropped_attributes == {"generated_texts": 24}
    text = json.dumps(item.rows.to_pylist(), default=str)
    assert not any(generated[:20] in text for generated in result()["generated_texts"])


def test_a_failed_request_has_an_error_and_no_measures() -> None:
    errors = ["", "connection refused", *[""] * 22]
    row = read(errors=errors).rows.to_pylist()[1]
    assert row["status"] == "error"
    assert row["time_to_first_token_seconds"] is None
    assert row["request_duration_seconds"] is None


def test_results_of_an_older_vllm_have_no_latencies() -> None:
    known, summed = read().rows, read(latencies=...).rows
    for one, other in zip(
        known["request_duration_seconds"].to_pylist(), summed["request_duration_seconds"].to_pylist(), strict=True
    ):
        assert abs(one - other) < 0.001


@pytest.mark.parametrize(
    ("changes", "reason", "detail"),
    [
        ({"ttfts": ...}, "not_detailed", "no ttfts; run the benchmark with --save-detailed"),
        ({"ttfts": [0.1]}, "malformed_result", "lists of different lengths"),
        ({"date": "yesterday"}, "malformed_result", "yesterday"),
        ({"input_lens": ["x"] * 24}, "malformed_result", "x"),
    ],
)
def test_a_result_that_cannot_be_read_says_why(changes: dict[str, Any], reason: str, detail: str) -> None:
    value = result(**changes)
    item = bench.read(value, TEXT, "line 1", DecodeSettings(), UTC_ZONE)
    assert isinstance(item, Unreadable)
    assert item.reason == reason
    assert detail in item.detail


def test_a_request_without_a_start_is_refused() -> None:
    starts = result()["start_times"]
    item = read(start_times=[None, *starts[1:]])
    assert item.rows.num_rows == 23
    assert [(refusal.reason, refusal.count) for refusal in item.refused] == [("no_start_time", 1)]
