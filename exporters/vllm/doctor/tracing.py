"""Checks of the spans: whether the server sends them, where to, and with what on them.

Facts: ``vllm/tracing/otel.py`` and ``v1/engine/output_processor.py`` of vLLM 0.32;
environment variables of the OpenTelemetry SDK.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit

from vllm_slo.exporters.vllm.doctor.finding import (
    Answer,
    error,
    needs_command,
    needs_environment,
    note,
    ok,
    unknown,
    warning,
)
from vllm_slo.exporters.vllm.doctor.subject import Subject

ENDPOINT = "otlp-traces-endpoint"
PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
GENERIC_PROTOCOL_VARIABLE = "OTEL_EXPORTER_OTLP_PROTOCOL"
ENDPOINT_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
GRPC_CURE = f"Give --{ENDPOINT} http://HOST:4317."
HTTP_CURE = f"Set {PROTOCOL_VARIABLE}=http/protobuf and give --{ENDPOINT} http://HOST:4318/v1/traces."
REQUEST_SPAN_ATTRIBUTES = 13
"""Attributes of an ``llm_request`` span: 9 always, up to 4 of the request's parameters."""


def log_stats(subject: Subject) -> tuple[Answer, ...]:
    """Tracing needs the statistics that --disable-log-stats switches off."""
    command = subject.command
    if command is None:
        return needs_command()
    if not command.on("disable-log-stats"):
        return ok("--disable-log-stats is not given.")
    if command.value(ENDPOINT) is None:
        return ok("--disable-log-stats is given, without tracing.")
    return error(
        f"--disable-log-stats and --{ENDPOINT} are both given: the first finished request fails an assertion, and the "
        "server shuts down with every running request.",
        "Remove --disable-log-stats.",
    )


def endpoint(subject: Subject) -> tuple[Answer, ...]:
    """Whether spans are sent at all."""
    command = subject.command
    if command is None:
        return needs_command()
    address = command.value(ENDPOINT)
    if address is None:
        said = f"--{ENDPOINT} is not given: no request span is sent."
        if subject.env and subject.env.get(ENDPOINT_VARIABLE):
            said += f" {ENDPOINT_VARIABLE} alone brings start-up spans of the workers only."
        return error(said, GRPC_CURE)
    if "$" in address:
        return _not_expanded(f"--{ENDPOINT} {address}")
    host = _split(address).hostname
    if command.container and not command.host_network and host in ("localhost", "127.0.0.1", "::1"):
        return warning(
            f"--{ENDPOINT} {address} inside a container is the container itself.",
            "Use the host's name (host.docker.internal, the service's name), or run with --network host.",
        )
    return ok(f"Spans go to {address}.")


def protocol(subject: Subject) -> tuple[Answer, ...]:
    """gRPC or HTTP, and an address that fits it."""
    address = subject.command.value(ENDPOINT) if subject.command else None
    if subject.command is None:
        return needs_command()
    if address is None:
        return ok("No address to look at.")
    if "$" in address:
        return _not_expanded(f"--{ENDPOINT} {address}")
    if subject.env is None:
        parts = _split(address)
        if _port(parts) == 4318 or parts.path.rstrip("/").endswith("/v1/traces"):
            return unknown(
                f"{address} is an OTLP/HTTP address; whether {PROTOCOL_VARIABLE} is http/protobuf was not given.",
                f"Add --env {PROTOCOL_VARIABLE}=..., as the server has it.",
            )
        return unknown(
            "The server's environment was not given.", f"Add --env {PROTOCOL_VARIABLE}=... (empty for none)."
        )
    chosen = subject.env.get(PROTOCOL_VARIABLE) or "grpc"
    if "$" in chosen:
        return _not_expanded(f"{PROTOCOL_VARIABLE}={chosen}")
    parts = _split(address)
    if chosen == "grpc":
        if _port(parts) == 4318 or parts.path.rstrip("/").endswith("/v1/traces"):
            return error(
                f"{address} is an OTLP/HTTP address, and vLLM speaks gRPC to it: no span arrives.",
                f"{HTTP_CURE} Or stay with gRPC: {GRPC_CURE}",
            )
        return ok(f"gRPC to {address}.")
    if chosen != "http/protobuf":
        return error(
            f"{PROTOCOL_VARIABLE}={chosen}: vLLM takes grpc and http/protobuf only and does not start.", HTTP_CURE
        )
    if parts.scheme not in ("http", "https"):
        return error(f"{address} has no http scheme, which OTLP/HTTP needs.", HTTP_CURE)
    if not parts.path.rstrip("/").endswith("/v1/traces"):
        return error(
            f"vLLM sends to {address} as it stands, and a receiver listens at /v1/traces.",
            f"Give --{ENDPOINT} {parts.scheme}://{parts.netloc}/v1/traces.",
        )
    if _port(parts) == 4317:
        return warning(f"{address}: 4317 is the usual port of gRPC.", HTTP_CURE)
    return ok(f"OTLP/HTTP to {address}.")


