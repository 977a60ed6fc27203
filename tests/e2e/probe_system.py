"""A vLLM server with the probe of this checkout and the tests' own witness in it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from e2e.probe_server import probe_environment
from e2e.product import free_port
from e2e.vllm_server import MODEL_NAME, build_model, serve
from e2e.witness import witness_folder

ROOT = Path(__file__).resolve().parent.parent.parent
MIDDLEWARE = ("--middleware", "vllm_slo.exporters.probe.edge.Middleware")


@dataclass(frozen=True)
class ProbedServer:
    """A server that answers on ``url``; the witness's log and the probe's own series."""

    url: str
    instance: str
    log: Path
    witness_log: Path
    step_log: Path
    metrics: str


@contextmanager
def probed_server(
    python: str,
    folder: Path,
    *,
    instance: str,
    probe_port: int,
    stock_port: int,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator[ProbedServer]:
    """The probe sends to ``probe_port``, vLLM's own tracing to ``stock_port``; stopped at the end."""
    own = folder / instance
    own.mkdir()
    metrics_port = free_port()
    site = own / "site"
    site.mkdir()
    witness_folder(site)
    settings = probe_environment(own)
    settings = {
        **settings,
        "PYTHONPATH": os.pathsep.join((str(site), settings["PYTHONPATH"])),
        "VLLM_SLO_OTLP_ENDPOINT": f"http://127.0.0.1:{probe_port}",
        "VLLM_SLO_METRICS_PORT": str(metrics_port),
        "VLLM_SLO_STEP_LOG": str(own / "steps"),
        "WITNESS_LOG": str(own / "witness"),
        **(environment or {}),
    }
    with serve(
        python,
        build_model(python, ROOT / ".cache" / MODEL_NAME),
        own / "vllm.log",
        port=free_port(),
        otlp_endpoint=f"grpc://127.0.0.1:{stock_port}",
        instance=instance,
        arguments=(*MIDDLEWARE, *arguments),
        environment=settings,
    ) as server:
        yield ProbedServer(
            server.url,
            instance,
            own / "vllm.log",
            own / "witness",
            own / "steps",
            f"http://127.0.0.1:{metrics_port}/metrics",
        )
