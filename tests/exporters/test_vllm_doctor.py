"""Every check of the doctor, on what makes it speak and on what keeps it quiet."""

from __future__ import annotations

import gzip
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import httpx
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.probe.series import PREFIX, SERIES
from vllm_slo.exporters.vllm.doctor.checks import CHECKS, examine
from vllm_slo.exporters.vllm.doctor.command_line import parse_command
from vllm_slo.exporters.vllm.doctor.finding import Finding, Severity
from vllm_slo.exporters.vllm.doctor.look import look, look_at_probe, try_receiver
from vllm_slo.exporters.vllm.doctor.probe import DROPPED, ERRORS, GPU_PREFIX, INFO, MIDDLEWARE
from vllm_slo.exporters.vllm.doctor.subject import (
    Objective,
    ProbePage,
    Receiver,
    Recorded,
    Subject,
    parse_objective,
)
from vllm_slo.exporters.vllm.page import parse
from vllm_slo.exporters.vllm.recorded import pages

NOW = datetime(2026, 11, 30, 23, 56, tzinfo=UTC)
FIXTURES = Path(__file__).resolve().parents[1] / "fixtures" / "vllm_metrics"
GRPC = "--otlp-traces-endpoint http://h:4317"
HTTP = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
GOOD_RESOURCE = "service.instance.id=a,vllm.shard=s,vllm.model=m,service.name=vllm"


def page_text(name: str) -> str:
    return gzip.decompress((FIXTURES / f"{name}.txt.gz").read_bytes()).decode()


def started(arguments: str = "", env: dict[str, str] | None = None) -> Subject:
    return Subject(command=parse_command(f"vllm serve m {arguments}"), env=env)


def environment(**env: str) -> Subject:
    return Subject(env=env)


def showing(*texts: str, version: str | None = None) -> Subject:
    return Subject(
        pages=tuple((NOW + timedelta(seconds=at), parse(text)) for at, text in enumerate(texts)), version=version
    )


def answers(subject: Subject, check: str) -> list[Finding]:
    return [finding for finding in examine(subject) if finding.id == check]


def histogram(name: str, total: float, buckets: dict[str, int], start: float | None = None) -> str:
    lines = [f'vllm:{name}_bucket{{engine="0",le="{le}",model_name="m"}} {count}' for le, count in buckets.items()]
    lines += [f'vllm:{name}_sum{{engine="0",model_name="m"}} {total}']
    lines += [f'vllm:{name}_count{{engine="0",model_name="m"}} {max(buckets.values())}']
    return "\n".join([*lines, f"process_start_time_seconds {start or NOW.timestamp() - 3600}", ""])


def probing(**series: float) -> Subject:
    """A probe's page with its version and some counters."""
    samples = {INFO: (({"version": "0.2.0"}, 1.0),)}
    samples |= {name: (({"hook": "schedule"}, value),) for name, value in series.items()}
    return Subject(probe_page=ProbePage("http://h:9464/metrics", samples), own_version="0.2.0")


def recorded(*running: str, requests: int = 12, **given: object) -> Subject:
    return Subject(recorded=Recorded("a", requests, running, **given), own_version="0.2.0")  # type: ignore[arg-type]


ANOTHERS = ProbePage("http://h:9464/metrics", {INFO: (({"version": "0.2.0", "service_instance_id": "b"}, 1.0),)})
WHOLE = Recorded("a", 12, ("engine", "frontend", "edge"), "0.2.0", sampled=True, dropped=0.0, errors=0.0, gpu=True)

FLOODED = (
    'vllm:request_params_n_count{engine="0"} 303\nvllm:admission_rejections_total{reason="max_num_queued_reqs"} 362\n'
    'http_requests_total{handler="/v1/completions",status="5xx"} 234\n'
)
"""Of 362 refusals 234 have a status of their own; the others came in streams that were answered with 200."""

