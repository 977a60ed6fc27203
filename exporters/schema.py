"""The five tables of the lake: one definition for Arrow, Delta, SQL and the docs.

Times are UTC with microseconds (``timestamp``), durations are seconds held as exact integer nanoseconds
(``decimal(18, 9)``), ratios are 0 to 1, ids are raw bytes in the tables and lower-case hex text in the SQL views.
A column is never renamed or retyped; new ones are appended with a new ``SCHEMA_VERSION`` and are null in older rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 2

TIME = pa.timestamp("us", tz="UTC")
SECONDS = pa.decimal128(18, 9)
SECONDS_SUM = pa.decimal128(38, 9)
INTEGER = pa.int64()
REAL = pa.float64()
FLAG = pa.bool_()
TEXT = pa.string()
BYTES = pa.binary()
DATE = pa.date32()


@dataclass(frozen=True)
class Column:
    """One stored column; ``since`` is the schema version that brought it, ``required`` means never null."""

    name: str
    type: pa.DataType
    description: str
    required: bool = False
    since: int = 1


@dataclass(frozen=True)
class Derived:
    """One column of the SQL view that is computed from stored ones when it is read."""

    name: str
    sql: str
    description: str


@dataclass(frozen=True)
class Table:
    """One Delta table and the SQL view of the same name."""

    name: str
    description: str
    columns: tuple[Column, ...]
    partition_by: tuple[str, ...]
    time_column: str
    derived: tuple[Derived, ...] = ()

    @property
    def schema(self) -> pa.Schema:
        """The Arrow schema, columns in order."""
        return pa.schema([pa.field(c.name, c.type, nullable=not c.required) for c in self.columns])


_IDS = (
    Column("trace_id", BYTES, "W3C trace id, 16 bytes; hex in the view."),
    Column("span_id", BYTES, "Span id, 8 bytes; hex in the view."),
    Column("parent_span_id", BYTES, "Span id of the parent, 8 bytes; null for a root."),
)
_WHERE = (
    Column("service_name", TEXT, "Resource attribute `service.name`."),
    Column("service_instance_id", TEXT, "Resource attribute `service.instance.id`, else null."),
    Column("shard", TEXT, "`vllm.shard`, else the first matching shard rule, else the instance, else the service."),
)
_DAY = Column(
    "day", DATE, "Partition: UTC day of the row's time (of its receipt when that time is implausible).", required=True
)
_RECEIVED = Column("received_time", TIME, "When the receiver accepted the row.", required=True)
_RESOURCE = Column("resource_attributes", TEXT, "Every resource attribute, as a JSON object.")

_PROBE = tuple(
    Column(name, kind, description, since=2)
    for name, kind, description in (
        (
            "records",
            TEXT,
            "What the row is made of, joined by `+` in this order: `engine`, `frontend` (the probe's two records), "
            "`edge` (the HTTP side), `stock`; null for rows of schema version 1 and imported ones.",
        ),
        ("engine_request_id", TEXT, "vLLM's internal request id: the external one and a random suffix."),
        ("queued_time", TIME, "When the engine core queued the request."),
        ("scheduled_time", TIME, "When it was first scheduled."),
        ("first_token_time", TIME, "When the engine core had its first token."),
        ("engine_end_time", TIME, "When the engine core ended it: last token, abort or error."),
        ("queue_sequence_cap_seconds", SECONDS, "Queue time while the number of running sequences was at its limit."),
        ("queue_token_budget_seconds", SECONDS, "Queue time while the step's token budget was spent."),
        ("queue_kv_blocks_seconds", SECONDS, "Queue time while no KV blocks could be had."),
        ("queue_deferred_seconds", SECONDS, "Queue time while the request itself could not run yet."),
        ("queue_step_seconds", SECONDS, "Queue time until the scheduler first looked: the rest of the running step."),
        (
            "queue_deferred_reasons",
            TEXT,
            "`queue_deferred_seconds` by reason (`grammar`, `kv_transfer`, `lora`, `streaming`, ...), "
            "nanoseconds in a JSON object.",
        ),
        ("queue_behind_seconds", SECONDS, "Of the queue time, the part spent behind another request at the head."),
        ("token_budget_blocker", TEXT, "Engine request id of the one that took most of the budget meanwhile."),
        ("token_budget_blocker_seconds", SECONDS, "Queue time during which that one took most of the budget."),
        ("kv_blocks_blocker", TEXT, "Engine request id of the largest holder of KV blocks meanwhile."),
        ("kv_blocks_blocker_seconds", SECONDS, "Queue time during which that one was the largest holder."),
        ("prefill_own_seconds", SECONDS, "Prefill: the request's own share of its steps, by scheduled tokens."),
        ("prefill_interference_seconds", SECONDS, "Prefill: the share of other requests' prefill in its steps."),
        ("prefill_other_seconds", SECONDS, "Prefill: co-scheduled decoding, waiting for a running step, gaps."),
        ("decode_work_seconds", SECONDS, "Decode: its steps at the reference rate of a step that only decodes one."),
        ("decode_interference_seconds", SECONDS, "Decode: what others' prefill added to its steps."),
        ("decode_slowdown_seconds", SECONDS, "Decode: what the size of the batch added to its steps, and gaps."),
        ("decode_reference_seconds", SECONDS, "Length of a step at the reference rate, as known when it ended."),
        ("preempted_seconds", SECONDS, "Time between being preempted and being scheduled again."),
        ("recompute_seconds", SECONDS, "Time spent computing again what preemption had thrown away."),
        ("preempted_before_first_token_seconds", SECONDS, "Of `preempted_seconds`, the part before the first token."),
        ("recompute_before_first_token_seconds", SECONDS, "Of `recompute_seconds`, the part before the first token."),
        ("lost_tokens", INTEGER, "Computed tokens that preemptions threw away; recomputed less what the cache kept."),
        ("cached_tokens_local", INTEGER, "Of `cached_tokens`, from this engine's prefix cache."),
        ("cached_tokens_external", INTEGER, "Of `cached_tokens`, through a KV connector."),
        ("draft_tokens", INTEGER, "Speculative tokens drafted."),
        ("accepted_tokens", INTEGER, "Of those, accepted."),
        ("kv_blocks_peak", INTEGER, "Most KV blocks held at once."),
        ("inter_token_latency_max_seconds", SECONDS, "Longest gap between two outputs in the engine core."),
        ("lora", TEXT, "LoRA adapter."),
        ("http_status", INTEGER, "HTTP status of the response."),
        ("http_route", TEXT, "Path of the HTTP request."),
        ("http_duration_seconds", SECONDS, "Arrival of the HTTP request to its last byte, or to its disconnection."),
        ("time_to_first_byte_seconds", SECONDS, "Arrival of the HTTP request to the first byte of the answer's body."),
        ("client_disconnected", FLAG, "Whether the client went away before the last byte."),
    )
)

REQUESTS = Table(
    "requests",
    "One row a request that ended, however it ended. Records of one request (engine core, front end, stock span) that "
    "come together are merged, see PRECEDENCE.",
    (
        _DAY,
        Column("start_time", TIME, "Arrival at the vLLM front end.", required=True),
        Column("end_time", TIME, "End of the request's span.", required=True),
        Column(
            "request_id", TEXT, "vLLM's external request id (`gen_ai.request.id`); shared by the children of n > 1."
        ),
        *_IDS,
        Column("source", TEXT, "Who reported the row: `stock`, `probe` or `client`.", required=True),
        *_WHERE,
        Column("model", TEXT, "`vllm.model` of the resource, else the scraped model of the instance, else null."),
        Column("engine", TEXT, "Data-parallel engine, where known."),
        Column("priority", INTEGER, "Scheduling priority, lower is earlier, where known."),
        Column("tenant", TEXT, "Tenant, where known."),
        Column("prompt_tokens", INTEGER, "Tokens of the prompt, cached ones included."),
        Column("cached_tokens", INTEGER, "Prompt tokens served from the prefix cache, where known."),
        Column("completion_tokens", INTEGER, "Tokens generated."),
        Column("max_tokens", INTEGER, "Limit the client asked for."),
        Column("temperature", REAL, "Sampling temperature; null is what vLLM writes for 0 and for none."),
        Column("top_p", REAL, "Nucleus sampling bound."),
        Column("n", INTEGER, "Completions asked for; a stock vLLM always writes 1."),
        Column("status", TEXT, "Span status: `unset`, `ok` or `error`. A stock vLLM never sets it."),
        Column("finish_reason", TEXT, "Why generation ended, where known."),
        Column("time_to_first_token_seconds", SECONDS, "Arrival to first token, as the front end saw it."),
        Column("request_duration_seconds", SECONDS, "Arrival to last token, as the front end saw it."),
        Column("queue_seconds", SECONDS, "First queued to first scheduled, in the engine core."),
        Column("prefill_seconds", SECONDS, "First scheduled to first token, in the engine core."),
        Column("decode_seconds", SECONDS, "First to last token, in the engine core."),
        Column("preemptions", INTEGER, "Times preempted, where known."),
        Column("recomputed_tokens", INTEGER, "Tokens computed again after preemption, where known."),
        Column("attributes", TEXT, "Span attributes that have no column, as a JSON object; null when there are none."),
        _RESOURCE,
        _RECEIVED,
        Column("quality", TEXT, "Why the row is left out of statistics (see QUALITY_REASONS); null when it counts."),
        *_PROBE,
    ),
    partition_by=("day",),
    time_column="start_time",
    derived=(
        Derived(
            "queue_unknown_seconds",
            "queue_seconds - coalesce(queue_sequence_cap_seconds + queue_token_budget_seconds "
            "+ queue_kv_blocks_seconds + queue_deferred_seconds + queue_step_seconds, 0)",
            "Part of the queue time of which nobody knows what blocked it: all of it without the probe.",
        ),
        Derived(
            "frontend_seconds",
            "time_to_first_token_seconds - queue_seconds - prefill_seconds",
            "Part of the time to first token that neither the queue nor prefill covers: tokenisation, transport to the "
            "engine core, waiting for the running step.",
        ),
        Derived(
            "residual_seconds",
            "request_duration_seconds - time_to_first_token_seconds - decode_seconds",
            "Part of the duration after the first token that decode does not cover. frontend + queue + prefill + "
            "decode + residual = request_duration_seconds, exactly.",
        ),
        Derived(
            "time_per_output_token_seconds",
            "case when completion_tokens > 1 then decode_seconds::double / (completion_tokens - 1) end",
            "Mean time between output tokens; null below two tokens.",
        ),
    ),
)

SPANS = Table(
    "spans",
    "Every other span: start-up of vLLM, gateways, clients.",
    (
        _DAY,
        Column("start_time", TIME, "Start of the span.", required=True),
        Column("end_time", TIME, "End of the span.", required=True),
        *_IDS,
        Column("name", TEXT, "Span name.", required=True),
        Column("kind", TEXT, "`unspecified`, `internal`, `server`, `client`, `producer` or `consumer`.", required=True),
        Column(
            "duration_seconds", SECONDS, "End minus start, to the nanosecond; null when it does not fit (31.7 years)."
        ),
        Column("status", TEXT, "`unset`, `ok` or `error`."),
        Column("status_message", TEXT, "Message of the status."),
        *_WHERE,
        Column("scope_name", TEXT, "Instrumentation scope."),
        Column("attributes", TEXT, "Span attributes as a JSON object; null when there are none."),
        Column("events", TEXT, "Span events as a JSON list; null when there are none."),
        Column("links", TEXT, "Span links as a JSON list; null when there are none."),
        _RESOURCE,
        _RECEIVED,
        Column("quality", TEXT, "Mark on the row (see QUALITY_REASONS), null for none."),
    ),
    partition_by=("day",),
    time_column="start_time",
)

_PROBE_SAMPLE = tuple(
    Column(name, kind, description, since=2)
    for name, kind, description in (
        ("interval_seconds", REAL, "Time that the sample covers; sums below are over it."),
        ("blocked_by", TEXT, "What blocks the head of the queue: `sequence_cap`, `token_budget`, `kv_blocks`, null."),
        ("oldest_waiting_seconds", REAL, "Age of the oldest waiting request."),
        ("requests_running_by_bucket", TEXT, "Running requests by context bucket, a JSON object."),
        ("requests_waiting_by_bucket", TEXT, "Waiting requests by context bucket, a JSON object."),
        ("steps", REAL, "Scheduler steps in the interval."),
        ("step_seconds", REAL, "Time in steps."),
        ("step_max_seconds", REAL, "Longest step."),
        ("scheduled_prefill_tokens", REAL, "Prefill tokens scheduled."),
        ("scheduled_decode_tokens", REAL, "Decode tokens scheduled."),
        ("token_budget", REAL, "Tokens that one step may schedule."),
        ("sequence_cap", REAL, "Sequences that may run at once."),
        ("blocked_sequence_cap_seconds", REAL, "Time the head of the queue was blocked by the number of sequences."),
        ("blocked_token_budget_seconds", REAL, "Time it was blocked by the step's token budget."),
        ("blocked_kv_blocks_seconds", REAL, "Time it was blocked for want of KV blocks."),
        ("kv_blocks_used", REAL, "KV blocks in use; shared ones once."),
        ("kv_blocks_cached", REAL, "Free KV blocks that still hold cached content."),
        ("kv_blocks_free", REAL, "KV blocks not in use, cached ones among them."),
        ("kv_tokens_stored", REAL, "Slots of used blocks that hold a computed token."),
        ("kv_slots_wasted", REAL, "Slots of used blocks that hold none."),
        ("kv_fragmentation_ratio", REAL, "Wasted slots over slots of used blocks; null when no block is used."),
        ("kv_blocks_by_bucket", TEXT, "KV blocks held by context bucket, a JSON object; shared ones once for each."),
        ("kv_largest_holder", TEXT, "Engine request id of the request with the most KV blocks."),
        ("kv_evicted_blocks_total", REAL, "Cached blocks thrown out for reuse."),
        ("recomputed_tokens_total", REAL, "Tokens computed again after preemptions."),
        ("lost_tokens_total", REAL, "Computed tokens thrown away by preemptions."),
        ("requests_aborted_total", REAL, "Requests ended by an abort, client aborts among them."),
        ("gpu_memory_allocated_bytes", REAL, "Allocator: bytes in use, summed over the engine's workers."),
        ("gpu_memory_reserved_bytes", REAL, "Allocator: bytes taken from the device."),
        ("gpu_memory_inactive_bytes", REAL, "Allocator: bytes of free parts in split blocks."),
        ("gpu_fragmentation_ratio", REAL, "1 - allocated / reserved, of the worst worker."),
        ("gpu_allocation_retries_total", REAL, "Allocations that succeeded only after flushing the allocator's cache."),
        ("out_of_memory_errors_total", REAL, "Out-of-memory errors of the allocator."),
        ("probe_dropped_total", REAL, "Records that the probe dropped because its queue was full or export failed."),
        ("probe_errors_total", REAL, "Errors caught in the probe's hooks."),
    )
)

ENGINE_SAMPLES = Table(
    "engine_samples",
    "State of one engine at one moment, from vLLM's own `/metrics` or from the probe. `_total` columns are cumulative.",
    (
        _DAY,
        Column("time", TIME, "When the sample was taken.", required=True),
        Column("source", TEXT, "`scrape` or `probe`.", required=True),
        Column("service_instance_id", TEXT, "The instance scraped.", required=True),
        Column("shard", TEXT, "Shard of the instance."),
        Column("model", TEXT, "Label `model_name`."),
        Column("engine", TEXT, "Label `engine`: data-parallel rank."),
        Column("vllm_version", TEXT, "Version the server reports at `/version`."),
        Column("process_start_time", TIME, "Start of the API server process; a change is a restart."),
        Column("requests_running", REAL, "Requests in the running batch."),
        Column("requests_waiting", REAL, "Requests waiting, deferred ones included."),
        Column("requests_waiting_capacity", REAL, "Of those, waiting for capacity."),
        Column("requests_waiting_deferred", REAL, "Of those, deferred (LoRA, KV transfer, grammar)."),
        Column("kv_cache_usage_ratio", REAL, "KV blocks in use over KV blocks; vLLM's name for it says perc."),
        Column("kv_blocks_total", REAL, "KV blocks of the engine."),
        Column("kv_block_size_tokens", REAL, "Tokens in one KV block."),
        Column("requests_finished_total", REAL, "Finished requests of every reason, client aborts not among them."),
        Column("requests_finished_error_total", REAL, "Of those, finished as `error` or `abort`."),
        Column(
            "admission_rejections_total",
            REAL,
            "Requests refused at the door (503). Counted per server, not per engine.",
        ),
        Column("preemptions_total", REAL, "Preemptions seen by the front end."),
        Column("prompt_tokens_total", REAL, "Prompt tokens prefilled, cached ones included."),
        Column("prompt_tokens_cached_total", REAL, "Of those, served from a cache."),
        Column("generation_tokens_total", REAL, "Tokens generated, those of later aborted requests included."),
        Column("prefix_cache_queries_total", REAL, "Tokens looked up in the prefix cache."),
        Column("prefix_cache_hits_total", REAL, "Tokens found there."),
        Column("queue_seconds_sum", REAL, "Sum of vLLM's queue-time histogram; can fall (vLLM adds negative values)."),
        Column("queue_seconds_count", REAL, "Count of the same."),
        Column("time_to_first_token_seconds_sum", REAL, "Sum of vLLM's TTFT histogram."),
        Column("time_to_first_token_seconds_count", REAL, "Count of the same."),
        Column("request_duration_seconds_sum", REAL, "Sum of vLLM's end-to-end histogram."),
        Column("request_duration_seconds_count", REAL, "Count of the same."),
        *_PROBE_SAMPLE,
    ),
    partition_by=("day",),
    time_column="time",
)

EVENTS = Table(
    "events",
    "Things that explain a change: configuration, restarts, deploys, alerts, exclusions, notes.",
    (
        Column("event_id", TEXT, "Stable id; the same event written twice has the same id.", required=True),
        Column("time", TIME, "When it happened or began.", required=True),
        Column("end_time", TIME, "When it ended, for spans of time such as exclusions."),
        Column("kind", TEXT, "One of EVENT_KINDS.", required=True),
        Column("title", TEXT, "One line for people.", required=True),
        Column("detail", TEXT, "More, as a JSON object."),
        Column("service_instance_id", TEXT, "Instance concerned; null for all."),
        Column("shard", TEXT, "Shard concerned; null for all."),
        Column("model", TEXT, "Model concerned; null for all."),
        Column("source", TEXT, "Who wrote it: `scrape`, `probe`, `command`, `import`.", required=True),
    ),
    partition_by=(),
    time_column="time",
)

ROLLUPS = Table(
    "rollups",
    "Counts, sums and log2 histograms per minute, hour and day; parts of one key add up.",
    (
        _DAY,
        Column("level", TEXT, "`minute`, `hour` or `day`.", required=True),
        Column("time", TIME, "Start of the minute, hour or day (of `start_time`).", required=True),
        Column("shard", TEXT, "As in `requests`."),
        Column("model", TEXT, "As in `requests`."),
        Column("priority", INTEGER, "As in `requests`."),
        Column("source", TEXT, "As in `requests`."),
        Column("bucket", TEXT, "Context bucket by the configuration at the time of writing."),
        Column("metric", TEXT, "One of ROLLUP_METRICS.", required=True),
        Column("quality", TEXT, "For metric `requests`: why these rows are left out; null for rows that count."),
        Column(
            "bin",
            pa.int16(),
            "ceil(32 * log2(seconds)): value in (2^((bin-1)/32), 2^(bin/32)]; NON_POSITIVE_BIN for values <= 0; "
            "null for plain counts.",
        ),
        Column("count", INTEGER, "Rows.", required=True),
        Column("value_sum", SECONDS_SUM, "Exact sum of the values (seconds, or tokens for the token metrics)."),
    ),
    partition_by=("level", "day"),
    time_column="time",
)

TABLES: tuple[Table, ...] = (REQUESTS, SPANS, ENGINE_SAMPLES, EVENTS, ROLLUPS)

QUALITY_REASONS: dict[str, str] = {
    "superseded": "A stock record of a request that the probe reported as well; the probe's row counts.",
    "late_record": "A record that came when its request had been written without it; the earlier row counts.",
    "missing_milestone": "A latency or a token count that vLLM always writes is absent.",
    "uptime_sized_time": (
        "A phase is longer than the request by more than a second: vLLM subtracted a milestone that was never reached "
        "(errors, engine-side aborts)."
    ),
    "negative_time": "A phase is negative, for the same cause.",
    "unequal_parts": "The parts of a phase, as the probe reports them, do not sum to it.",
    "end_before_start": "The span ends before it starts.",
    "clock_skew": "The span starts more than five minutes after it was received, or before 2015.",
    "shared_request_id": "A further completion of a request with n > 1: the first one stands for the request.",
    "unfinished": (
        "The client gave up, the request failed or it was refused: it has no full latency. Counted apart, see "
        "`finish_reason` and `http_status`."
    ),
    "startup": "A start-up span of vLLM (table `spans`).",
}
"""Reason -> what it means, in the order in which they are tried: a row carries the first that applies."""

FINISH_REASONS: dict[str, str] = {
    "stop": "End of text, a stop string or token.",
    "length": "The limit of tokens.",
    "repetition": "vLLM saw the text repeat itself.",
    "abort": "The client went away, or vLLM aborted it.",
    "error": "The engine failed on it.",
    "rejected": "Refused at the door for load: HTTP 429 or 503.",
    "invalid": "Refused as a wrong request: another HTTP 4xx.",
    "failed": "HTTP 5xx other than 503, without a record of the engine.",
}
"""Column `finish_reason`; the last three are requests that never reached the engine."""

UNFINISHED: tuple[str, ...] = ("abort", "error", "rejected", "invalid", "failed")

PRECEDENCE: dict[str, tuple[str, ...]] = {
    "": ("engine", "frontend", "stock"),
    "time_to_first_token_seconds": ("frontend", "stock", "engine"),
    "request_duration_seconds": ("frontend", "stock", "engine"),
    "end_time": ("frontend", "stock", "engine"),
    "finish_reason": ("frontend", "engine", "stock"),
    "status": ("frontend", "engine", "stock"),
    "completion_tokens": ("frontend", "engine", "stock"),
    "tenant": ("frontend", "engine", "stock"),
    "span_id": ("frontend", "engine", "stock"),
    "parent_span_id": ("frontend", "engine", "stock"),
    "trace_id": ("frontend", "engine", "stock"),
}
"""Column of `requests` -> whose value a merged row takes: the first record, in this order, that has one.
``""`` stands for every column not named; `edge` alone is never merged, `frontend+edge` is a front-end record. A stock
row takes part where it is certain to be of the same completion, see ``analytics/merge.py``. The engine core knows when
things happened, the front end what the client saw: a stop string ends a request in the front end and looks like an
abort to the engine core."""

EVENT_KINDS: tuple[str, ...] = ("configuration", "restart", "deploy", "alert", "exclusion", "note", "checklist")

ROLLUP_METRICS: dict[str, str] = {
    "requests": "Rows (no bins), apart by `quality`.",
    "errors": "Rows with status `error` or a finish reason of UNFINISHED (no bins), those marked `unfinished` too.",
    "prompt_tokens": "Sum of prompt tokens (no bins).",
    "completion_tokens": "Sum of completion tokens (no bins).",
    "time_to_first_token": "Histogram of time_to_first_token_seconds.",
    "time_per_output_token": "Histogram of time_per_output_token_seconds.",
    "request_duration": "Histogram of request_duration_seconds.",
    "queue": "Histogram of queue_seconds.",
    "prefill": "Histogram of prefill_seconds.",
    "decode": "Histogram of decode_seconds.",
    "part_queue_sequence_cap": "Sum of queue_sequence_cap_seconds, as all that follow of the probe's rows (no bins).",
    "part_queue_token_budget": "Sum of queue_token_budget_seconds.",
    "part_queue_kv_blocks": "Sum of queue_kv_blocks_seconds.",
    "part_queue_deferred": "Sum of queue_deferred_seconds.",
    "part_queue_step": "Sum of queue_step_seconds.",
    "part_prefill_own": "Sum of prefill_own_seconds.",
    "part_prefill_interference": "Sum of prefill_interference_seconds.",
    "part_prefill_other": "Sum of prefill_other_seconds.",
    "part_preempted_before_first_token": "Sum of preempted_before_first_token_seconds.",
    "part_recompute_before_first_token": "Sum of recompute_before_first_token_seconds.",
    "part_decode_work": "Sum of decode_work_seconds.",
    "part_decode_interference": "Sum of decode_interference_seconds.",
    "part_decode_slowdown": "Sum of decode_slowdown_seconds.",
    "part_preempted": "Sum of preempted_seconds.",
    "part_recompute": "Sum of recompute_seconds.",
}

BINS_PER_OCTAVE = 32
"""Base 2^(1/32): OpenTelemetry exponential-histogram scale 5.
A quantile read from it is off by at most 2^(1/64) - 1 = 1.09 %."""
NON_POSITIVE_BIN = -32768
