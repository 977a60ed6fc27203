"""The price of the probe end to end: two real vLLM servers, with and without it, loaded by turns.

Both servers stay up, pinned to the same cores and to none of the client's; while one answers a load, the other is
idle. A pair is the same seeded load to each, in the order AB, the next pair BA. CPU seconds are those of the server's
whole process tree from before the load to a second and a half after it, so that what the probe still has to send
counts. The figures are ratios with / without: the geometric mean over the pairs and its 95 % interval (Student's t on
the logarithms).

The server without the probe has no telemetry at all; the one with it sends to a real receiver and has its HTTP part.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from e2e.probe_server import probe_environment  # noqa: E402
from e2e.product import Up, free_port  # noqa: E402
from e2e.vllm_server import MODEL_NAME, VllmServer, build_model, serve  # noqa: E402

SETTLE_SECONDS = 1.5
MIDDLEWARE = ("--middleware", "vllm_slo.exporters.probe.edge.Middleware")
ARGUMENTS = ("--max-num-seqs", "16")


@dataclass(frozen=True)
class Load:
    """``requests`` streamed completions by ``at_once`` clients; each sends its next one when the last has ended."""

    requests: int = 96
    at_once: int = 16
    prompt_tokens: tuple[int, int] = (64, 512)
    output_tokens: tuple[int, int] = (32, 128)


@dataclass(frozen=True)
class Run:
    """One load on one server."""

    cpu_per_request: float
    tokens_per_second: float
    ttft_p99: float


@dataclass(frozen=True)
class Ratio:
    """With / without, over pairs."""

    mean: float
    low: float
    high: float


def ratio(pairs: Sequence[tuple[float, float]]) -> Ratio:
    """Geometric mean of with / without and its 95 % interval.

    >>> ratio([(2.0, 1.0), (2.0, 1.0)])
    Ratio(mean=2.0, low=2.0, high=2.0)
    """
    logs = [math.log(probed / plain) for probed, plain in pairs]
    mean = statistics.fmean(logs)
    half = student_t_975(len(logs) - 1) * statistics.stdev(logs) / math.sqrt(len(logs)) if len(logs) > 1 else math.inf
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def student_t_975(freedom: int) -> float:
    """97.5 % quantile of Student's t; exact for 1 and 2, else Abramowitz & Stegun 26.7.5, within 0.01 of it.

    >>> round(student_t_975(19), 2)
    2.09
    """
    if freedom == 1:
        return 12.706
    if freedom == 2:
        return 4.303
    z, v = 1.959964, freedom
    return (
        z
        + (z**3 + z) / (4 * v)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    )


def measure(python: str, pairs: int, load: Load, cores: Mapping[str, Sequence[int]]) -> dict[str, object]:
    """The figures of so many pairs; ``cores`` of `server` and of `client`.

    Where a process happens to lie in memory stays with it, so the servers are started twice, in either order.
    """
    os.sched_setaffinity(0, cores["client"])
    found: list[tuple[Run, Run]] = []
    for probe_first in (True, False):
        with servers(python, cores["server"], probe_first) as (probed, plain):
            for server in (probed, plain):
                run(server, load, seed=0)
            for _ in range((pairs - len(found)) // 2 if probe_first else pairs - len(found)):
                number = len(found) + 1
                order = (probed, plain) if number % 2 else (plain, probed)
                runs = {id(server): run(server, load, seed=number) for server in order}
                found.append((runs[id(probed)], runs[id(plain)]))
                done = ratio([(a.cpu_per_request, b.cpu_per_request) for a, b in found])
                print(f"pair {number} of {pairs}: CPU ratio so far {done.mean:.4f}", file=sys.stderr, flush=True)
    return figures(found)


@contextmanager
def servers(python: str, cores: Sequence[int], probe_first: bool) -> Iterator[tuple[VllmServer, VllmServer]]:
    """(with the probe, without), and a receiver that the first sends to."""
    mine = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = build_model(python, ROOT / ".cache" / MODEL_NAME)
        up = Up(folder / "lake", folder / "up.log")
        with up.running(), ExitStack() as stack:
            environment = {
                **probe_environment(folder),
                "VLLM_SLO_OTLP_ENDPOINT": f"http://127.0.0.1:{up.grpc_port}",
                "VLLM_SLO_METRICS_PORT": str(free_port()),
            }

            def start(log: str, arguments: Sequence[str], settings: Mapping[str, str]) -> VllmServer:
                # A process keeps the cores of the one that started it.
                os.sched_setaffinity(0, cores)
                try:
                    return stack.enter_context(
                        serve(
                            python,
                            model,
                            folder / log,
                            port=free_port(),
                            otlp_endpoint=None,
                            arguments=arguments,
                            environment=settings,
                        )
                    )
                finally:
                    os.sched_setaffinity(0, mine)

            plain = None if probe_first else start("plain.log", ARGUMENTS, {})
            probed = start("probe.log", (*ARGUMENTS, *MIDDLEWARE), environment)
            yield probed, plain or start("plain.log", ARGUMENTS, {})


def figures(found: Sequence[tuple[Run, Run]]) -> dict[str, object]:
    """Ratios and what lies behind them: medians over the runs, with the probe and without."""

    def medians(name: str, scale: float) -> list[float]:
        return [scale * statistics.median(getattr(run, name) for run in side) for side in zip(*found, strict=True)]

    cpu = ratio([(a.cpu_per_request, b.cpu_per_request) for a, b in found])
    throughput = ratio([(a.tokens_per_second, b.tokens_per_second) for a, b in found])
    ttft = ratio([(a.ttft_p99, b.ttft_p99) for a, b in found])
    return {
        "pairs": len(found),
        "cpu_per_request_ratio": cpu.mean,
        "cpu_per_request_ratio_low": cpu.low,
        "cpu_per_request_ratio_high": cpu.high,
        "throughput_ratio": throughput.mean,
        "throughput_ratio_low": throughput.low,
        "throughput_ratio_high": throughput.high,
        "ttft_p99_ratio": ttft.mean,
        "ttft_p99_ratio_low": ttft.low,
        "ttft_p99_ratio_high": ttft.high,
        "cpu_ms_per_request": medians("cpu_per_request", 1_000),
        "tokens_per_second": medians("tokens_per_second", 1),
        "ttft_p99_ms": medians("ttft_p99", 1_000),
    }


def run(server: VllmServer, load: Load, seed: int) -> Run:
    """Loads one server; fails when a request does."""
    before = cpu_seconds(server.process_id)
    start = time.monotonic()
    tokens, ttfts = asyncio.run(_clients(server.url, load, seed))
    wall = time.monotonic() - start
    time.sleep(SETTLE_SECONDS)
    spent = cpu_seconds(server.process_id) - before
    return Run(spent / load.requests, tokens / wall, statistics.quantiles(ttfts, n=100)[98])


def cpu_seconds(process_id: int) -> float:
    """User and system time of a process and all its children, those that have ended included."""
    root = psutil.Process(process_id)
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system + times.children_user + times.children_system
    return total


async def _clients(url: str, load: Load, seed: int) -> tuple[int, list[float]]:
    draw = random.Random(seed)
    work = iter(
        [
            (draw.choices(range(3, 1024), k=draw.randint(*load.prompt_tokens)), draw.randint(*load.output_tokens))
            for _ in range(load.requests)
        ]
    )
    limits = httpx.Limits(max_connections=load.at_once, max_keepalive_connections=load.at_once)
    async with httpx.AsyncClient(timeout=120, limits=limits, trust_env=False) as client:
        done = await asyncio.gather(*(_client(client, url, work) for _ in range(load.at_once)))
    return sum(tokens for tokens, _ in done), [ttft for _, ttfts in done for ttft in ttfts]


async def _client(
    client: httpx.AsyncClient, url: str, work: Iterator[tuple[list[int], int]]
) -> tuple[int, list[float]]:
    tokens, ttfts = 0, []
    for prompt, output in work:
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True}
        start, first = time.monotonic(), 0.0
        async with client.stream("POST", f"{url}/v1/completions", json=body) as response:
            assert response.status_code == 200, await response.aread()
            async for _ in response.aiter_raw():
                first = first or time.monotonic()
        tokens += output
        ttfts.append(first - start)
    return tokens, ttfts