SPEAKS: list[tuple[str, Subject, Severity, str, str]] = [
    (
        "log-stats-with-tracing",
        started(f"--disable-log-stats {GRPC}"),
        "error",
        "assertion",
        "Remove --disable-log-stats",
    ),
    ("tracing-endpoint", started(), "error", "no request span is sent", "--otlp-traces-endpoint"),
    (
        "tracing-endpoint",
        started(env={"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://h:4317"}),
        "error",
        "start-up spans of the workers only",
        "--otlp-traces-endpoint",
    ),
    (
        "tracing-endpoint",
        Subject(command=parse_command("docker run vllm/vllm-openai --otlp-traces-endpoint http://localhost:4317")),
        "warning",
        "is the container itself",
        "host.docker.internal",
    ),
    ("tracing-protocol", started("--otlp-traces-endpoint http://h:4318/v1/traces", {}), "error", "speaks gRPC", "4317"),
    (
        "tracing-protocol",
        started("--otlp-traces-endpoint http://h:4318/v1/traces"),
        "unknown",
        "OTLP/HTTP address",
        "--env",
    ),
    (
        "tracing-protocol",
        started("--otlp-traces-endpoint http://h:4318", HTTP),
        "error",
        "/v1/traces",
        "http://h:4318/v1/traces",
    ),
    (
        "tracing-protocol",
        started("--otlp-traces-endpoint h:4318/v1/traces", HTTP),
        "error",
        "no http scheme",
        "http://HOST",
    ),
    ("tracing-protocol", started("--otlp-traces-endpoint http://h:4317/v1/traces", HTTP), "warning", "4317", "4318"),
    (
        "tracing-protocol",
        started(GRPC, {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}),
        "error",
        "does not start",
        "http/protobuf",
    ),
    (
        "generic-otlp-protocol",
        environment(OTEL_EXPORTER_OTLP_PROTOCOL="http/protobuf"),
        "error",
        "ignored",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf",
    ),
    ("tracing-tls", started("--otlp-traces-endpoint https://h:4317", {}), "error", "TLS", "http/protobuf"),
    ("tracing-tls", started("--otlp-traces-endpoint https://h:4317"), "unknown", "TLS", "http/protobuf"),
    ("resource-attributes", environment(), "warning", "service.instance.id", "OTEL_RESOURCE_ATTRIBUTES="),
    (
        "resource-attributes",
        environment(OTEL_RESOURCE_ATTRIBUTES="service.instance.id=a"),
        "note",
        "vllm.shard",
        "vllm.shard=",
    ),
    (
        "resource-attributes",
        environment(OTEL_RESOURCE_ATTRIBUTES="service.instance.id=a,x"),
        "warning",
        "x has no '='",
        "name=value",
    ),
    ("sampling", environment(OTEL_TRACES_SAMPLER="always_off"), "error", "dropped", "always_on"),
    (
        "sampling",
        environment(OTEL_TRACES_SAMPLER="parentbased_traceidratio", OTEL_TRACES_SAMPLER_ARG="0.1"),
        "warning",
        "share 0.1",
        "Remove OTEL_TRACES_SAMPLER",
    ),
    ("sampling", environment(), "note", "traceparent", "always_on"),
    ("sdk-disabled", environment(OTEL_SDK_DISABLED="True"), "error", "no span", "Remove"),
    ("span-limits", environment(OTEL_ATTRIBUTE_COUNT_LIMIT="5"), "error", "13 attributes", "Remove"),
    ("rust-front-end", environment(VLLM_USE_RUST_FRONTEND="1"), "error", "no spans", "VLLM_USE_RUST_FRONTEND=0"),
    ("detailed-traces", started("--collect-detailed-traces all"), "note", "no effect", "Remove"),
    (
        "receiver-reachable",
        Subject(receiver=Receiver("http://h:4317", False, "gRPC UNAVAILABLE")),
        "error",
        "UNAVAILABLE",
        "vllm-slo up",
    ),
    ("metrics-page", showing("python_info 1\n"), "error", "no vLLM series", "--disable-log-stats"),
    ("metrics-page", started("--disable-log-stats"), "error", "no vLLM series", "Remove"),
    ("metrics-page", started("--headless"), "warning", "no API server", "Scrape"),
    ("metrics-page", started("--uds /tmp/s"), "warning", "file", "TCP"),
    (
        "metrics-names",
        showing('vllm:gpu_cache_usage_perc{model_name="m"} 0'),
        "note",
        "gpu_cache_usage_perc",
        "older names",
    ),
    ("metrics-lines", showing("vllm:num_requests_running{ 1\n"), "warning", "1 lines", "between"),
    ("vllm-version", showing("", version="0.6.3"), "warning", "far older", "Update"),
    ("vllm-version", showing("", version="0.20.1"), "note", "0.32 to 0.33", "vllm-versions"),
    ("vllm-version", showing("", version="dev"), "note", "not a release", "vllm-versions"),
    (
        "vllm-version",
        Subject(command=parse_command("docker run vllm/vllm-openai:v0.9.1 --model m")),
        "warning",
        "0.9.1",
        "Update",
    ),
    (
        "api-servers",
        showing(page_text("multiprocess")),
        "warning",
        "process_start_time_seconds is absent",
        "--api-server-count 1",
    ),
    ("api-servers", started("--api-server-count 4"), "warning", "--api-server-count 4", "--api-server-count 1"),
    ("api-servers", started("-dp 8"), "warning", "8 API servers by default", "--data-parallel-external-lb"),
    ("elastic-scaling", started("--enable-elastic-ep"), "note", "resets all counters", "Restart"),
    ("kv-cache-metrics", showing(page_text("aborted")), "warning", "stay empty", "--enable-prefix-caching"),
    (
        "kv-cache-metrics",
        started("--kv-cache-metrics --no-enable-prefix-caching"),
        "warning",
        "stay empty",
        "--enable-prefix",
    ),
    ("objective-bounds", started(), "note", "defaults of --objective", '"time_to_first_token": ['),
    (
        "objective-bounds",
        started("--custom-histogram-buckets '{\"a\": [2, 1]}'"),
        "error",
        "does not start",
        "ascending",
    ),
    ("objective-bounds", started("--custom-histogram-buckets '[1]'"), "error", "JSON object", "request_latency"),
    ("objective-bounds", started("--custom-histogram-buckets {x"), "error", "not JSON", "request_latency"),
    (
        "token-bounds",
        started("--max-model-len 131072"),
        "note",
        "end at 100000 below --max-model-len 131072",
        "131072]",
    ),
    ("token-bounds", showing(page_text("aborted")), "note", "4096, 32768", "32768]"),
    ("context-buckets", started("--max-model-len 4096"), "note", "no request reaches medium, long", "bounds below"),
    ("context-buckets", started("--max-model-len 1M"), "note", "over 128000 tokens", "Add a bucket"),
    (
        "histogram-sums",
        showing(histogram("request_queue_time_seconds", -600, {"0.3": 3, "+Inf": 3})),
        "error",
        "is -600",
        "quality",
    ),
    (
        "histogram-sums",
        showing(histogram("request_prefill_time_seconds", 9e5, {"7680.0": 2, "+Inf": 3})),
        "error",
        "over the server's age",
        "quality",
    ),
    (
        "histogram-sums",
        showing(
            histogram("request_queue_time_seconds", 90, {"+Inf": 3}),
            histogram("request_queue_time_seconds", 50, {"+Inf": 4}),
        ),
        "error",
        "request_queue_time_seconds_sum fell",
        "rate()",
    ),
    (
        "histogram-sums",
        showing('vllm:request_success_total{model_name="m",finished_reason="error"} 2\n'),
        "warning",
        "2 requests ended in error",
        "quality",
    ),
    (
        "client-aborts",
        showing(page_text("aborted")),
        "warning",
        "1 of 13 requests answered over HTTP",
        "in front of vLLM",
    ),
    (
        "client-aborts",
        showing(FLOODED + 'http_requests_total{handler="/v1/completions",status="2xx"} 444\n'),
        "warning",
        "13 of 444 requests answered over HTTP never finished in the engine: given up by clients, most likely, 128 "
        "were refused in their stream",
        "Install the probe",
    ),
    (
        "client-aborts",
        showing(FLOODED + 'http_requests_total{handler="/v1/completions",status="2xx"} 431\n'),
        "note",
        "431 requests answered over HTTP, 303 finished in the engine, 128 were refused in their stream",
        "Install the probe",
    ),
    ("client-aborts", showing(page_text("multiprocess")), "note", "3 requests answered", "in front of vLLM"),
    ("client-aborts", started(), "note", "With every vLLM", "in front of vLLM"),
    ("several-completions", showing(page_text("aborted")), "note", "1 requests asked for n > 1", "shared_request_id"),
    ("hidden-metrics", started("--show-hidden-metrics-for-version 0.31"), "note", "nothing", "today's names"),
    ("retired-options", started("--max_batch_size 4"), "error", "never existed", "--max-num-seqs"),
    ("retired-options", started("--swap-space 4"), "error", "was removed", "--kv-offloading-size"),
    (
        "retired-options",
        Subject(command=parse_command("docker run vllm/vllm-openai:v0.9.1 --model m --swap-space 4")),
        "warning",
        "was removed",
        "--kv-offloading-size",
    ),
    ("unknown-options", started("--max-num-sqs 4"), "error", "no option of vLLM 0.32", "--max-num-seqs"),
    ("unknown-options", started("--zzz"), "error", "no option", "spelling"),
    ("config-file", started("--config c.yaml"), "warning", "were not read", "--command"),
    ("plugins", environment(VLLM_PLUGINS="a"), "note", "do not load", "Add the names"),
    ("probe-installed", recorded(), "warning", "All 12 requests of a", "pip install vllm-slo"),
    (
        "probe-installed",
        recorded(version="0.2.0"),
        "error",
        "the lake has none of its records",
        "VLLM_SLO_OTLP_ENDPOINT",
    ),
    (
        "probe-installed",
        recorded("engine", "frontend", silent_since=NOW),
        "warning",
        "last heard at",
        "VLLM_SLO_PROBE",
    ),
    (
        "probe-installed",
        Subject(probe_page=ANOTHERS, recorded=WHOLE),
        "warning",
        "the series of another server, b, not of a",
        "VLLM_SLO_METRICS_PORT",
    ),
    ("probe-installed", recorded(requests=0), "unknown", "nothing of a", "--instance"),
    (
        "probe-installed",
        Subject(probe_page=ProbePage("http://h:9464/metrics", reason="refused")),
        "warning",
        "does not answer (refused)",
        "pip install vllm-slo",
    ),
    (
        "probe-installed",
        Subject(probe_page=ProbePage("http://h:8000/metrics")),
        "warning",
        "without the probe's series",
        "VLLM_SLO_METRICS_PORT",
    ),
    ("probe-installed", Subject(), "unknown", "Neither the probe's page nor the lake", "--probe"),
    ("probe-version", recorded("engine"), "warning", "not known", "--upgrade"),
    ("probe-version", replace(probing(), own_version="0.3.0"), "note", "0.2.0; this is 0.3.0", "vllm-slo==0.3.0"),
    ("probe-off", environment(VLLM_SLO_PROBE="0"), "warning", "switched off", "Unset VLLM_SLO_PROBE"),
    (
        "probe-allowed",
        environment(VLLM_PLUGINS="lora"),
        "warning",
        "does not name vllm_slo",
        "VLLM_PLUGINS=lora,vllm_slo",
    ),
    ("probe-allowed", environment(VLLM_PLUGINS=""), "warning", "VLLM_PLUGINS=nothing", "VLLM_PLUGINS=vllm_slo,"),
    ("probe-dropped", probing(**{DROPPED: 41.0}), "warning", "dropped 41 records", "VLLM_SLO_QUEUE_SIZE"),
    ("probe-dropped", recorded("engine", dropped=3.0), "warning", "dropped 3 records", "receiver runs"),
    ("probe-errors", probing(**{ERRORS: 2.0}), "error", "2 errors in its hooks (schedule)", "report it"),
    ("probe-errors", recorded("engine", errors=11.0), "error", "11 errors", "'vllm-slo:'"),
    (
        "probe-front-end",
        environment(VLLM_USE_RUST_FRONTEND="1"),
        "warning",
        "the engine alone",
        "VLLM_USE_RUST_FRONTEND=0",
    ),
    ("probe-front-end", recorded("engine"), "warning", "none of its front end", "API server"),
    ("probe-middleware", recorded("engine", "frontend"), "warning", "None of 12 requests", MIDDLEWARE),
    ("probe-middleware", started(), "note", "--middleware is not given", MIDDLEWARE),
    ("probe-gpu", probing(), "note", "no GPU series", "gpu-exporter"),
    ("probe-gpu", recorded("engine", sampled=True), "note", "absent, never 0", "CPU build"),
    ("health", Subject(healthy=False), "error", "dead", "log"),
    ("clock", Subject(clock_offset_seconds=-40.0), "warning", "40 s behind", "NTP"),
    ("clock", Subject(clock_offset_seconds=4000.0), "error", "clock_skew", "NTP"),
]

