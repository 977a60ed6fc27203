"""What metrics, phases, reasons and missing values are called on the pages."""

from __future__ import annotations

METRICS: dict[str, str] = {
    "time_to_first_token": "Time to first token",
    "time_per_output_token": "Time per output token",
    "request_duration": "Request duration",
    "queue": "Queue time",
}

PHASES: dict[str, str] = {
    "frontend": "Frontend",
    "queue": "Queue",
    "prefill": "Prefill",
    "decode": "Decode",
    "residual": "Residual",
}

QUEUE: dict[str, str] = {
    "queue_sequence_cap": "sequence cap",
    "queue_token_budget": "token budget",
    "queue_kv_blocks": "KV blocks",
    "queue_deferred": "deferred",
    "queue_step": "step boundary",
    "queue_unknown": "unknown",
}
"""What blocked the queue; the keys are the stems of columns."""

COMPUTING: dict[str, str] = {
    "prefill_own": "own prompt",
    "prefill_interference": "others' prefill, before the first token",
    "prefill_other": "rest of prefill",
    "decode_work": "own tokens",
    "decode_interference": "others' prefill, between tokens",
    "decode_slowdown": "size of the batch",
    "preempted": "preempted",
    "recompute": "computing again",
    "unknown": "unknown",
}
"""What prefill and decode were made of; the keys are the stems of columns."""

COMPUTING_BARS: dict[str, str] = {
    "prefill_own": "Prefill: own",
    "prefill_interference": "Prefill: others'",
    "prefill_other": "Prefill: rest",
    "decode_work": "Decode: own",
    "decode_interference": "Decode: others'",
    "decode_slowdown": "Decode: batch",
    "preempted": "Preempted",
    "recompute": "Computing again",
    "unknown": "Unknown",
}

ENDINGS: dict[str, str] = {
    "abort": "aborted",
    "error": "engine error",
    "rejected": "refused for load",
    "invalid": "refused as invalid",
    "failed": "failed (HTTP 5xx)",
}
"""How a request ended that did not finish, by its `finish_reason`."""

PARTS: dict[str, str] = {"engine": "engine", "frontend": "front end", "edge": "HTTP edge"}
"""Parts of the probe."""

REASONS: dict[str, str] = {
    "missing_milestone": "missing milestone",
    "uptime_sized_time": "uptime-sized time",
    "negative_time": "negative time",
    "end_before_start": "end before start",
    "clock_skew": "clock skew",
    "shared_request_id": "further completion of n > 1",
    "unequal_parts": "unequal parts",
    "unfinished": "not finished",
    "superseded": "superseded by the probe's record",
    "late_record": "late record",
}


def reason(name: str) -> str:
    """A quality or refusal reason in words."""
    return REASONS.get(name, name.replace("_", " "))


def model(name: str | None) -> str:
    """A model, or what stands for none."""
    return "no model" if name is None else name


def shard(name: str | None) -> str:
    """A shard, or what stands for none."""
    return "no shard" if name is None else name


def bucket(name: str | None) -> str:
    """A context bucket, or what stands for none."""
    return "length unknown" if name is None else name
