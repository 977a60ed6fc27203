"""Checks of the metrics page: what is on it, under which names, and which figures on it mislead.

Facts: ``v1/metrics/loggers.py``, ``v1/metrics/stats.py`` and ``entrypoints/cli/serve.py`` of vLLM 0.32.
"""

from __future__ import annotations

import math
from datetime import datetime

from vllm_slo.exporters.vllm.doctor.finding import (
    Answer,
    error,
    needs_command,
    needs_metrics,
    note,
    ok,
    unknown,
    warning,
)
from vllm_slo.exporters.vllm.doctor.probe import INFO as PROBE_INFO
from vllm_slo.exporters.vllm.doctor.subject import Subject
from vllm_slo.exporters.vllm.names import HTTP_REQUESTS, PROCESS_START
from vllm_slo.exporters.vllm.page import Page

TESTED_VERSIONS = ((0, 32), (0, 33))
"""The versions whose spans and series this project is tested with."""
PHASES = (
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "e2e_request_latency_seconds",
)
GENERATION_HANDLERS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/inference/v1/generate",
)
_NO_PAGE_FLAGS = {
    "headless": "--headless starts no API server on this node.",
    "grpc": "--grpc starts a front end without /metrics.",
    "uds": "--uds listens on a file, which cannot be scraped over the network.",
}


def metrics_page(subject: Subject) -> tuple[Answer, ...]:
    """Whether there is a page with vLLM's series."""
    command, page = subject.command, subject.page
    if page is not None and page.vllm_samples == 0:
        return error(
            "The page has no vLLM series.", "Remove --disable-log-stats; check that the address is a vLLM API server's."
        )
    if page is not None:
        return ok(f"{page.vllm_samples} samples of vLLM.")
    if command is None:
        return needs_metrics()
    if command.on("disable-log-stats"):
        return error(
            "--disable-log-stats: /metrics has no vLLM series, so there are no engine samples and no coverage.",
            "Remove --disable-log-stats.",
        )
    for option, said in _NO_PAGE_FLAGS.items():
        if command.value(option) not in (None, "false"):
            return warning(said, "Scrape the node that has the API server, over TCP.")
    return ok("The command line leaves /metrics on.")


def names(subject: Subject) -> tuple[Answer, ...]:
    """Whether the page speaks today's names."""
    if subject.page is None:
        return needs_metrics()
    if not subject.page.old_names:
        return ok("Today's names.")
    return note(
        f"Names of an older vLLM: {', '.join(subject.page.old_names)}. Those that have an equal today are read.",
        "Nothing to do here; rules and dashboards written for 0.32 need the older names (docs/vllm-versions.md).",
    )


def lines(subject: Subject) -> tuple[Answer, ...]:
    """Whether every line of the page can be read."""
    if subject.page is None:
        return needs_metrics()
    if subject.page.bad_lines == 0:
        return ok("Every line can be read.")
    return warning(
        f"{subject.page.bad_lines} lines are not Prometheus text, the first: {subject.page.first_bad_line!r}.",
        "Look at what stands between the server and here; the other lines are used.",
    )


def version(subject: Subject) -> tuple[Answer, ...]:
    """Whether this version of vLLM is one that is known."""
    text = subject.vllm_version
    if text is None:
        return unknown("The version of vLLM is not known.", "Give the server's address, where /version answers.")
    parts = text.lstrip("v").split(".")
    if len(parts) < 2 or not parts[0].isdigit() or not parts[1].isdigit():
        return note(f"vLLM {text}: not a release.", "Compare with docs/vllm-versions.md.")
    release = (int(parts[0]), int(parts[1]))
    low, high = TESTED_VERSIONS
    tested = f"{low[0]}.{low[1]} to {high[0]}.{high[1]}"
    if release < (0, 10):
        return warning(
            f"vLLM {text} is far older than what is tested ({tested}): names differ, and its spans may lack latencies.",
            "Update vLLM; docs/vllm-versions.md lists what is read of older ones.",
        )
    if low <= release <= high:
        return ok(f"vLLM {text}.")
    return note(f"vLLM {text}; tested are {tested}.", "Compare span attributes and series with docs/vllm-versions.md.")


