"""The series of a vLLM server that are read, under every name they have had: one table.

Today's names are those of vLLM 0.32 (``v1/metrics/loggers.py``), without the prefix ``vllm:`` and without ``_total``.
They mislead: ``kv_cache_usage_perc`` is a ratio from 0 to 1, ``request_success`` counts failures too,
``iteration_tokens_total`` is a histogram. Old names are used only where today's is absent: some versions expose both.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Part = Literal["value", "sum", "count", "label"]
"""What of a series is read: its value, a histogram's ``_sum`` or ``_count``, or a label of an info series."""


@dataclass(frozen=True)
class Series:
    """One vLLM series: today's name, the older names that mean the same, and what it says."""

    name: str
    kind: Literal["gauge", "counter", "histogram", "info"]
    meaning: str
    old_names: tuple[str, ...] = ()


@dataclass(frozen=True)
class ColumnSource:
    """How one column of ``engine_samples`` is read from a series.

    ``where`` keeps the samples with one of these label values; ``label`` names the label of an info series.
    """

    column: str
    series: str
    part: Part = "value"
    where: tuple[str, tuple[str, ...]] | None = None
    label: str = ""


SERIES: tuple[Series, ...] = (
    Series("num_requests_running", "gauge", "Requests in the running batch."),
    Series("num_requests_waiting", "gauge", "Requests waiting, deferred ones included."),
    Series("num_requests_waiting_by_reason", "gauge", "The same by reason: `capacity`, `deferred`."),
    Series(
        "kv_cache_usage_perc",
        "gauge",
        "KV blocks in use over KV blocks, 0 to 1. Cached blocks that nobody uses count as free.",
        old_names=("gpu_cache_usage_perc",),
    ),
    Series("request_success", "counter", "Finished requests by `finished_reason`, errors included, client aborts not."),
    Series("admission_rejections", "counter", "Requests refused with 503 because a queue limit was reached."),
    Series("num_preemptions", "counter", "Preemptions, counted when the victim emits its next token."),
    Series("prompt_tokens", "counter", "Prompt tokens, added when a prompt's prefill completes."),
    Series("prompt_tokens_cached", "counter", "Of those, found in a cache."),
    Series("generation_tokens", "counter", "Tokens generated."),
    Series(
        "prefix_cache_queries",
        "counter",
        "Tokens looked up in the prefix cache.",
        old_names=("gpu_prefix_cache_queries",),
    ),
    Series("prefix_cache_hits", "counter", "Tokens found there.", old_names=("gpu_prefix_cache_hits",)),
    Series("time_to_first_token_seconds", "histogram", "Arrival to first token, errored requests included."),
    Series(
        "inter_token_latency_seconds",
        "histogram",
        "Time between outputs of one request.",
        old_names=("time_per_output_token_seconds",),
    ),
    Series("request_time_per_output_token_seconds", "histogram", "Decode time per further token, one value a request."),
    Series("e2e_request_latency_seconds", "histogram", "Arrival to last token."),
    Series(
        "request_queue_time_seconds",
        "histogram",
        "First queued to first scheduled; can be negative for errored requests.",
        old_names=("time_in_queue_requests",),
    ),
    Series("request_inference_time_seconds", "histogram", "First scheduled to last token."),
    Series("request_prefill_time_seconds", "histogram", "First scheduled to first token."),
    Series("request_decode_time_seconds", "histogram", "First to last token."),
    Series("request_prompt_tokens", "histogram", "Prompt tokens a request; bounds are cut at `--max-model-len`."),
    Series("request_params_n", "histogram", "Completions asked for, one value a request."),
    Series("cache_config_info", "info", "The KV cache's configuration, as labels."),
)

COLUMN_SOURCES: tuple[ColumnSource, ...] = (
    ColumnSource("requests_running", "num_requests_running"),
    ColumnSource("requests_waiting", "num_requests_waiting"),
    ColumnSource("requests_waiting_capacity", "num_requests_waiting_by_reason", where=("reason", ("capacity",))),
    ColumnSource("requests_waiting_deferred", "num_requests_waiting_by_reason", where=("reason", ("deferred",))),
    ColumnSource("kv_cache_usage_ratio", "kv_cache_usage_perc"),
    ColumnSource("kv_blocks_total", "cache_config_info", "label", label="num_gpu_blocks"),
    ColumnSource("kv_block_size_tokens", "cache_config_info", "label", label="block_size"),
    ColumnSource("requests_finished_total", "request_success"),
    ColumnSource("requests_finished_error_total", "request_success", where=("finished_reason", ("error", "abort"))),
    ColumnSource("admission_rejections_total", "admission_rejections"),
    ColumnSource("preemptions_total", "num_preemptions"),
    ColumnSource("prompt_tokens_total", "prompt_tokens"),
    ColumnSource("prompt_tokens_cached_total", "prompt_tokens_cached"),
    ColumnSource("generation_tokens_total", "generation_tokens"),
    ColumnSource("prefix_cache_queries_total", "prefix_cache_queries"),
    ColumnSource("prefix_cache_hits_total", "prefix_cache_hits"),
    ColumnSource("queue_seconds_sum", "request_queue_time_seconds", "sum"),
    ColumnSource("queue_seconds_count", "request_queue_time_seconds", "count"),
    ColumnSource("time_to_first_token_seconds_sum", "time_to_first_token_seconds", "sum"),
    ColumnSource("time_to_first_token_seconds_count", "time_to_first_token_seconds", "count"),
    ColumnSource("request_duration_seconds_sum", "e2e_request_latency_seconds", "sum"),
    ColumnSource("request_duration_seconds_count", "e2e_request_latency_seconds", "count"),
)
"""Column of ``engine_samples`` -> where it comes from."""