QUIET = Subject(
    command=parse_command(
        f"vllm serve m {GRPC} --max-model-len 128000 --custom-histogram-buckets "
        '\'{"time_to_first_token": [0.8], "request_latency": [0.2, 10.0], "inter_token_latency": [0.05], '
        '"request_tokens": [4096, 32768, 128000]}\''
    ),
    env={"OTEL_RESOURCE_ATTRIBUTES": GOOD_RESOURCE, "OTEL_TRACES_SAMPLER": "always_on"},
    version="0.32.0",
    healthy=True,
    clock_offset_seconds=0.4,
    receiver=Receiver("http://h:4317", True, "gRPC health says SERVING"),
    recorded=WHOLE,
    own_version="0.2.0",
)
ALWAYS_SAID = {"client-aborts"}


@pytest.mark.parametrize(
    ("check", "subject", "severity", "found", "cure"), SPEAKS, ids=[f"{i}-{case[0]}" for i, case in enumerate(SPEAKS)]
)
def test_a_check_says_what_it_found_and_the_cure(
    check: str, subject: Subject, severity: Severity, found: str, cure: str
) -> None:
    said = [finding for finding in answers(subject, check) if finding.severity == severity and found in finding.found]
    assert said, answers(subject, check)
    assert cure in said[0].cure