def api_servers(subject: Subject) -> tuple[Answer, ...]:
    """Whether several API servers share one page."""
    cure = "Give --api-server-count 1, or one server per data-parallel rank (--data-parallel-external-lb)."
    said = (
        "several API servers share one /metrics: process_* series vanish (restarts are seen by falling counters), "
        "gauges are the most recent of any, and iteration_tokens_total is wrong"
    )
    if subject.page is not None and subject.page.vllm_samples and subject.page.value(PROCESS_START) is None:
        return warning(f"{PROCESS_START} is absent: {said}.", cure)
    command = subject.command
    if command is None:
        return ok("One API server.") if subject.page is not None else needs_metrics()
    count = command.integer("api-server-count")
    parallel = command.integer("data-parallel-size") or 1
    apart = any(
        command.value(option) not in (None, "false")
        for option in ("data-parallel-external-lb", "data-parallel-rank", "data-parallel-multi-port-external-lb")
    )
    local = command.integer("data-parallel-size-local") or parallel
    hybrid = command.value("data-parallel-hybrid-lb") not in (None, "false") or (
        command.value("data-parallel-start-rank") is not None
    )
    if count is None:
        count = 1 if apart else local if hybrid else parallel
    if count > 1:
        given = (
            f"--api-server-count {count}" if command.value("api-server-count") else f"{count} API servers by default"
        )
        return warning(f"{given}: {said}.", cure)
    return ok("One API server.")


def elastic(subject: Subject) -> tuple[Answer, ...]:
    """Scaling that resets counters and loses plug-ins."""
    if subject.command is None:
        return needs_command()
    if not subject.command.on("enable-elastic-ep"):
        return ok("--enable-elastic-ep is not given.")
    return note(
        "--enable-elastic-ep: scaling up resets all counters and drops stat-logger plug-ins, without a restart.",
        "Restart the server after scaling; coverage treats a fallen counter as a reset.",
    )


def kv_cache_metrics(subject: Subject) -> tuple[Answer, ...]:
    """A flag that needs prefix caching."""
    page, command = subject.page, subject.command
    cure = "Add --enable-prefix-caching (the default), or remove --kv-cache-metrics."
    if page is not None:
        on = any("kv_block_" in family for family in page.families)
        caching = {sample.labels.get("enable_prefix_caching") for sample in page.of("cache_config_info")}
        if on and "False" in caching:
            return warning("vllm:kv_block_* stay empty: prefix caching is off.", cure)
        return ok("KV block series have what they need, or are not asked for.")
    if command is None:
        return needs_command()
    if command.on("kv-cache-metrics") and command.on("enable-prefix-caching") is False:
        return warning("--kv-cache-metrics without prefix caching: vllm:kv_block_* stay empty.", cure)
    return ok("KV block series have what they need, or are not asked for.")


def poisoned_sums(subject: Subject) -> tuple[Answer, ...]:
    """Sums that errored requests spoiled: vLLM subtracts milestones that were never reached."""
    if subject.page is None:
        return needs_metrics()
    when, page = subject.pages[-1]
    found = [f"vllm:{name}_sum is {total:g}" for name in PHASES if (total := page.value(name, ("_sum",)) or 0.0) < 0]
    found += [
        f"vllm:{name} has values over the server's age" for name in PHASES if _older_than_server(page, name, when)
    ]
    for (_, before), (_, after) in zip(subject.pages, subject.pages[1:], strict=False):
        found += [f"vllm:{name}_sum fell" for name in PHASES if _fell(before, after, name)]
    failed = sum(
        sample.value
        for sample in page.of("request_success")
        if sample.labels.get("finished_reason") in ("error", "abort") and not math.isnan(sample.value)
    )
    cure = (
        "Do not use rate() of these sums, nor averages from them. Use the requests table: such rows are marked in "
        "`quality` and left out."
    )
    if found:
        return error(f"{'; '.join(dict.fromkeys(found))}: errored requests put impossible times in.", cure)
    if failed:
        return warning(f"{failed:g} requests ended in error or abort; their times are in the histograms.", cure)
    return ok("No impossible sum, no errored request.")


