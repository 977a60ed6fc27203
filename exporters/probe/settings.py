"""What the environment says to the probe; see `variables` for each."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from vllm_slo.exporters.conventions import MODEL, SERVICE_INSTANCE_ID, SERVICE_NAME, SHARD
from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.probe.variables import PREFIX, VARIABLES, Buckets, protocol_of

LOGGER_NAME = "vllm.vllm_slo"
"""Below vLLM's own logger, so that its handler, format and level apply."""


class SettingsError(SloError):
    """Every fault of the environment, one a line."""


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
            protocol_of(protocol)
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