def test_every_check_is_made_to_speak() -> None:
    assert {check.id for check in CHECKS} == {case[0] for case in SPEAKS}


def test_a_server_set_up_well_with_the_probe_hears_nothing_of_what_every_vllm_hides(captures: Path) -> None:
    when, text = next(pages(captures / "light" / "metrics-general-0"))
    subject = replace(QUIET, pages=((when, parse(text)),), objectives=(Objective("ttft", 0.5),))
    loud = {finding.id: finding for finding in examine(subject) if finding.severity not in ("ok",)}
    assert set(loud) == {"token-bounds"}, loud  # the recorded server has vLLM's own token bounds
    assert {finding.id for finding in examine(QUIET) if finding.severity in ("error", "warning")} == set()


@pytest.mark.parametrize(
    "subject",
    [
        replace(probing(**{DROPPED: 0.0, ERRORS: 0.0, "vllm_slo_allocator_allocated_bytes": 1.0})),
        Subject(recorded=WHOLE, own_version="0.2.0"),
    ],
)
def test_a_probe_that_loses_nothing_is_in_order_whichever_tells(subject: Subject) -> None:
    for check in ("probe-installed", "probe-version", "probe-dropped", "probe-errors", "probe-gpu"):
        assert [finding.severity for finding in answers(subject, check)] == ["ok"], check


