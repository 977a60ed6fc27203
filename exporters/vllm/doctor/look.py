"""The edge that reads a server, a saved page, or an OTLP receiver for the checks."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import urlsplit

import grpc
import httpx
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.parser import text_string_to_metric_families

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.vllm.doctor.subject import ProbePage, Receiver
from vllm_slo.exporters.vllm.page import Page, parse
from vllm_slo.exporters.vllm.recorded import pages
from vllm_slo.exporters.vllm.scrape import Clock, clock_offset_seconds, parse_target, version_url

TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class Looked:
    """What a server or a saved page told; None where it was not there."""

    pages: tuple[tuple[datetime, Page], ...]
    version: str | None = None
    healthy: bool | None = None
    clock_offset_seconds: float | None = None


def look(source: str, client: httpx.Client, clock: Clock) -> Looked:
    """Read ``source``: the address of a server, or a saved metrics page, or a folder of them. Raises SloError."""
    path = Path(source)
    if "://" not in source and path.exists():
        return Looked(tuple((when, parse(text)) for when, text in pages(path)))
    if source.startswith(("/", ".")):
        raise SloError(f"{source}: no such file or folder; give a saved metrics page, or a server's http://HOST:PORT")
    url = parse_target(source).url
    try:
        response = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise SloError(
            f"{url}: {str(error) or type(error).__name__}; check that vLLM is up there, the port, and the firewall"
        ) from error
    if response.status_code != 200:
        raise SloError(
            f"{url}: HTTP {response.status_code}, no metrics page; "
            "give the API server's own address, with its --root-path if it has one"
        )
    now = clock()
    return Looked(
        ((now, parse(response.text)),),
        _version(client, url),
        _healthy(client, url),
        clock_offset_seconds(response.headers.get("date"), now),
    )


def look_at_probe(address: str, client: httpx.Client) -> ProbePage:
    """The page of an engine's probe, or what stood in the way; ``/metrics`` is added to an address without a path."""
    url = parse_target(address).url
    try:
        response = client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return ProbePage(url, reason=str(error) or type(error).__name__)
    if response.status_code != 200:
        return ProbePage(url, reason=f"HTTP {response.status_code}")
    samples: dict[str, list[tuple[dict[str, str], float]]] = {}
    try:
        for family in text_string_to_metric_families(response.text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((dict(sample.labels), float(sample.value)))
    except (ValueError, IndexError, KeyError):
        return ProbePage(url, reason="what it sends is no Prometheus text")
    return ProbePage(url, {name: tuple(found) for name, found in samples.items()})


def try_receiver(endpoint: str, client: httpx.Client) -> Receiver:
    """Whether an OTLP receiver answers: over HTTP for port 4318 or a path, else over gRPC without TLS, as vLLM does."""
    parts = urlsplit(endpoint if "://" in endpoint else f"//{endpoint}")
    try:
        http = parts.port == 4318 or parts.path.strip("/") != ""
    except ValueError as error:
        raise SloError(f"--otlp-endpoint {endpoint}: {error}; write http://HOST:4317 or http://HOST:4318") from error
    if not parts.netloc:
        raise SloError(f"--otlp-endpoint {endpoint}: no host; write http://HOST:4317 or http://HOST:4318")
    return (
        _try_http(endpoint, parts.scheme or "http", parts.netloc, client) if http else _try_grpc(endpoint, parts.netloc)
    )


def _try_http(endpoint: str, scheme: str, netloc: str, client: httpx.Client) -> Receiver:
    try:
        status = client.get(f"{scheme}://{netloc}/healthz").status_code
    except httpx.HTTPError as error:
        return Receiver(endpoint, False, str(error) or type(error).__name__)
    return Receiver(endpoint, True, f"/healthz answers {status}")


def _try_grpc(endpoint: str, netloc: str) -> Receiver:
    with grpc.insecure_channel(netloc) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS, wait_for_ready=False
            )
        except grpc.RpcError as error:
            code = error.code()
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                return Receiver(endpoint, False, f"gRPC {code.name}: {error.details()}")
            return Receiver(endpoint, True, f"a gRPC server without the health service answers ({code.name})")
    name = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return Receiver(endpoint, answer.status == health_pb2.HealthCheckResponse.SERVING, f"gRPC health says {name}")


def _version(client: httpx.Client, url: str) -> str | None:
    try:
        answer = client.get(version_url(url)).json()
    except (httpx.HTTPError, ValueError):
        return None
    version = answer.get("version") if isinstance(answer, dict) else None
    return version if isinstance(version, str) else None


def _healthy(client: httpx.Client, url: str) -> bool | None:
    """True for 200, False for 503 (vLLM's answer when the engine is dead), None when the path is not there."""
    try:
        status = client.get(version_url(url).removesuffix("/version") + "/health").status_code
    except httpx.HTTPError:
        return None
    return {200: True, 503: False}.get(status)
