"""What the environment says to the probe: one table of variables gives parsing, errors and docs/probe-settings.md."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from vllm_slo.exporters.conventions import MODEL, SERVICE_INSTANCE_ID, SERVICE_NAME, SHARD
from vllm_slo.exporters.errors import SloError

LOGGER_NAME = "vllm.vllm_slo"
"""Below vLLM's own logger, so that its handler, format and level apply."""
PREFIX = "VLLM_SLO_"

Buckets = tuple[tuple[str, int | None], ...]
"""Name and largest prompt in tokens (inclusive), ascending; the last bound may be null and never matters."""


class SettingsError(SloError):
    """Every fault of the environment, one a line."""


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


def _protocol(text: str) -> str | None:
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
        _protocol,
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

DEFAULT_GRPC_ENDPOINT = "http://127.0.0.1:4317"
DEFAULT_HTTP_ENDPOINT = "http://127.0.0.1:4318"
TRACES_PATH = "/v1/traces"


@dataclass(frozen=True)
class Settings:
    """The probe's settings; the fields of VARIABLES have their meaning there.

    ``shard`` is null when nothing names it; ``resource`` is what OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME say,
    ``service.name`` always in it; ``random_ids``: internal request ids end in a random suffix.
    """

    enabled: bool
    endpoint: str | None
    own_protocol: str | None
    metrics_host: str
    metrics_port: int
    slo_file: Path | None
    buckets: Buckets
    priority_classes: tuple[int, ...]
    tenant_header: str | None
    tenant_hash: bool
    tenant_salt: str
    step_log: Path | None
    queue_size: int
    export_interval_seconds: float
    own_runtime_dir: Path | None
    protocol: str
    fallback_endpoint: str
    runtime_dir: Path
    resource: Mapping[str, str]
    random_ids: bool

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], user_id: int | None = None) -> Settings:
        """The settings; SettingsError names every fault at once. ``user_id`` null is that of this process."""
        values: dict[str, Any] = {}
        faults = [
            f"{name}: no such variable; did you mean {close[0]}?"
            for name in sorted(environ)
            if name.startswith(PREFIX) and name not in _NAMES
            if (close := difflib.get_close_matches(name, _NAMES, 1, 0.9))
        ]
        for variable in VARIABLES:
            text = environ.get(variable.name, "").strip() or variable.default
            try:
                values[variable.field] = variable.parse(text)
            except ValueError as error:
                faults.append(f"{variable.name}: {text!r} {error}")
        protocol = values.get("own_protocol") or environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or "grpc"
        try:
            _protocol(protocol)
        except ValueError as error:
            faults.append(f"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: {protocol!r} {error}")
        if faults:
            raise SettingsError("\n".join(faults))
        folder = Path(environ.get("XDG_RUNTIME_DIR") or environ.get("TMPDIR") or "/tmp")
        own = (
            "vllm-slo" if environ.get("XDG_RUNTIME_DIR") else f"vllm-slo-{os.getuid() if user_id is None else user_id}"
        )
        return cls(
            **values,
            protocol=protocol,
            fallback_endpoint=_fallback_endpoint(environ, protocol),
            runtime_dir=values["own_runtime_dir"] or folder / own,
            resource=_resource(environ),
            random_ids=environ.get("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "0") not in ("1", "true", "True"),
        )

    @property
    def shard(self) -> str | None:
        """``vllm.shard``, else the instance, else null."""
        return self.resource.get(SHARD) or self.instance

    @property
    def instance(self) -> str | None:
        """``service.instance.id``, else null."""
        return self.resource.get(SERVICE_INSTANCE_ID)

    @property
    def model(self) -> str | None:
        """``vllm.model`` of the environment, else null: see ``model_for``."""
        return self.resource.get(MODEL)

    def model_for(self, vllm_config: Any) -> str | None:
        """The model's name in every record and label: the environment's, else the served name of vLLM's VllmConfig."""
        served = getattr(getattr(vllm_config, "model_config", None), "served_model_name", None)
        first = served[0] if isinstance(served, list | tuple) and served else served
        return self.model or (first if isinstance(first, str) else None)

    def endpoint_for(self, vllm_config: Any) -> str:
        """Where records go: the own variable, else what vLLM's VllmConfig says, else the environment's or the default.

        Over HTTP an address without a path gets ``/v1/traces``; vLLM wants the full address there.
        """
        theirs = getattr(getattr(vllm_config, "observability_config", None), "otlp_traces_endpoint", None)
        endpoint = self.endpoint or theirs or self.fallback_endpoint
        if self.protocol != "grpc" and urlsplit(endpoint).path in ("", "/"):
            return endpoint.rstrip("/") + TRACES_PATH
        return str(endpoint)


_NAMES = tuple(variable.name for variable in VARIABLES)


def _fallback_endpoint(environ: Mapping[str, str], protocol: str) -> str:
    if endpoint := environ.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        return endpoint
    if base := environ.get("OTEL_EXPORTER_OTLP_ENDPOINT"):
        return base if protocol == "grpc" else base.rstrip("/") + TRACES_PATH
    return DEFAULT_GRPC_ENDPOINT if protocol == "grpc" else DEFAULT_HTTP_ENDPOINT


def _resource(environ: Mapping[str, str]) -> dict[str, str]:
    """As OpenTelemetry reads it: ``key=value`` with commas between, values percent-encoded; the rest is left out."""
    found = {SERVICE_NAME: "vllm"}
    for item in environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, equals, value = item.partition("=")
        if equals and key.strip():
            found[key.strip()] = unquote(value.strip())
    if name := environ.get("OTEL_SERVICE_NAME"):
        found[SERVICE_NAME] = name
    return found