def test_the_series_that_are_looked_for_are_the_probes() -> None:
    names = {PREFIX + series.name for series in SERIES}
    assert {INFO, DROPPED, ERRORS} <= names
    assert any(name.startswith(GPU_PREFIX) for name in names)


def test_clients_that_give_up_are_recorded_only_while_a_probe_speaks() -> None:
    flooded = showing(FLOODED + 'http_requests_total{handler="/v1/completions",status="2xx"} 444\n')
    for there in (replace(flooded, recorded=WHOLE), replace(flooded, probe_page=probing().probe_page)):
        assert [finding.severity for finding in answers(there, "client-aborts")] == ["ok"]
    silent = replace(flooded, recorded=replace(WHOLE, silent_since=NOW))
    assert [finding.severity for finding in answers(silent, "client-aborts")] == ["warning"]


def test_the_page_of_a_probe_says_whose_it_is() -> None:
    own = Subject(probe_page=ANOTHERS, recorded=replace(WHOLE, instance="b"))
    (said,) = answers(own, "probe-installed")
    assert (said.severity, said.found) == ("ok", "http://h:9464/metrics has the probe's series of b.")


def test_a_probe_that_sent_no_sample_does_not_say_that_it_dropped_nothing() -> None:
    assert [finding.severity for finding in answers(recorded("engine"), "probe-dropped")] == ["unknown"]


