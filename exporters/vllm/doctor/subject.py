"""The server that is looked at: everything the checks may know of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.vllm.doctor.command_line import CommandLine
from vllm_slo.exporters.vllm.page import Page


@dataclass(frozen=True)
class Metric:
    """What an objective is set on: vLLM's histogram for it, and its key in ``--custom-histogram-buckets``."""

    series: str
    family: str


METRICS: dict[str, Metric] = {
    "ttft": Metric("time_to_first_token_seconds", "time_to_first_token"),
    "itl": Metric("inter_token_latency_seconds", "inter_token_latency"),
    "tpot": Metric("request_time_per_output_token_seconds", "inter_token_latency"),
    "duration": Metric("e2e_request_latency_seconds", "request_latency"),
    "queue": Metric("request_queue_time_seconds", "request_latency"),
    "prefill": Metric("request_prefill_time_seconds", "request_latency"),
    "decode": Metric("request_decode_time_seconds", "request_latency"),
}
"""Name in ``--objective NAME=SECONDS`` -> where vLLM measures it."""


@dataclass(frozen=True)
class Objective:
    """A threshold in seconds on one of METRICS."""

    metric: str
    seconds: float


DEFAULT_OBJECTIVES: tuple[Objective, ...] = (
    Objective("ttft", 0.8),
    Objective("tpot", 0.05),
    Objective("duration", 10.0),
    Objective("queue", 0.2),
)
"""Used when none is given: thresholds usual for interactive serving."""


@dataclass(frozen=True)
class Receiver:
    """How the OTLP receiver at ``endpoint`` answered; ``how`` names what was tried."""

    endpoint: str
    reachable: bool
    how: str


@dataclass(frozen=True)
class ProbePage:
    """The page that the probe of one engine serves: labels and value of each sample, by series.

    ``reason`` says why it could not be read; then there are no samples.
    """

    url: str
    samples: Mapping[str, tuple[tuple[Mapping[str, str], float], ...]] = field(default_factory=dict)
    reason: str | None = None

    @property
    def reachable(self) -> bool:
        """Whether anything answered."""
        return self.reason is None

    @property
    def instance(self) -> str | None:
        """Whose page it is, where the server's resource names it."""
        said = (labels.get("service_instance_id") for labels, _ in self.samples.get("vllm_slo_probe_info", ()))
        return next(filter(None, said), None)

    def value(self, series: str) -> float | None:
        """The sum over the samples of one series; None when there is none."""
        values = [value for _, value in self.samples.get(series, ()) if not math.isnan(value)]
        return math.fsum(values) if values else None


@dataclass(frozen=True)
class Recorded:
    """What the lake has of one server, of the newest day of its data.

    ``running`` names the parts of the probe that were seen (`engine`, `frontend`, `edge`). ``version`` is the probe's.
    ``sampled`` tells of the probe's engine samples; ``dropped``, ``errors`` and ``gpu`` are what these say.
    ``silent_since``: the last word of a probe that says nothing any more while the server goes on.
    """

    instance: str
    requests: int = 0
    running: tuple[str, ...] = ()
    version: str | None = None
    sampled: bool = False
    dropped: float | None = None
    errors: float | None = None
    gpu: bool = False
    silent_since: datetime | None = None


@dataclass(frozen=True)
class Subject:
    """What is known of one server; None (or empty) is *not looked at*, never *absent*.

    ``pages`` are (moment, page), oldest first. ``env`` holds the whole environment that matters when it is given.
    ``clock_offset_seconds`` is the server's clock minus ours. ``healthy`` is the answer of ``/health``.
    ``context_buckets`` are (name, upper bound in tokens), ascending. ``own_version`` is that of this program.
    """

    command: CommandLine | None = None
    env: Mapping[str, str] | None = None
    pages: tuple[tuple[datetime, Page], ...] = ()
    version: str | None = None
    healthy: bool | None = None
    clock_offset_seconds: float | None = None
    receiver: Receiver | None = None
    probe_page: ProbePage | None = None
    recorded: Recorded | None = None
    own_version: str | None = None
    objectives: tuple[Objective, ...] = DEFAULT_OBJECTIVES
    objectives_given: bool = False
    context_buckets: tuple[tuple[str, int], ...] = (("short", 4096), ("medium", 32768), ("long", 128000))

    @property
    def page(self) -> Page | None:
        """The latest page."""
        return self.pages[-1][1] if self.pages else None

    @property
    def vllm_version(self) -> str | None:
        """What ``/version`` said, else the tag of the container image."""
        return self.version or (self.command.image_version if self.command else None)


def parse_objective(text: str) -> Objective:
    """``ttft=0.5`` -> the objective, in seconds. Raises SloError.

    >>> parse_objective("ttft=0.5")
    Objective(metric='ttft', seconds=0.5)
    """
    metric, _, number = text.partition("=")
    if metric not in METRICS:
        raise SloError(f"--objective {text}: {metric!r} is not one of {', '.join(METRICS)}; write ttft=0.5")
    try:
        seconds = float(number)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise SloError(f"--objective {text}: {number!r} is not a number of seconds above 0; write {metric}=0.5")
    return Objective(metric, seconds)
