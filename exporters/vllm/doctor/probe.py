"""Checks of the probe: whether it runs beside the server, which parts of it, and whether it loses anything.

Evidence is the page that an engine's probe serves (``--probe``), what the lake has of the server (``--instance``), the
command line and the environment; the first of these that can tell decides.
"""

from __future__ import annotations

from vllm_slo.exporters.vllm.doctor.finding import (
    Answer,
    error,
    needs_command,
    needs_environment,
    needs_probe,
    note,
    ok,
    unknown,
    warning,
)
from vllm_slo.exporters.vllm.doctor.subject import Subject

DISTRIBUTION = "vllm-slo"
PLUGIN = "vllm_slo"
"""Name of the entry points, as VLLM_PLUGINS lists them."""
MIDDLEWARE = "vllm_slo.exporters.probe.edge.Middleware"
INSTALL = (
    f"In the environment that has vLLM: pip install {DISTRIBUTION}; restart the server and look for lines that begin "
    "with 'vllm-slo:' in its log."
)
EDGE_CURE = f"Start the server with --middleware {MIDDLEWARE}."

INFO = "vllm_slo_probe_info"
DROPPED = "vllm_slo_probe_records_dropped_total"
ERRORS = "vllm_slo_probe_errors_total"
GPU_PREFIX = "vllm_slo_allocator_"
OFF = ("0", "false", "no", "off")


def installed(subject: Subject) -> tuple[Answer, ...]:
    """Whether the probe was seen at all."""
    page, seen = subject.probe_page, subject.recorded
    if page is not None and page.value(INFO) is not None:
        whose = f" of {page.instance}" if page.instance else ""
        if seen is not None and page.instance not in (None, seen.instance):
            return warning(
                f"{page.url} has the series of another server{whose.replace(' of', ',')}, not of {seen.instance}.",
                "Give the page of this server with --probe. Each server on a machine has a VLLM_SLO_METRICS_PORT of "
                "its own; one whose port is taken serves none, and its log says so.",
            )
        return ok(f"{page.url} has the probe's series{whose}.")
    if seen is not None and seen.running and seen.silent_since is not None:
        return warning(
            f"The probe of {seen.instance} was last heard at {seen.silent_since:%Y-%m-%d %H:%M:%S} UTC, and the server "
            "goes on without it: since then what its requests waited for is unknown.",
            "The lines that begin with 'vllm-slo:' in the server's log say why it is off: VLLM_SLO_PROBE, a wrong "
            "setting, an environment without it. Where it is on, its receiver does not get what it sends.",
        )
    if seen is not None and seen.running:
        return ok(f"The lake has the probe's records of {seen.instance}: {', '.join(seen.running)}.")
    if seen is not None and seen.version is not None:
        return error(
            f"Spans of {seen.instance} say that the probe {seen.version} is installed, and the lake has none of its "
            "records.",
            "The lines that begin with 'vllm-slo:' in the server's log say what it hooked and where it sends records; "
            "VLLM_SLO_OTLP_ENDPOINT must be the receiver's address.",
        )
    if seen is not None and seen.requests:
        return warning(
            f"All {seen.requests:,} requests of {seen.instance} that the lake has of its newest day are stock spans: "
            "what blocked the queue, what preemption cost, who gave up and who was refused is unknown.",
            INSTALL,
        )
    if page is not None and page.reachable:
        return warning(
            f"{page.url} answers without the probe's series.", "Give the port of VLLM_SLO_METRICS_PORT (9464)."
        )
    if page is not None:
        return warning(
            f"{page.url} does not answer ({page.reason}): the probe is not installed, off, or on another port.", INSTALL
        )
    if seen is not None:
        return unknown(f"The lake has nothing of {seen.instance}.", "Check --instance and --lake; send it a request.")
    return needs_probe()


def version(subject: Subject) -> tuple[Answer, ...]:
    """Whether it is known which probe runs, and whether it is this one."""
    found = _version(subject)
    if found is None:
        if _runs(subject):
            return warning(
                "The probe runs and its version is not known: no resource of its records names it.",
                f"Update it in the server's environment: pip install --upgrade {DISTRIBUTION}.",
            )
        return needs_probe()
    if subject.own_version is not None and found != subject.own_version:
        return note(
            f"The server's probe is {found}; this is {subject.own_version}.",
            f"Install the same version on both sides: pip install {DISTRIBUTION}=={subject.own_version}.",
        )
    return ok(f"Probe {found}.")


def switched_off(subject: Subject) -> tuple[Answer, ...]:
    """Whether the environment turns it off."""
    if subject.env is None:
        return needs_environment()
    given = subject.env.get("VLLM_SLO_PROBE", "1").strip().lower()
    if given in OFF:
        return warning(f"VLLM_SLO_PROBE={given}: the probe is switched off.", "Unset VLLM_SLO_PROBE, or set it to 1.")
    return ok("Nothing switches the probe off.")


def allowed(subject: Subject) -> tuple[Answer, ...]:
    """Whether vLLM may load it."""
    if subject.env is None:
        return needs_environment()
    listed = subject.env.get("VLLM_PLUGINS")
    if listed is None:
        return ok("VLLM_PLUGINS is not set: vLLM loads the probe where it is installed.")
    if PLUGIN in [name.strip() for name in listed.split(",")]:
        return ok(f"VLLM_PLUGINS names {PLUGIN}.")
    return warning(
        f"VLLM_PLUGINS={listed or 'nothing'} does not name {PLUGIN}: vLLM leaves the probe out, without an error.",
        f"Set VLLM_PLUGINS={','.join(filter(None, [listed, PLUGIN]))}, or unset it.",
    )


