"""Every series of an engine's probe: one table, and the collector that fills it from plain data at a scrape.

A series without a value is absent: no GPU, no objectives, nothing sampled yet. Histograms have no value for cells that
no request was in, except those of the middle class of priorities, which begin at 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vllm_slo.exporters.probe import meters as kinds

PREFIX = "vllm_slo_"
ENGINE_LABELS: tuple[str, ...] = ("model", "shard", "engine")
"""Labels of every series: the model's served name; ``vllm.shard``, else the instance, else the service; the
data-parallel engine."""
CELL: tuple[str, ...] = ("bucket", "priority")
"""Context bucket, and class of priorities, in vLLM's numbers."""


@dataclass(frozen=True)
class Series:
    """One series: ``labels`` beside those of the engine. ``column`` is the column of `engine_samples` that it shows.

    Of a counter with a ``column``, that is a sum over the sample's interval; the counter adds them up.
    """

    name: str
    kind: Literal["histogram", "counter", "gauge"]
    help: str
    labels: tuple[str, ...] = ()
    column: str = ""


def _histogram(name: str, text: str, labels: tuple[str, ...] = CELL) -> Series:
    return Series(f"{name}_seconds", "histogram", text, labels)


REASONS: tuple[str, ...] = ("sequence_cap", "token_budget", "kv_blocks")
"""What can block the head of the queue."""

SERIES: tuple[Series, ...] = (
    _histogram(kinds.QUEUE, "Queued to first scheduled, in the engine core; observed when the request is scheduled."),
    _histogram(
        kinds.TIME_TO_FIRST_TOKEN,
        "Arrival at the front end to the first token in the engine core; observed at that token.",
    ),
    _histogram(kinds.INTER_TOKEN_LATENCY, "Gap between two outputs of a request in the engine core; observed at each."),
    _histogram(
        kinds.TIME_PER_OUTPUT_TOKEN,
        "Mean time between output tokens of a request served in full; observed at its end.",
    ),
    _histogram(
        kinds.REQUEST_DURATION,
        "Arrival at the front end to the last token in the engine core, of requests served in full.",
    ),
    _histogram(kinds.PREFILL, "First scheduled to first token, in the engine core."),
    _histogram(kinds.STEP, "Steps of the scheduler.", ()),
    Series("requests_total", "counter", "Requests ended, by finish reason.", (*CELL, "outcome")),
    Series("preemptions_total", "counter", "Requests that lost their KV blocks, by cause.", (*CELL, "reason")),
    Series("lost_tokens_total", "counter", "Computed tokens thrown away by preemptions.", CELL),
    Series("recomputed_tokens_total", "counter", "Of the lost tokens, those computed again."),
    Series("kv_evicted_blocks_total", "counter", "Cached KV blocks thrown out for reuse."),
    Series(
        "queue_blocked_seconds_total",
        "counter",
        "Time for which the head of the queue was blocked, by reason.",
        ("reason",),
    ),
    Series("scheduled_tokens_total", "counter", "Tokens scheduled: of prompts, and of output.", ("kind",)),
    Series("requests_in_flight", "gauge", "Requests that have arrived and not ended, counted at the scrape.", CELL),
    Series(
        "requests_in_flight_past_objective",
        "gauge",
        "Requests in flight that are beyond an objective's threshold already and not yet in its histogram: not yet "
        "scheduled, without a first token, not ended; for inter_token_latency those whose next token is late, for "
        "time_per_output_token those whose mean so far is above.",
        ("objective", *CELL),
    ),
    Series("objective_threshold_seconds", "gauge", "Thresholds in the SLO file.", ("objective", "sli")),
    Series("requests_running", "gauge", "Running requests.", ("bucket",), "requests_running_by_bucket"),
    Series("requests_waiting", "gauge", "Waiting requests.", ("bucket",), "requests_waiting_by_bucket"),
    Series(
        "requests_waiting_for",
        "gauge",
        "The same by what they wait for: the reason that blocks the head of the queue, step when none does, deferred "
        "for those that cannot run yet.",
        ("reason",),
    ),
    Series("oldest_waiting_seconds", "gauge", "Age of the oldest waiting request.", (), "oldest_waiting_seconds"),
    Series("token_budget", "gauge", "Tokens that one step may schedule.", (), "token_budget"),
    Series("token_budget_used_ratio", "gauge", "Tokens scheduled over the budgets of the last sample's steps."),
    Series("sequence_cap", "gauge", "Sequences that may run at once.", (), "sequence_cap"),
    Series("sequence_cap_used_ratio", "gauge", "Running requests over that."),
    Series("kv_blocks", "gauge", "KV blocks of the engine.", (), "kv_blocks_total"),
    Series("kv_blocks_used", "gauge", "KV blocks in use; shared ones once.", (), "kv_blocks_used"),
    Series("kv_blocks_free", "gauge", "KV blocks not in use, cached ones among them.", (), "kv_blocks_free"),
    Series("kv_blocks_cached", "gauge", "Free KV blocks that still hold cached content.", (), "kv_blocks_cached"),
    Series(
        "kv_blocks_held",
        "gauge",
        "KV blocks by the bucket of who holds them; one that buckets share counts for each.",
        ("bucket",),
        "kv_blocks_by_bucket",
    ),
    Series("kv_block_size_tokens", "gauge", "Tokens in one KV block.", (), "kv_block_size_tokens"),
    Series("kv_tokens_stored", "gauge", "Slots of used KV blocks that hold a token.", (), "kv_tokens_stored"),
    Series("kv_slots_wasted", "gauge", "Slots of used KV blocks that hold none.", (), "kv_slots_wasted"),
    Series("kv_fragmentation_ratio", "gauge", "Wasted slots over slots of used blocks.", (), "kv_fragmentation_ratio"),
    Series("kv_cache_usage_ratio", "gauge", "Used KV blocks over all.", (), "kv_cache_usage_ratio"),
    Series("allocator_allocated_bytes", "gauge", "Memory of PyTorch's allocator in use, by worker.", ("worker",)),
    Series("allocator_reserved_bytes", "gauge", "Memory that the allocator took from the device.", ("worker",)),
    Series(
        "allocator_inactive_split_bytes",
        "gauge",
        "Free parts of blocks that are split: too small for what comes next, perhaps.",
        ("worker",),
    ),
    Series("allocator_fragmentation_ratio", "gauge", "1 - allocated / reserved.", ("worker",)),
    Series(
        "allocator_retries_total",
        "counter",
        "Allocations that succeeded only after the allocator had given back what it kept.",
        ("worker",),
    ),
    Series("out_of_memory_errors_total", "counter", "Out-of-memory errors of the allocator.", ("worker",)),
    Series("sample_timestamp_seconds", "gauge", "When the gauges above were read; an engine that is idle goes on."),
    Series(
        "last_step_timestamp_seconds",
        "gauge",
        "When the last step ended. Long ago while requests are in flight: the engine is stuck.",
    ),
    Series(
        "probe_info",
        "gauge",
        "1; whose series these are, and the versions of the probe and of vLLM.",
        ("service_instance_id", "version", "vllm_version"),
    ),
    Series("probe_records_exported_total", "counter", "Records that the receiver took."),
    Series("probe_records_dropped_total", "counter", "Records lost: the queue was full, or the receiver took none."),
    Series("probe_errors_total", "counter", "Errors caught in the probe's hooks.", ("hook",)),
    Series("probe_scrape_errors_total", "counter", "Scrapes that could not be answered."),
)
"""In the order in which they are shown; ``vllm_slo_`` before each name."""
