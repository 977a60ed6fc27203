"""The environment variables of the probe: one table gives parsing, errors and docs/probe-settings.md."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

PREFIX = "VLLM_SLO_"

Buckets = tuple[tuple[str, int | None], ...]
"""Name and largest prompt in tokens (inclusive), ascending; the last bound may be null and never matters."""


@dataclass(frozen=True)
class Variable:
    """One environment variable. ``parse`` raises ValueError with what is wrong and what to write instead."""

    name: str
    field: str
    default: str
    meaning: str
    parse: Callable[[str], Any]


def _flag(text: str) -> bool:
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise ValueError("is neither on nor off; write 1 or 0")


def _integer(text: str, what: str, low: int, high: int, cure: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise ValueError(f"is not {what}; write {cure}")
    return value


def _port(text: str) -> int:
    return _integer(text, "a port", 0, 65535, "1 to 65535, or 0 for none")


def _queue_size(text: str) -> int:
    return _integer(text, "a number of records", 1, 1_000_000, "1 to 1000000, such as 10000")


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.05 <= value <= 60:
        raise ValueError("is not a number of seconds; write 0.05 to 60, such as 1")
    return value


def _endpoint(text: str) -> str | None:
    if not text:
        return None
    try:
        parts = urlsplit(text if "//" in text else f"grpc://{text}")
        valid = parts.scheme in ("grpc", "http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise ValueError("is not an address; write http://host:4317, or http://host:4318/v1/traces for HTTP")
    return text if "//" in text else f"http://{text}"


def protocol_of(text: str) -> str | None:
    if text not in ("", "grpc", "http/protobuf"):
        raise ValueError("is not a protocol; write grpc or http/protobuf")
    return text or None


def _host(text: str) -> str:
    if not text or re.search(r"[\s/]", text):
        raise ValueError("is not an address to listen on; write 127.0.0.1, or 0.0.0.0 for all interfaces")
    return text


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _header(text: str) -> str | None:
    if text and not re.fullmatch(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+", text):
        raise ValueError("is not the name of an HTTP header; write one such as X-Tenant")
    return text.lower() or None


def _buckets(text: str) -> Buckets:
    cure = "write names with ascending bounds, such as short=4096,medium=32768,long"
    found: list[tuple[str, int | None]] = []
    items = [item.strip() for item in text.split(",")]
    for number, item in enumerate(items):
        name, equals, bound = (part.strip() for part in item.partition("="))
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name in (known for known, _ in found):
            raise ValueError(f"has no usable name in {item!r}; {cure}")
        if not equals and number == len(items) - 1:
            found.append((name, None))
            continue
        if not bound.isdecimal() or int(bound) <= (found[-1][1] or 0 if found else 0):
            raise ValueError(f"has no bound above the one before in {item!r}; {cure}")
        found.append((name, int(bound)))
    return tuple(found)


def _priorities(text: str) -> tuple[int, ...]:
    try:
        bounds = tuple(int(bound) for bound in text.split(",")) if text else ()
    except ValueError:
        bounds = (0, 0)
    if len(bounds) > 3 or list(bounds) != sorted(set(bounds)):
        raise ValueError("is no list of bounds; write up to three ascending integers, such as -1,0")
    return bounds


VARIABLES: tuple[Variable, ...] = (
    Variable("VLLM_SLO_PROBE", "enabled", "1", "`0` switches the probe off.", _flag),
    Variable(
        "VLLM_SLO_OTLP_ENDPOINT",
        "endpoint",
        "",
        "Where records are sent. When empty: vLLM's `--otlp-traces-endpoint`, else "
        "`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`, else `OTEL_EXPORTER_OTLP_ENDPOINT`, else `http://127.0.0.1:4317` "
        "(`http://127.0.0.1:4318/v1/traces` for HTTP). An `https://` address is TLS.",
        _endpoint,
    ),
    Variable(
        "VLLM_SLO_OTLP_PROTOCOL",
        "own_protocol",
        "",
        "`grpc` or `http/protobuf`. When empty: `OTEL_EXPORTER_OTLP_TRACES_PROTOCOL`, which vLLM reads too, else "
        "`grpc`.",
        protocol_of,
    ),
    Variable(
        "VLLM_SLO_METRICS_HOST",
        "metrics_host",
        "127.0.0.1",
        "Address on which an engine serves its Prometheus series.",
        _host,
    ),
    Variable(
        "VLLM_SLO_METRICS_PORT",
        "metrics_port",
        "9464",
        "Port of those series; engine n of a server listens on this port + n. `0` serves none.",
        _port,
    ),
    Variable(
        "VLLM_SLO_FILE",
        "slo_file",
        "",
        "SLO file; its objectives become bounds of the histograms and are watched for requests in flight.",
        _path,
    ),
    Variable(
        "VLLM_SLO_BUCKETS",
        "buckets",
        "short=4096,medium=32768,long",
        "Context buckets: name and largest prompt in tokens, ascending. Longer prompts belong to the last one.",
        _buckets,
    ),
    Variable(
        "VLLM_SLO_PRIORITIES",
        "priority_classes",
        "-1,0",
        "Upper bounds (inclusive) of vLLM's request priority, ascending, at most three: one class each and one above. "
        "The default: below 0, 0, above 0.",
        _priorities,
    ),
    Variable(
        "VLLM_SLO_TENANT_HEADER",
        "tenant_header",
        "",
        "HTTP header that names the tenant; read by the middleware. It never becomes a label.",
        _header,
    ),
    Variable("VLLM_SLO_TENANT_HASH", "tenant_hash", "0", "`1` sends a hash of the tenant instead of its name.", _flag),
    Variable(
        "VLLM_SLO_TENANT_SALT",
        "tenant_salt",
        "",
        "Key of that hash, a secret of the deployment: without one whoever knows a name can find its hash.",
        str,
    ),
    Variable("VLLM_SLO_STEP_LOG", "step_log", "", "File that gets a line for each scheduler step; to debug.", _path),
    Variable(
        "VLLM_SLO_QUEUE_SIZE",
        "queue_size",
        "10000",
        "Records that may wait for the receiver in one process; more are dropped and counted.",
        _queue_size,
    ),
    Variable(
        "VLLM_SLO_EXPORT_INTERVAL_SECONDS",
        "export_interval_seconds",
        "1",
        "How often waiting records are sent. A server that is stopped sends what waits, but for its engine core, which "
        "vLLM kills at once unless its `--shutdown-timeout` is longer than this.",
        _interval,
    ),
    Variable(
        "VLLM_SLO_RUNTIME_DIR",
        "own_runtime_dir",
        "",
        "Folder for what the processes of one server tell each other. When empty: `$XDG_RUNTIME_DIR/vllm-slo`, else "
        "`vllm-slo-<user id>` in the folder for temporary files.",
        _path,
    ),
)

OTHERS: dict[str, str] = {
    "OTEL_RESOURCE_ATTRIBUTES": "Resource of every record; `vllm.shard`, `vllm.model` and `service.instance.id` "
    "become columns.",
    "OTEL_SERVICE_NAME": "`service.name`, `vllm` when neither says it.",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "See `VLLM_SLO_OTLP_ENDPOINT`.",
    "OTEL_EXPORTER_OTLP_ENDPOINT": "See `VLLM_SLO_OTLP_ENDPOINT`; over HTTP `/v1/traces` is added.",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "See `VLLM_SLO_OTLP_PROTOCOL`.",
    "OTEL_EXPORTER_OTLP_HEADERS": "Headers of every export, such as `authorization=Bearer%20…`; also "
    "`OTEL_EXPORTER_OTLP_TRACES_HEADERS`, certificates and compression, as OpenTelemetry's exporter reads them.",
    "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "Whether internal request ids end in a random suffix.",
    "XDG_RUNTIME_DIR": "See `VLLM_SLO_RUNTIME_DIR`; also `TMPDIR`.",
}
"""Variable of OpenTelemetry, vLLM or the system that the probe reads -> what for."""