def generic_protocol(subject: Subject) -> tuple[Answer, ...]:
    """The variable that other programs obey and vLLM does not."""
    if subject.env is None:
        return needs_environment()
    generic = subject.env.get(GENERIC_PROTOCOL_VARIABLE)
    if not generic or generic == "grpc" or subject.env.get(PROTOCOL_VARIABLE):
        return ok(f"{GENERIC_PROTOCOL_VARIABLE} does not matter here.")
    return error(
        f"{GENERIC_PROTOCOL_VARIABLE}={generic} is ignored by vLLM, which speaks gRPC: the spans are lost silently.",
        HTTP_CURE,
    )


def transport_security(subject: Subject) -> tuple[Answer, ...]:
    """TLS: vLLM's gRPC exporter never uses it."""
    if subject.command is None:
        return needs_command()
    address = subject.command.value(ENDPOINT)
    if address is not None and "$" in address:
        return _not_expanded(f"--{ENDPOINT} {address}")
    if address is None or _split(address).scheme not in ("https", "grpcs"):
        return ok("No TLS address.")
    cure = (
        "Send to a local collector or receiver without TLS, or use HTTP: "
        f"{PROTOCOL_VARIABLE}=http/protobuf with --{ENDPOINT} https://HOST:4318/v1/traces."
    )
    if subject.env is None:
        return unknown(f"{address} is a TLS address, which works only with {PROTOCOL_VARIABLE}=http/protobuf.", cure)
    if (subject.env.get(PROTOCOL_VARIABLE) or "grpc") != "grpc":
        return ok("OTLP/HTTP with TLS.")
    return error(f"{address} asks for TLS, and vLLM's gRPC exporter is always without it: no span arrives.", cure)


def resource_attributes(subject: Subject) -> tuple[Answer, ...]:
    """The attributes that tell servers, shards and models apart."""
    if subject.env is None:
        return needs_environment()
    text = subject.env.get("OTEL_RESOURCE_ATTRIBUTES", "")
    pairs = [pair.strip() for pair in text.split(",") if pair.strip()]
    given = {pair.partition("=")[0].strip() for pair in pairs if "=" in pair}
    answers: list[Answer] = []
    if broken := [pair for pair in pairs if "=" not in pair]:
        answers += warning(
            f"OTEL_RESOURCE_ATTRIBUTES: {', '.join(broken)} has no '=' and is dropped.", "Write name=value,name=value."
        )
    cure = "Set OTEL_RESOURCE_ATTRIBUTES=service.instance.id=NAME,vllm.shard=SHARD,vllm.model=MODEL (NAME unique)."
    if "service.instance.id" not in given:
        answers += warning(
            "No service.instance.id: spans of several servers cannot be told apart and coverage cannot be computed.",
            cure,
        )
    if "vllm.shard" not in given:
        answers += note("No vllm.shard: the shard comes from a shard rule, else each instance is its own shard.", cure)
    if "vllm.model" not in given:
        answers += note("No vllm.model: the model comes from the scrape of the instance, else it is empty.", cure)
    if "service.name" not in given and not subject.env.get("OTEL_SERVICE_NAME"):
        answers += note("No OTEL_SERVICE_NAME: the service is called unknown_service.", "Set OTEL_SERVICE_NAME=vllm.")
    return tuple(answers) or ok("service.name, service.instance.id, vllm.shard and vllm.model are set.")


