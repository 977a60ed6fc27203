"""Figures that others published from their own runs, reproduced through import, lake and DuckDB."""

from __future__ import annotations

import csv
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from e2e.product import import_files, query
from e2e.spans import Request, body

RUNS = ("Llama-3.1-8B", "Qwen3-32B", "Qwen3-30B-A3B-Instruct-2507")
PUBLISHED = {
    "TTFT": "time_to_first_token_seconds",
    "TPOT": "time_per_output_token_seconds",
    "Latency": "request_duration_seconds",
}
STATISTICS = {
    "Mean": "avg({})",
    "Median": "quantile_cont({}, 0.5)",
    "P90": "quantile_cont({}, 0.9)",
    "P95": "quantile_cont({}, 0.95)",
    "P99": "quantile_cont({}, 0.99)",
}


@pytest.mark.parametrize("run", RUNS)
def test_published_percentiles_of_vllm_on_real_gpus_are_reproduced_to_a_tenth_of_a_millisecond(
    public_data: Path, tmp_path: Path, run: str
) -> None:
    folder = public_data / "5_bench/LLMServingSim/bench/examples/RTXPRO6000" / run
    recorded = [json.loads(line) for line in (folder / "vllm/requests.jsonl").read_text().splitlines()]
    recording = tmp_path / "run.pb"
    recording.write_bytes(
        body((_request(stamps) for stamps in recorded), {"service.name": "vllm", "vllm.shard": run, "vllm.model": run})
    )
    lake = tmp_path / "lake"
    import_files(lake, [recording])
    expressions = [
        f'1000 * {sql.format(f"{column}::double")} as "{name} {statistic}"'
        for name, column in PUBLISHED.items()
        for statistic, sql in STATISTICS.items()
    ]
    (row,) = query(lake, f"select count(*) as n, {', '.join(expressions)} from requests where quality is null")
    assert row.pop("n") == len(recorded) == 300
    published = _published(folder / "validation/summary.txt")
    assert row.keys() == published.keys()
    # Published with one decimal: half a unit of it on either side.
    assert row == pytest.approx(published, abs=0.0501)


def _request(stamps: dict[str, Any]) -> Request:
    """Times from `queued_ts` on, as the published figures count them; `arrival_time` is another clock."""
    queued, scheduled, first, last = (
        stamps[key] for key in ("queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts")
    )
    start = round(stamps["arrival_time"] * 1e9)
    return Request(
        stamps["request_id"],
        start,
        start + round((last - queued) * 1e9),
        {
            "gen_ai.usage.prompt_tokens": stamps["input_toks"],
            "gen_ai.usage.completion_tokens": stamps["output_toks"],
            "gen_ai.latency.time_to_first_token": first - queued,
            "gen_ai.latency.e2e": last - queued,
            "gen_ai.latency.time_in_queue": scheduled - queued,
            "gen_ai.latency.time_in_model_prefill": first - scheduled,
            "gen_ai.latency.time_in_model_decode": last - first,
        },
    )


def _published(summary: Path) -> dict[str, float]:
    lines = (line.split() for line in summary.read_text().splitlines())
    return {f"{words[0]} {words[1]}": float(words[2]) for words in lines if words and words[0] in PUBLISHED}


BUCKET_SHARES = {
    "AzurePublicDataset/data/AzureLLMInferenceTrace_code.csv": (8819, 85.93, 14.07, 0.0),
    "AzurePublicDataset/data/AzureLLMInferenceTrace_conv.csv": (19366, 97.92, 2.08, 0.0),
    "Mooncake/FAST25-release/traces/conversation_trace.jsonl": (12031, 34.10, 59.02, 6.88),
    "Mooncake/FAST25-release/traces/synthetic_trace.jsonl": (3993, 39.79, 44.05, 16.15),
}
"""Requests, and per cent of them up to 4096, up to 32768 and over 32768 input tokens: counted apart from this code."""


@pytest.mark.parametrize("trace", BUCKET_SHARES)
def test_lengths_of_public_workloads_fall_into_the_buckets_in_the_known_shares(
    public_data: Path, tmp_path: Path, trace: str
) -> None:
    lengths = _lengths(public_data / "1_workloads" / trace)
    noon = int(datetime(2026, 11, 30, 12, tzinfo=UTC).timestamp()) * 10**9
    recording = tmp_path / "workload.pb"
    recording.write_bytes(
        body(
            (
                Request(
                    str(number),
                    noon + number,
                    noon + number,
                    {"gen_ai.usage.prompt_tokens": prompt, "gen_ai.usage.completion_tokens": completion},
                )
                for number, (prompt, completion) in enumerate(lengths)
            ),
            {"service.name": "vllm"},
        )
    )
    lake = tmp_path / "lake"
    import_files(lake, [recording])
    rows = query(lake, "select bucket, quality, count(*) as n from requests group by all")
    assert {row["quality"] for row in rows} == {"missing_milestone"}, "a workload trace has lengths and no latencies"
    counts = {row["bucket"]: row["n"] for row in rows}
    requests, *shares = BUCKET_SHARES[trace]
    assert sum(counts.values()) == len(lengths) == requests
    assert [100 * counts.get(bucket, 0) / requests for bucket in ("short", "medium", "long")] == pytest.approx(
        shares, abs=0.00501
    )


def _lengths(trace: Path) -> list[tuple[int, int]]:
    if trace.suffix == ".csv":
        with trace.open(newline="") as lines:
            return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(lines)]
    rows = map(json.loads, trace.read_text().splitlines())
    return [(row["input_length"], row["output_length"]) for row in rows]
