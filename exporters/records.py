"""What the probe sends and how it is read back: span names and attribute keys. Standard library only: vLLM imports it.

A record is an OTLP span of the scope ``SCOPE``; its name says which. Each attribute is one column of a table of
``schema``: ``vllm_slo.<column>``, with two exceptions that keep integers exact: a column ``x_seconds`` of type
decimal travels as ``vllm_slo.x_nanoseconds`` (int), and a time ``x_time`` as ``vllm_slo.x_time_unix_nano`` (int).
Columns that vLLM's own spans have keep vLLM's keys (``gen_ai.request.id``, ``gen_ai.usage.prompt_tokens``, ...) where
these are no durations. A duration that is 0 may be left out of an ``ENGINE_REQUEST``: absent parts are 0 where
``vllm_slo.queued_time_unix_nano`` (of queue parts), ``vllm_slo.scheduled_time_unix_nano`` (of prefill parts),
``vllm_slo.first_token_time_unix_nano`` (of decode parts) is there, and null where that milestone was not reached.
"""

from __future__ import annotations

SCOPE = "vllm_slo.probe"

ENGINE_REQUEST = "vllm_slo.engine_request"
"""A request as the engine core saw it. Start: arrival at the front end; end: its last token, abort or error."""
FRONTEND_REQUEST = "vllm_slo.frontend_request"
"""A request as the API server saw it, with the HTTP side where the middleware runs."""
EDGE_REQUEST = "vllm_slo.edge_request"
"""An HTTP request that never reached the engine."""
ENGINE_SAMPLE = "vllm_slo.engine_sample"
"""A row of ``engine_samples``; start and end are the interval it covers."""
EVENT = "vllm_slo.event"
"""A row of ``events``: the configuration of an engine when it starts or changes."""

REQUEST_RECORDS: dict[str, str] = {
    ENGINE_REQUEST: "engine",
    FRONTEND_REQUEST: "frontend",
    EDGE_REQUEST: "edge",
}
"""Span name -> word in the column ``records``. A front-end record that knows the HTTP side is ``frontend+edge``."""

PREFIX = "vllm_slo."
NANOSECONDS = "_nanoseconds"
TIME_SUFFIX = "_unix_nano"

PROBE_VERSION = "vllm_slo.probe"
"""Resource attribute that every process of a server with the probe carries, so also vLLM's own spans: the version."""

QUEUE_PARTS: tuple[str, ...] = (
    "queue_sequence_cap",
    "queue_token_budget",
    "queue_kv_blocks",
    "queue_deferred",
    "queue_step",
)
"""Stems of columns; they sum to ``queue`` to the nanosecond."""
PREFILL_PARTS: tuple[str, ...] = (
    "prefill_own",
    "prefill_interference",
    "prefill_other",
    "preempted_before_first_token",
    "recompute_before_first_token",
)
"""They sum to ``prefill``."""
DECODE_PARTS: tuple[str, ...] = ("decode_work", "decode_interference", "decode_slowdown")
"""With ``preempted`` and ``recompute``, less their parts before the first token, they sum to ``decode``."""

DEFERRED_REASONS: tuple[str, ...] = (
    "grammar",
    "kv_transfer",
    "lora",
    "streaming",
    "stale_output",
    "encoder",
    "paused",
    "prefill_interval",
    "prefill_lookahead",
)


def duration_key(stem: str) -> str:
    """The attribute of the column ``<stem>_seconds``."""
    return f"{PREFIX}{stem}{NANOSECONDS}"


def time_key(column: str) -> str:
    """The attribute of a time column."""
    return f"{PREFIX}{column}{TIME_SUFFIX}"


def key(column: str) -> str:
    """The attribute of any other column."""
    return f"{PREFIX}{column}"