def test_the_page_of_a_probe_is_read_where_it_listens() -> None:
    pages = {
        "http://h:9464/metrics": httpx.Response(
            200,
            text=f'# TYPE {INFO} gauge\n{INFO}{{version="0.2.0"}} 1\n{ERRORS}{{hook="a"}} 2\n{ERRORS}{{hook="b"}} 3\n',
        ),
        "http://h:1/metrics": httpx.Response(404),
        "http://h:2/metrics": httpx.Response(200, text="<html>"),
    }
    with httpx.Client(transport=httpx.MockTransport(lambda request: pages[str(request.url)])) as client:
        found = look_at_probe("http://h:9464", client)
        assert (found.reachable, found.value(INFO), found.value(ERRORS), found.value("none")) == (True, 1.0, 5.0, None)
        assert look_at_probe("http://h:1", client).reason == "HTTP 404"
        assert look_at_probe("http://h:2", client).reason == "what it sends is no Prometheus text"
    with httpx.Client() as client, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert not look_at_probe(f"http://127.0.0.1:{closed.getsockname()[1]}", client).reachable


def test_what_no_source_tells_is_unknown_and_never_ok() -> None:
    findings = examine(Subject())
    assert {finding.severity for finding in findings} == {"unknown", "note"}
    assert {finding.id for finding in findings if finding.severity == "note"} == ALWAYS_SAID


@pytest.mark.parametrize(
    ("endpoint", "protocol"), [("$OTLP", "grpc"), ("http://${HOST}:4317", "grpc"), ("http://h:4318/v1/traces", "$P")]
)
def test_a_variable_of_the_shell_is_unknown_and_never_ok(endpoint: str, protocol: str) -> None:
    subject = started(f"--otlp-traces-endpoint {endpoint}", {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol})
    for check in ("tracing-endpoint", "tracing-protocol", "tracing-tls") if "$" in endpoint else ("tracing-protocol",):
        (finding,) = answers(subject, check)
        assert (finding.severity, finding.cure) == ("unknown", "Write its value into --command."), check


def test_a_check_that_needs_the_command_is_unknown_with_the_page_alone() -> None:
    findings = examine(showing(page_text("multiprocess")))
    for check in CHECKS:
        if not {"metrics"} & set(check.sources):
            assert {f.severity for f in findings if f.id == check.id} == {"unknown"}, check.id


def test_the_worst_come_first_and_everything_but_ok_has_a_cure() -> None:
    findings = examine(started(f"--disable-log-stats {GRPC} --swap-space 4", {}))
    order = ["error", "warning", "note", "unknown", "ok"]
    ranks = [order.index(finding.severity) for finding in findings]
    assert ranks == sorted(ranks)
    assert all(finding.cure for finding in findings if finding.severity != "ok")
    assert all(finding.why and finding.found for finding in findings)


def test_the_cure_for_missing_bounds_keeps_the_others_and_adds_the_objective() -> None:
    subject = replace(
        started(), objectives=(Objective("queue", 0.2), Objective("duration", 1.2)), objectives_given=True
    )
    (finding,) = answers(subject, "objective-bounds")
    assert finding.severity == "warning"
    assert "queue 0.2 s: the nearest bounds of vllm:request_queue_time_seconds are 0 and 0.3" in finding.found
    bounds = json.loads(finding.cure.split("'")[1])
    assert bounds["request_latency"][:6] == [0.2, 0.3, 0.5, 0.8, 1, 1.2]
    assert bounds["request_latency"][-1] == 7680
    assert list(bounds) == ["request_latency"]


def test_bounds_on_the_page_count_more_than_the_defaults() -> None:
    subject = replace(showing(page_text("aborted")), objectives=(Objective("ttft", 0.8),))
    assert answers(subject, "objective-bounds")[0].severity == "ok"
    subject = replace(showing(page_text("multiprocess")), objectives=(Objective("ttft", 0.8),))
    assert answers(subject, "objective-bounds")[0].severity == "note"