def client_aborts(subject: Subject) -> tuple[Answer, ...]:
    """Requests that clients gave up."""
    seen = subject.recorded
    if seen is not None and {"engine", "frontend"} & set(seen.running) and seen.silent_since is None:
        return ok(f"The probe records requests of {seen.instance} that clients give up.")
    if subject.probe_page is not None and subject.probe_page.value(PROBE_INFO) is not None:
        return ok("The probe records requests that clients give up.")
    cure = "Install the probe beside vLLM, or count them in front of vLLM (gateway, client) and send those spans."
    said = "requests that clients give up leave no span and no count: the slowest are missing from every percentile"
    page = subject.page
    answered = finished = None
    refused = 0.0
    if page is not None:
        finished = page.value("request_params_n", ("_count",))  # one a request; request_success has one a completion
        answered = _generations(page, "2")
        # vLLM answers a stream with 200 before it asks whether the queue is full: the refusal is in the stream.
        refused = max(0.0, (page.value("admission_rejections") or 0.0) - _generations(page, "5"))
    if not answered or finished is None:
        return note(f"With every vLLM, {said}.", cure)
    full = f", {refused:g} were refused in their stream because a queue was full" if refused else ""
    if (missing := answered - finished - refused) > 0:
        return warning(
            f"{missing:g} of {answered:g} requests answered over HTTP never finished in the engine: given up by "
            f"clients, most likely{full}. {said.capitalize()}.",
            cure,
        )
    return note(
        f"{answered:g} requests answered over HTTP, {finished:g} finished in the engine{full}. {said.capitalize()}.",
        cure,
    )


def _generations(page: Page, status: str) -> float:
    """Requests for text that were answered with a status of this class."""
    return sum(
        sample.value
        for sample in page.of(HTTP_REQUESTS)
        if sample.labels.get("handler") in GENERATION_HANDLERS and sample.labels.get("status", "").startswith(status)
    )


def several_completions(subject: Subject) -> tuple[Answer, ...]:
    """Requests with n > 1."""
    if subject.page is None:
        return needs_metrics()
    every = subject.page.value("request_params_n", ("_count",))
    if every is None:
        return unknown(
            "vllm:request_params_n is not on the page.", "Give the address of a server that has run requests."
        )
    one = sum(s.value for s in subject.page.of("request_params_n", ("_bucket",)) if s.labels.get("le") in ("1", "1.0"))
    if every - one <= 0:
        return ok("No request asked for several completions.")
    return note(
        f"{every - one:g} requests asked for n > 1: each completion has a span with the same request id and n = 1.",
        "Nothing to do: the first counts, the others are marked `shared_request_id`.",
    )


def hidden_metrics(subject: Subject) -> tuple[Answer, ...]:
    """A flag without effect."""
    if subject.command is None:
        return needs_command()
    if subject.command.value("show-hidden-metrics-for-version") is None:
        return ok("--show-hidden-metrics-for-version is not given.")
    return note("--show-hidden-metrics-for-version brings back nothing in 0.32.", "Remove it; use today's names.")


def health(subject: Subject) -> tuple[Answer, ...]:
    """What /health says."""
    if subject.healthy is None:
        return unknown("/health was not asked or not there.", "Give the server's address.")
    if subject.healthy:
        return ok("/health answers.")
    return error("/health says the engine is dead.", "Read the server's log and restart it.")


def clock(subject: Subject) -> tuple[Answer, ...]:
    """The server's clock against ours."""
    offset = subject.clock_offset_seconds
    if offset is None:
        return unknown("No Date header was seen.", "Give the server's address.")
    if abs(offset) <= 2:
        return ok(f"The clocks agree within {abs(offset):.0f} s.")
    said = f"The server's clock is {abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} ours"
    cure = "Synchronise both with NTP (chrony, systemd-timesyncd)."
    if abs(offset) > 300:
        return error(f"{said}: spans that start more than 5 minutes after receipt are marked clock_skew.", cure)
    return warning(f"{said}: time ranges and joins with other sources are off by it.", cure)


def _older_than_server(page: Page, name: str, when: datetime) -> bool:
    start = page.value(PROCESS_START)
    if start is None:
        return False
    age = when.timestamp() - start
    inner = [bound for bound in page.bounds(name) if bound >= age > 0]
    if not inner:
        return False
    total = page.value(name, ("_count",)) or 0.0
    within = sum(
        sample.value
        for sample in page.of(name, ("_bucket",))
        if math.isclose(float(sample.labels.get("le", "nan")), inner[0])
    )
    return total - within > 0


def _fell(before: Page, after: Page, name: str) -> bool:
    earlier, later = before.value(name, ("_sum",)), after.value(name, ("_sum",))
    starts = before.value(PROCESS_START), after.value(PROCESS_START)
    same_process = starts[0] is not None and starts[0] == starts[1]
    return same_process and earlier is not None and later is not None and later < earlier