def sampling(subject: Subject) -> tuple[Answer, ...]:
    """Whether every request gets a span."""
    if subject.env is None:
        return needs_environment()
    sampler = subject.env.get("OTEL_TRACES_SAMPLER", "")
    cure = "Remove OTEL_TRACES_SAMPLER, or set it to always_on."
    if sampler in ("always_off", "parentbased_always_off"):
        return error(f"OTEL_TRACES_SAMPLER={sampler}: spans are dropped.", cure)
    if "traceidratio" in sampler:
        share = subject.env.get("OTEL_TRACES_SAMPLER_ARG", "1.0")
        return warning(
            f"OTEL_TRACES_SAMPLER={sampler}, share {share}: coverage is below 1 and tails are guesses.", cure
        )
    if sampler == "always_on":
        return ok("Every request gets a span.")
    return note(
        "Requests that come with a traceparent header of an unsampled trace get no span (parentbased_always_on).",
        "Set OTEL_TRACES_SAMPLER=always_on when a gateway in front samples.",
    )


def sdk_disabled(subject: Subject) -> tuple[Answer, ...]:
    """The switch that turns OpenTelemetry off."""
    if subject.env is None:
        return needs_environment()
    if subject.env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return error("OTEL_SDK_DISABLED=true: no span is made.", "Remove OTEL_SDK_DISABLED.")
    return ok("The SDK is on.")


def span_limits(subject: Subject) -> tuple[Answer, ...]:
    """Limits that cut attributes off the span."""
    if subject.env is None:
        return needs_environment()
    for name in ("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "OTEL_ATTRIBUTE_COUNT_LIMIT"):
        limit = subject.env.get(name, "")
        if limit.isdigit() and int(limit) < REQUEST_SPAN_ATTRIBUTES:
            return error(
                f"{name}={limit}: a request's span has up to {REQUEST_SPAN_ATTRIBUTES} attributes, the first are lost.",
                f"Remove {name}.",
            )
    return ok("No limit cuts the span.")


def rust_front_end(subject: Subject) -> tuple[Answer, ...]:
    """The front end that has no tracing."""
    if subject.env is None:
        return needs_environment()
    if subject.env.get("VLLM_USE_RUST_FRONTEND", "0").strip() in ("", "0"):
        return ok("The Python front end.")
    return error(
        "VLLM_USE_RUST_FRONTEND is on: this front end sends no spans and loads no Python stat loggers or middleware.",
        "Set VLLM_USE_RUST_FRONTEND=0.",
    )


def detailed_traces(subject: Subject) -> tuple[Answer, ...]:
    """A flag without effect."""
    if subject.command is None:
        return needs_command()
    if subject.command.value("collect-detailed-traces") is None:
        return ok("--collect-detailed-traces is not given.")
    return note("--collect-detailed-traces has no effect in 0.32: nothing reads it.", "Remove it.")


def receiver(subject: Subject) -> tuple[Answer, ...]:
    """Whether the OTLP receiver answers, seen from here."""
    if subject.receiver is None:
        return unknown("No OTLP address was given to try.", "Add --otlp-endpoint http://HOST:4317 (or :4318).")
    if subject.receiver.reachable:
        return ok(f"{subject.receiver.endpoint}: {subject.receiver.how}.")
    return error(
        f"{subject.receiver.endpoint} cannot be reached from here: {subject.receiver.how}.",
        "Start the receiver (vllm-slo up), and check the address, the port and the firewall.",
    )


def _not_expanded(text: str) -> tuple[Answer, ...]:
    return unknown(
        f"{text} holds a variable of the shell, whose value is not known here.", "Write its value into --command."
    )


def _split(address: str) -> SplitResult:
    """An address in the forms that vLLM takes: with a scheme, or ``host:port``."""
    return urlsplit(address if "://" in address else f"//{address}")


def _port(parts: SplitResult) -> int | None:
    try:
        return parts.port
    except ValueError:
        return None
