"""The five tables of the lake: one definition for Arrow, Delta, SQL and the docs.

Times are UTC with microseconds (``timestamp``), durations are seconds held as exact integer nanoseconds
(``decimal(18, 9)``), ratios are 0 to 1, ids are raw bytes in the tables and lower-case hex text in the SQL views.
A column is never renamed or retyped; new ones are appended with a new ``SCHEMA_VERSION`` and are null in older rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

SCHEMA_VERSION = 1

TIME = pa.timestamp("us", tz="UTC")
SECONDS = pa.decimal128(18, 9)
SECONDS_SUM = pa.decimal128(38, 9)
INTEGER = pa.int64()
REAL = pa.float64()
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

REQUESTS = Table(
    "requests",
    "One row a finished request (one `llm_request` span of a stock vLLM).",
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
    ),
    partition_by=("day",),
    time_column="start_time",
    derived=(
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

ENGINE_SAMPLES = Table(
    "engine_samples",
    "State of one engine at one moment, from vLLM's own `/metrics`. Counters are cumulative, as scraped.",
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
        Column("source", TEXT, "Who wrote it: `scrape`, `command`, `import`.", required=True),
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
    "missing_milestone": "A latency or a token count that vLLM always writes is absent.",
    "uptime_sized_time": (
        "A phase is longer than the request by more than a second: vLLM subtracted a milestone that was never reached "
        "(errors, engine-side aborts)."
    ),
    "negative_time": "A phase is negative, for the same cause.",
    "end_before_start": "The span ends before it starts.",
    "clock_skew": "The span starts more than five minutes after it was received, or before 2015.",
    "shared_request_id": "A further completion of a request with n > 1: the first one stands for the request.",
    "startup": "A start-up span of vLLM (table `spans`).",
}
"""Reason -> what it means, in the order in which they are tried: a row carries the first that applies."""

EVENT_KINDS: tuple[str, ...] = ("configuration", "restart", "deploy", "alert", "exclusion", "note", "checklist")

ROLLUP_METRICS: dict[str, str] = {
    "requests": "Rows (no bins), apart by `quality`.",
    "errors": "Rows with status `error` or finish reason `error` or `abort` (no bins).",
    "prompt_tokens": "Sum of prompt tokens (no bins).",
    "completion_tokens": "Sum of completion tokens (no bins).",
    "time_to_first_token": "Histogram of time_to_first_token_seconds.",
    "time_per_output_token": "Histogram of time_per_output_token_seconds.",
    "request_duration": "Histogram of request_duration_seconds.",
    "queue": "Histogram of queue_seconds.",
    "prefill": "Histogram of prefill_seconds.",
    "decode": "Histogram of decode_seconds.",
}

BINS_PER_OCTAVE = 32
"""Base 2^(1/32): OpenTelemetry exponential-histogram scale 5.
A quantile read from it is off by at most 2^(1/64) - 1 = 1.09 %."""
NON_POSITIVE_BIN = -32768