def test_recorded_servers_have_no_error_and_the_one_of_2024_speaks_old_names(captures: Path, public_data: Path) -> None:
    for folder in sorted(captures.glob("*/metrics-*")):
        subject = Subject(pages=tuple((when, parse(text)) for when, text in pages(folder)))
        assert [f for f in examine(subject) if f.severity in ("error", "warning")] == [], folder
    old = (public_data / "3_metrics/kubeai/hack/vllm-mock-metrics/metrics.txt").read_text()
    (finding,) = answers(showing(old), "metrics-names")
    assert "gpu_cache_usage_perc" in finding.found


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=x", "ttft=0", "ttft=-1", "p99=1", "ttft=nan", "ttft=inf"])
def test_an_objective_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(SloError, match="--objective"):
        parse_objective(text)


def client(handler: object) -> httpx.Client:
    return httpx.Client(transport=httpx.MockTransport(handler))  # type: ignore[arg-type]


def test_a_server_is_asked_for_page_version_health_and_date() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        body = {"/p/metrics": page_text("aborted"), "/p/version": '{"version": "0.32.0"}', "/p/health": ""}
        return httpx.Response(200, text=body[request.url.path], headers={"Date": "Mon, 30 Nov 2026 23:55:30 GMT"})

    looked = look("http://h:8000/p/metrics", client(handler), lambda: NOW)
    assert (looked.version, looked.healthy, looked.clock_offset_seconds) == ("0.32.0", True, -29.5)
    assert looked.pages[0][1].value("request_success") == 13


def test_a_dead_engine_and_an_old_server_without_version_are_told_apart() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return {"/metrics": httpx.Response(200, text=""), "/health": httpx.Response(503)}.get(
            request.url.path, httpx.Response(404, text="not json")
        )

    looked = look("h:8000", client(handler), lambda: NOW)
    assert (looked.version, looked.healthy, looked.clock_offset_seconds) == (None, False, None)


def test_a_server_that_cannot_be_reached_is_a_clear_error() -> None:
    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("connection refused")

    with pytest.raises(SloError, match=r"http://h:8000/metrics: connection refused; check that vLLM is up"):
        look("h:8000", client(refuse), lambda: NOW)
    with pytest.raises(SloError, match=r"http://h/metrics: HTTP 404, no metrics page"):
        look("http://h", client(lambda request: httpx.Response(404)), lambda: NOW)


def test_a_saved_page_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SloError, match=r"none\.txt: no such file or folder; give a saved metrics page"):
        look(str(tmp_path / "none.txt"), httpx.Client(), lambda: NOW)


def test_a_saved_page_is_read_without_asking_anybody(tmp_path: Path) -> None:
    (tmp_path / "1796076931.txt").write_text(page_text("aborted"))
    with httpx.Client() as real:
        assert look(str(tmp_path), real, lambda: NOW).pages[0][1].value("request_success") == 13


@pytest.fixture
def grpc_server() -> Iterator[tuple[grpc.Server, int]]:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    yield server, port
    server.stop(None).wait()


def test_a_grpc_receiver_is_reachable_when_its_health_says_so(grpc_server: tuple[grpc.Server, int]) -> None:
    server, port = grpc_server
    servicer = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.start()
    with httpx.Client() as http:
        assert try_receiver(f"http://127.0.0.1:{port}", http).reachable
        servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        answer = try_receiver(f"127.0.0.1:{port}", http)
    assert (answer.reachable, answer.how) == (False, "gRPC health says NOT_SERVING")


def test_another_grpc_receiver_without_health_is_reachable_too(grpc_server: tuple[grpc.Server, int]) -> None:
    server, port = grpc_server
    server.start()
    with httpx.Client() as http:
        answer = try_receiver(f"grpc://127.0.0.1:{port}", http)
    assert answer.reachable
    assert "UNIMPLEMENTED" in answer.how


def test_nobody_listening_is_unreachable() -> None:
    with socket.socket() as taken, httpx.Client(timeout=2) as http:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert not try_receiver(f"http://127.0.0.1:{port}", http).reachable
        assert not try_receiver(f"http://127.0.0.1:{port}/v1/traces", http).reachable


def test_an_http_receiver_is_asked_for_healthz() -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.url.path == "/healthz" else 500)

    assert try_receiver("http://h:4318", client(handler)) == Receiver("http://h:4318", True, "/healthz answers 200")


@pytest.mark.parametrize("address", ["", "http://", "http://h:99999"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with httpx.Client() as http, pytest.raises(SloError, match="--otlp-endpoint"):
        try_receiver(address, http)
