"""Clients of a server under test: seeded streams of completions, some of which their client gives up."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import httpx

from e2e.vllm_server import MODEL_NAME

SHARES = {"short": 0.92, "medium": 0.07, "long": 0.01}
LONG_TOKENS = 35_000
LEFT_UNREAD = 4_000
"""Tokens that take a server half a minute: on a busy machine an API server sends seconds after the engine core made."""


@dataclass(frozen=True)
class Job:
    """A request to send ``at_seconds`` after the load begins. The client goes away after ``give_up_after`` tokens."""

    name: str
    prompt: tuple[int, ...]
    output: int
    at_seconds: float = 0.0
    give_up_after: int | None = None
    priority: int = 0


@dataclass(frozen=True)
class Seen:
    """What its client saw; times in seconds of the monotonic clock, ``wall`` in seconds since the epoch."""

    job: Job
    status: int
    tokens: int
    finish_reason: str | None
    wall: float
    sent: float
    first: float | None
    last: float

    @property
    def request_id(self) -> str:
        """vLLM's external request id of the only completion."""
        return f"cmpl-{self.job.name}-0"

    @property
    def given_up(self) -> bool:
        """Whether the client went away before the end."""
        return self.finish_reason is None and self.status == 200


def prompt(seed: int, tokens: int, shared: int = 0) -> tuple[int, ...]:
    """Random token ids, the first ``shared`` of them the same for every seed."""
    own = random.Random(seed)
    common = random.Random(0)
    return (*common.choices(range(3, 1024), k=min(shared, tokens)), *own.choices(range(3, 1024), k=tokens - shared))


def overload(prefix: str, seconds: float, rate: float, seed: int, cancelled: float = 0.05) -> list[Job]:
    """Poisson arrivals of short, medium and long prompts in the SHARES, exactly ``cancelled`` of them given up.

    At least two are long, one in each half. Those to be given up ask for so much that the server is not done with them
    before a client that is slow to read has left.
    """
    draw = random.Random(seed)
    at, times = 0.0, []
    while (at := at + draw.expovariate(rate)) < seconds:
        times.append(at)
    kinds = draw.choices(list(SHARES), list(SHARES.values()), k=len(times))
    kinds[len(times) // 4] = kinds[len(times) * 5 // 8] = "long"
    jobs = []
    for at, kind in zip(times, kinds, strict=True):
        if kind == "long":
            tokens, output = LONG_TOKENS, 64
        elif kind == "medium":
            tokens, output = draw.randint(4_200, 9_000), draw.randint(8, 32)
        else:
            tokens, output = draw.randint(16, 700), draw.randint(40, 160)
        shared = 96 if kind == "short" and tokens > 200 and draw.random() < 0.3 else 0
        jobs.append((f"{prefix}-{len(jobs):04}", prompt(seed * 100_003 + len(jobs), tokens, shared), output, at))
    gone = set(draw.sample(range(len(jobs)), round(cancelled * len(jobs))))
    return [
        Job(name, tokens, output + LEFT_UNREAD, at, give_up_after=max(1, output // 3))
        if index in gone
        else Job(name, tokens, output, at)
        for index, (name, tokens, output, at) in enumerate(jobs)
    ]


def burst(prefix: str, sizes: Iterable[tuple[int, int]], seed: int, at_seconds: float = 0.0) -> list[Job]:
    """Requests of these (prompt, output) tokens, all at once."""
    return [
        Job(f"{prefix}-{index:04}", prompt(seed * 100_003 + index, tokens), output, at_seconds)
        for index, (tokens, output) in enumerate(sizes)
    ]


def send(url: str, jobs: Sequence[Job], one_at_a_time: bool = False) -> list[Seen]:
    """Sends every job at its time, or each after the last one's end; returns when all have ended."""
    return asyncio.run(_send(url, jobs, one_at_a_time))


async def _send(url: str, jobs: Sequence[Job], one_at_a_time: bool) -> list[Seen]:
    # A connection per request: the server closes idle ones, which a client that reuses them sees as a failure.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    # Reading the certificates of authorities takes longer than some of the requests.
    async with httpx.AsyncClient(timeout=300, limits=limits, trust_env=False, verify=False) as client:
        if one_at_a_time:
            return [await _stream(client, url, job) for job in jobs]
        start = time.monotonic()
        return await asyncio.gather(*(_later(client, url, job, start) for job in jobs))


async def _later(client: httpx.AsyncClient, url: str, job: Job, start: float) -> Seen:
    await asyncio.sleep(max(0.0, start + job.at_seconds - time.monotonic()))
    return await _stream(client, url, job)


async def _stream(client: httpx.AsyncClient, url: str, job: Job) -> Seen:
    body = {
        "model": MODEL_NAME,
        "prompt": list(job.prompt),
        "max_tokens": job.output,
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    if job.priority:
        body["priority"] = job.priority
    headers = {"X-Request-Id": job.name, "Content-Type": "application/json"}
    tokens, first, finish_reason = 0, None, None
    wall, sent = time.time(), time.monotonic()
    async with client.stream("POST", f"{url}/v1/completions", content=json.dumps(body), headers=headers) as response:
        status = response.status_code
        if status == 200:
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.monotonic()
                data = json.loads(line.removeprefix("data: "))
                tokens = (data.get("usage") or {}).get("completion_tokens", tokens)
                for choice in data.get("choices", ()):
                    finish_reason = choice.get("finish_reason") or finish_reason
                if job.give_up_after is not None and tokens >= job.give_up_after:
                    break
        else:
            await response.aread()
    return Seen(job, status, tokens, finish_reason, wall, sent, first, time.monotonic())