GONE: dict[str, str] = {
    "cpu_cache_usage_perc": "Went with the swapping of the V0 engine; nothing replaces it.",
    "num_requests_swapped": "Went with the swapping of the V0 engine: preemption is by recomputation only.",
    "gpu_prefix_cache_hit_rate": "Divide the increase of `prefix_cache_hits` by that of `prefix_cache_queries`.",
    "cpu_prefix_cache_hit_rate": "Went with the V0 engine.",
    "avg_prompt_throughput_toks_per_s": "Take the rate of `prompt_tokens`.",
    "avg_generation_throughput_toks_per_s": "Take the rate of `generation_tokens`.",
    "model_forward_time_milliseconds": "Went with the V0 engine.",
    "model_execute_time_milliseconds": "Went with the V0 engine.",
    "tokens_total": "Add `prompt_tokens` and `generation_tokens`.",
    "spec_decode_draft_acceptance_rate": "Divide `spec_decode_num_accepted_tokens` by `spec_decode_num_draft_tokens`.",
    "spec_decode_efficiency": "Went with the V0 engine.",
    "spec_decode_num_emitted_tokens": "Went with the V0 engine.",
    "request_params_best_of": "Went with the request parameter `best_of`.",
}
"""Names of older versions that have no equal today -> what to use. They are recognised, and not read."""

PROCESS_START = "process_start_time_seconds"
"""Start of the API server process; absent when several API servers share one page (multiprocess mode)."""
HTTP_REQUESTS = "http_requests_total"
"""HTTP requests answered, by `handler`, `method` and `status`."""

_PREFIX = re.compile(r"^(?:[A-Za-z0-9]+_)*?vllm[:_](?P<rest>[A-Za-z_].*)$")
_SUFFIXES = ("_bucket", "_sum", "_count", "_created", "_total")
_TODAY = {series.name: series for series in SERIES}
_OLD = {old: series for series in SERIES for old in series.old_names}


def canonical(name: str) -> tuple[str, str, str | None] | None:
    """Today's name of a sample, its suffix, and the older name it was written under (null when it is today's).

    ``vllm:x``, ``vllm_x`` and ``ray_vllm:x`` are one series; so are counters with and without ``_total``.
    None for a series that is not in the table.

    >>> canonical("ray_vllm:gpu_cache_usage_perc")
    ('kv_cache_usage_perc', '', 'gpu_cache_usage_perc')
    >>> canonical("vllm:e2e_request_latency_seconds_sum")
    ('e2e_request_latency_seconds', '_sum', None)
    >>> canonical("go_goroutines") is None
    True
    """
    match = _PREFIX.match(name)
    if match is None:
        return None
    rest = match["rest"]
    for suffix in ("", *_SUFFIXES):
        if not rest.endswith(suffix):
            continue
        base = rest[: len(rest) - len(suffix)]
        if base in _TODAY:
            return base, suffix, None
        if base in _OLD:
            return _OLD[base].name, suffix, base
    return None


def gone(name: str) -> str | None:
    """The name without prefix and suffix when it belongs to an older vLLM and has no equal today, else None."""
    match = _PREFIX.match(name)
    if match is None:
        return None
    rest = match["rest"]
    return next((base for base in (rest, rest.removesuffix("_total")) if base in GONE), None)


def is_vllm(name: str) -> bool:
    """Whether a sample's name is one of vLLM's, known to the table or not; our own ``vllm_slo_*`` are not."""
    match = _PREFIX.match(name)
    return match is not None and not match["rest"].startswith("slo_")


def names_table() -> str:
    """The table of ``docs/vllm-versions.md``: older name, today's name."""
    lines = ["| older name | today (0.32) |", "|---|---|"]
    lines += [f"| `vllm:{old}` | `vllm:{series.name}` |" for series in SERIES for old in series.old_names]
    lines += [f"| `vllm:{name}` | none. {advice} |" for name, advice in GONE.items()]
    return "\n".join(lines)


def series_table() -> str:
    """The table of ``docs/metrics.md``: every series read and the columns of ``engine_samples`` it fills."""
    lines = ["| series | type | says | column of `engine_samples` |", "|---|---|---|---|"]
    for series in SERIES:
        columns = ", ".join(f"`{source.column}`" for source in COLUMN_SOURCES if source.series == series.name)
        exposed = f"vllm:{series.name}" + ("_total" if series.kind == "counter" else "")
        lines.append(f"| `{exposed}` | {series.kind} | {series.meaning} | {columns or 'none; read by `doctor`'} |")
    return "\n".join(lines)
