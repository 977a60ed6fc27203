"""Every check, in the order in which it is shown, and what they find on one server."""

from __future__ import annotations

from vllm_slo.exporters.vllm.doctor import bounds, options, probe, series, tracing
from vllm_slo.exporters.vllm.doctor.finding import SEVERITIES, Check, Finding
from vllm_slo.exporters.vllm.doctor.subject import Subject

CHECKS: tuple[Check, ...] = (
    Check(
        "log-stats-with-tracing",
        "`--disable-log-stats` together with `--otlp-traces-endpoint`",
        "vLLM asserts statistics when it writes a span; the failure ends the server.",
        ("command",),
        tracing.log_stats,
    ),
    Check(
        "tracing-endpoint",
        "`--otlp-traces-endpoint`",
        "Without it no request span exists, and with it pointing at the wrong host none arrives.",
        ("command",),
        tracing.endpoint,
    ),
    Check(
        "tracing-protocol",
        "`OTEL_EXPORTER_OTLP_TRACES_PROTOCOL` and the address's port and path",
        "vLLM speaks gRPC unless told otherwise, and takes an HTTP address verbatim.",
        ("command", "environment"),
        tracing.protocol,
    ),
    Check(
        "generic-otlp-protocol",
        "`OTEL_EXPORTER_OTLP_PROTOCOL`",
        "The SDK's general variable is not read by vLLM.",
        ("environment",),
        tracing.generic_protocol,
    ),
    Check(
        "tracing-tls",
        "A TLS address with gRPC",
        "vLLM's gRPC exporter is hard-coded to plain text.",
        ("command", "environment"),
        tracing.transport_security,
    ),
    Check(
        "resource-attributes",
        "`OTEL_RESOURCE_ATTRIBUTES`, `OTEL_SERVICE_NAME`",
        "A request span names neither server, shard nor model; only the resource does.",
        ("environment",),
        tracing.resource_attributes,
    ),
    Check(
        "sampling",
        "`OTEL_TRACES_SAMPLER`",
        "Percentiles need every request; a dropped span is a request nobody sees.",
        ("environment",),
        tracing.sampling,
    ),
    Check("sdk-disabled", "`OTEL_SDK_DISABLED`", "It turns all spans off.", ("environment",), tracing.sdk_disabled),
    Check(
        "span-limits",
        "`OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT`, `OTEL_ATTRIBUTE_COUNT_LIMIT`",
        "A row without a latency is marked `missing_milestone` and left out.",
        ("environment",),
        tracing.span_limits,
    ),
    Check(
        "rust-front-end",
        "`VLLM_USE_RUST_FRONTEND`",
        "That front end has no OpenTelemetry.",
        ("environment",),
        tracing.rust_front_end,
    ),
    Check(
        "detailed-traces",
        "`--collect-detailed-traces`",
        "It promises model and worker times that are never written.",
        ("command",),
        tracing.detailed_traces,
    ),
    Check(
        "receiver-reachable",
        "The OTLP receiver (`--otlp-endpoint`): gRPC health, or HTTP `/healthz`",
        "vLLM drops spans silently while nobody listens.",
        ("endpoint",),
        tracing.receiver,
    ),
    Check(
        "metrics-page",
        "vLLM's series on `/metrics`; `--disable-log-stats`, `--headless`, `--grpc`, `--uds`",
        "Queue, KV and token series, coverage and restarts come from there.",
        ("metrics", "command"),
        series.metrics_page,
    ),
    Check(
        "metrics-names",
        "Names of older versions",
        "Rules and dashboards look for names that differ between versions.",
        ("metrics",),
        series.names,
    ),
    Check("metrics-lines", "Lines that cannot be read", "A bad line is lost.", ("metrics",), series.lines),
    Check(
        "vllm-version",
        "The version of vLLM",
        "Span attributes and series move between versions.",
        ("metrics", "command"),
        series.version,
    ),
    Check(
        "api-servers",
        "`--api-server-count`, `--data-parallel-size`; `process_start_time_seconds`",
        "Several API servers share one page, and part of it is then wrong.",
        ("metrics", "command"),
        series.api_servers,
    ),
    Check(
        "elastic-scaling",
        "`--enable-elastic-ep`",
        "Counters that start again look like a restart.",
        ("command",),
        series.elastic,
    ),
    Check(
        "kv-cache-metrics",
        "`--kv-cache-metrics` without prefix caching",
        "The block series are fed by the prefix cache's evictions only.",
        ("metrics", "command"),
        series.kv_cache_metrics,
    ),
    Check(
        "objective-bounds",
        "Histogram bounds against the objectives (`--objective`), `--custom-histogram-buckets`",
        "A histogram counts exactly only at its bounds; between them PromQL guesses.",
        ("metrics", "command"),
        bounds.objectives,
    ),
    Check(
        "token-bounds",
        "Bounds of the token histograms against `--max-model-len` and the context buckets",
        "The longest contexts, which make the tail, end in +Inf together.",
        ("metrics", "command"),
        bounds.token_bounds,
    ),
    Check(
        "context-buckets",
        "`--max-model-len` against the configured context buckets",
        "A bucket beyond it is always empty; one without end mixes sizes.",
        ("command",),
        bounds.context_buckets,
    ),
    Check(
        "histogram-sums",
        "Negative, falling or impossible sums; errored requests",
        "vLLM subtracts milestones that an errored request never reached, so sums gain or lose the host's uptime.",
        ("metrics",),
        series.poisoned_sums,
    ),
    Check(
        "client-aborts",
        "Requests that clients gave up",
        "vLLM drops them from spans, counters and histograms.",
        ("metrics", "command"),
        series.client_aborts,
    ),
    Check(
        "several-completions",
        "Requests with n > 1",
        "Their spans share one request id and all say n = 1.",
        ("metrics",),
        series.several_completions,
    ),
    Check(
        "hidden-metrics",
        "`--show-hidden-metrics-for-version`",
        "It is read, and no series depends on it.",
        ("command",),
        series.hidden_metrics,
    ),
    Check(
        "retired-options",
        "Options that vLLM never had or has no more",
        "vLLM does not start with an option it does not know; some are known from articles only.",
        ("command",),
        options.retired,
    ),
    Check(
        "unknown-options",
        "Options that vLLM 0.32 does not know",
        "vLLM does not start with an option it does not know.",
        ("command",),
        options.strangers,
    ),
    Check(
        "config-file",
        "`--config`",
        "Options in a file are as real as those on the command line.",
        ("command",),
        options.config_file,
    ),
    Check(
        "plugins",
        "`VLLM_PLUGINS`",
        "It is an allow-list: what it does not name is silently left out.",
        ("environment",),
        options.plugins,
    ),
    Check(
        "probe-installed",
        "The probe beside the server",
        "Stock vLLM cannot say what blocked the queue, what preemption cost, or who gave up.",
        ("probe", "lake"),
        probe.installed,
    ),
    Check(
        "probe-version",
        "The version of the probe",
        "What a record holds depends on it.",
        ("probe", "lake"),
        probe.version,
    ),
    Check(
        "probe-off",
        "`VLLM_SLO_PROBE`",
        "Switched off, the probe records nothing.",
        ("environment",),
        probe.switched_off,
    ),
    Check(
        "probe-allowed",
        "`VLLM_PLUGINS` without `vllm_slo`",
        "An allow-list that does not name the probe leaves it out, silently.",
        ("environment",),
        probe.allowed,
    ),
    Check(
        "probe-dropped",
        "Records that the probe dropped",
        "A dropped record is a request or a second that is known from stock data at best.",
        ("probe", "lake"),
        probe.dropped,
    ),
    Check(
        "probe-errors",
        "Errors caught in the probe's hooks",
        "A hook that fails measures less, or nothing.",
        ("probe", "lake"),
        probe.errors,
    ),
    Check(
        "probe-front-end",
        "Front-end records; `VLLM_USE_RUST_FRONTEND`",
        "Only the front end knows times as the client felt them, and refusals.",
        ("lake", "environment"),
        probe.front_end,
    ),
    Check(
        "probe-middleware",
        "HTTP records; `--middleware`",
        "HTTP statuses, disconnections and tenants are seen at the edge alone.",
        ("lake", "command"),
        probe.middleware,
    ),
    Check(
        "probe-gpu",
        "Series of the GPU's allocator",
        "Memory fragmentation and out-of-memory errors are read there.",
        ("probe", "lake"),
        probe.gpu,
    ),
    Check("health", "`/health`", "A dead engine still serves `/metrics`.", ("metrics",), series.health),
    Check(
        "clock",
        "The server's clock (HTTP Date) against ours",
        "Spans carry the server's time.",
        ("metrics",),
        series.clock,
    ),
)


def examine(subject: Subject) -> list[Finding]:
    """What every check finds, the worst first, and in the order of CHECKS among equals."""
    findings = [
        Finding(check.id, answer.severity, answer.found, check.why, answer.cure)
        for check in CHECKS
        for answer in check.examine(subject)
    ]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def checks_table() -> str:
    """The table of ``docs/doctor.md``."""
    lines = ["| check | looks at | why it matters | told by |", "|---|---|---|---|"]
    lines += [f"| `{c.id}` | {c.looks_at} | {c.why} | {', '.join(c.sources)} |" for c in CHECKS]
    return "\n".join(lines)