def dropped(subject: Subject) -> tuple[Answer, ...]:
    """Whether it lost records."""
    count = _counter(subject, DROPPED)
    if count is None:
        return needs_probe()
    if not count:
        return ok("The probe dropped no record.")
    return warning(
        f"The probe dropped {count:,.0f} records: its queue was full or the receiver did not take them. These requests "
        "and samples are missing, or known from their stock spans only.",
        "Check that the receiver runs and is reached from the server (--otlp-endpoint); raise VLLM_SLO_QUEUE_SIZE if "
        "bursts are to be held.",
    )


def errors(subject: Subject) -> tuple[Answer, ...]:
    """Whether its hooks failed."""
    count = _counter(subject, ERRORS)
    if count is None:
        return needs_probe()
    if not count:
        return ok("No hook of the probe failed.")
    hooks = _failing(subject)
    where = f" ({', '.join(hooks)})" if hooks else ""
    return error(
        f"The probe caught {count:,.0f} errors in its hooks{where}. Requests were served all the same; what these "
        "hooks measure is incomplete, and ten errors in a row switch a hook off until the server starts anew.",
        "The server's log names the hook and the error in a line that begins with 'vllm-slo:'; report it with the "
        f"version of vLLM, and try pip install --upgrade {DISTRIBUTION}.",
    )


def middleware(subject: Subject) -> tuple[Answer, ...]:
    """Whether the HTTP side is seen."""
    seen, command = subject.recorded, subject.command
    missing = "without it no HTTP status, no disconnection, no refusal by status and no tenant is known."
    if seen is not None and "edge" in seen.running:
        return ok(f"The lake has HTTP records of {seen.instance}.")
    if seen is not None and seen.running and seen.requests:
        return warning(
            f"None of {seen.requests:,} requests of {seen.instance} has an HTTP record: the middleware is not there; "
            + missing,
            EDGE_CURE,
        )
    if command is None:
        return needs_command() if seen is None else needs_probe()
    if any(given.startswith("vllm_slo.") for given in command.options.get("middleware", ())):
        return ok("--middleware is given.")
    return note(f"--middleware is not given; {missing}", EDGE_CURE)


def front_end(subject: Subject) -> tuple[Answer, ...]:
    """Whether the front end's side is seen."""
    seen = subject.recorded
    if subject.env is not None and subject.env.get("VLLM_USE_RUST_FRONTEND", "0").strip() not in ("", "0"):
        return warning(
            "VLLM_USE_RUST_FRONTEND is on: that front end loads no Python; the probe sees the engine alone; times "
            "as the client felt them, HTTP statuses and disconnections stay unknown.",
            "Set VLLM_USE_RUST_FRONTEND=0.",
        )
    if seen is not None and "frontend" in seen.running:
        return ok(f"The lake has front-end records of {seen.instance}.")
    if seen is not None and "engine" in seen.running and seen.requests:
        return warning(
            f"{seen.instance} has records of its engine and none of its front end: times to first token and durations "
            "are those of the engine.",
            "Look for 'vllm-slo:' in the log of the API server: it says what was hooked there.",
        )
    return needs_probe() if subject.env is None else ok("The Python front end.")


def gpu(subject: Subject) -> tuple[Answer, ...]:
    """Whether there are figures of a GPU."""
    page, seen = subject.probe_page, subject.recorded
    if page is not None and page.value(INFO) is not None:
        has, where = any(name.startswith(GPU_PREFIX) for name in page.samples), page.url
    elif seen is not None and seen.sampled:
        has, where = seen.gpu, f"The samples of {seen.instance}"
    else:
        return needs_probe()
    if has:
        return ok(f"{where}: memory of a GPU's allocator.")
    return note(
        f"{where}: no GPU series. Without a CUDA or ROCm allocator there is nothing to read; they are absent, never 0.",
        "Nothing to do on a CPU build. With a GPU, look for 'vllm-slo:' in the log of its workers; devices themselves "
        "are read by vllm-slo gpu-exporter.",
    )


def _runs(subject: Subject) -> bool:
    page, seen = subject.probe_page, subject.recorded
    return (page is not None and page.value(INFO) is not None) or (seen is not None and bool(seen.running))


def _version(subject: Subject) -> str | None:
    page, seen = subject.probe_page, subject.recorded
    if page is not None:
        for labels, _ in page.samples.get(INFO, ()):
            if labels.get("version"):
                return labels["version"]
    return seen.version if seen is not None else None


def _counter(subject: Subject, name: str) -> float | None:
    """From the page, where counters start with the process; else the highest of the lake's samples."""
    page, seen = subject.probe_page, subject.recorded
    if page is not None and page.value(INFO) is not None:
        return page.value(name) or 0.0
    if seen is None:
        return None
    return seen.dropped if name == DROPPED else seen.errors


def _failing(subject: Subject) -> list[str]:
    page = subject.probe_page
    found = page.samples.get(ERRORS, ()) if page is not None else ()
    return sorted({labels["hook"] for labels, value in found if value and labels.get("hook")})
