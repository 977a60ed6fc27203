"""Where readings come from: NVML or a DCGM exporter, each asked with a time limit."""

from __future__ import annotations

import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal, Protocol
from urllib.parse import urlsplit

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.gpu import dcgm
from vllm_slo.exporters.gpu.device import read_gpu
from vllm_slo.exporters.gpu.gpm import MigActivity
from vllm_slo.exporters.gpu.nvml import NoGpu, Nvml, live
from vllm_slo.exporters.gpu.reading import Gpu
from vllm_slo.exporters.gpu.timed import Timed

Clock = Callable[[], float]

LIMIT_SECONDS = 2.0
"""A GPU answers within milliseconds; a Prometheus waits 10 seconds."""
START_SECONDS = 30.0
"""Opening a driver without persistence mode takes seconds, the more the more GPUs there are."""
STALE_SECONDS = 60.0
"""Old values are shown, and marked, for so long; then the GPU's series end."""
DEFAULT_DCGM_URL = "http://127.0.0.1:9400/metrics"
_PAGE_BYTES = 16 * 2**20

Failure = tuple[tuple[str, str, str], str, str]
"""Identity of a GPU, function, error."""
SourceName = Literal["nvml", "dcgm"]


class Source(Protocol):
    """Gives the state of every GPU."""

    name: SourceName

    def read(self) -> tuple[Gpu, ...]:
        """Every GPU, in order. Returns within about the time limit, whatever the driver does."""

    def failures(self) -> dict[Failure, int]:
        """What went wrong since the start, counted."""


class _Failures:
    """Counts failures of readings; any thread may add."""

    def __init__(self) -> None:
        self._counts: Counter[Failure] = Counter()
        self._lock = threading.Lock()

    def add(self, identity: tuple[str, str, str], function: str, error: str) -> None:
        with self._lock:
            self._counts[identity, function, error] += 1

    def counts(self) -> dict[Failure, int]:
        with self._lock:
            return dict(self._counts)


class NvmlSource:
    """NVML, each GPU in a thread of its own, so that one that hangs does not hide the others."""

    name: SourceName = "nvml"

    def __init__(
        self,
        nvml: Nvml,
        count: int,
        *,
        processes: bool = False,
        limit_seconds: float = LIMIT_SECONDS,
        clock: Clock = time.time,
    ) -> None:
        self._nvml = nvml
        self._activity = MigActivity(nvml)
        self._processes = processes
        self._clock = clock
        self._known: dict[int, Gpu] = {}
        self._failures = _Failures()
        self._calls = [Timed(partial(self._look, index), limit_seconds, f"gpu-{index}") for index in range(count)]

    def read(self) -> tuple[Gpu, ...]:
        """Every GPU; one that does not answer in time is its last answer, marked stale."""
        for call in self._calls:
            call.begin()
        now = self._clock()
        return tuple(self._answer(index, call, now) for index, call in enumerate(self._calls))

    def failures(self) -> dict[Failure, int]:
        """Readings that ought to have worked, counted."""
        return self._failures.counts()

    def _answer(self, index: int, call: Timed[Gpu], now: float) -> Gpu:
        if call.finished() and call.fault is None and call.last is not None:
            return call.last
        return _stale(call.last or Gpu(str(index)), now)

    def _look(self, index: int) -> Gpu:
        try:
            gpu = read_gpu(self._nvml, index, processes=self._processes, activity=self._activity.ratio)
        except Exception as fault:
            self._failures.add((str(index), "", ""), "read", type(fault).__name__)
            raise
        if not gpu.uuid and index in self._known:  # lost: only what was known of it says which it is
            gpu = replace(gpu, uuid=self._known[index].uuid, name=self._known[index].name)
        self._known[index] = gpu
        for function, error in gpu.failures:
            self._failures.add(gpu.identity, function, error)
        return replace(gpu, read_time=self._clock())


class DcgmSource:
    """A DCGM exporter's page. ``fetch`` gives its text, or raises OSError."""

    name: SourceName = "dcgm"

    def __init__(
        self, fetch: Callable[[], str], *, limit_seconds: float = LIMIT_SECONDS, clock: Clock = time.time
    ) -> None:
        self._fetch = fetch
        self._clock = clock
        self._failures = _Failures()
        self._call = Timed(self._look, limit_seconds, "dcgm")

    def read(self) -> tuple[Gpu, ...]:
        """The GPUs of the page; when it cannot be read those of the last one, marked stale."""
        self._call.begin()
        now = self._clock()
        if self._call.finished() and self._call.fault is None:
            return self._call.last or ()
        return tuple(_stale(gpu, now) for gpu in self._call.last or ())

    def failures(self) -> dict[Failure, int]:
        """Pages that could not be read, counted."""
        return self._failures.counts()

    def check(self) -> None:
        """Raises NoGpu when there is no page, or no GPU on it."""
        gpus = self.read()
        if self._call.fault is not None:
            raise NoGpu(f"the DCGM exporter does not answer: {self._call.fault}") from self._call.fault
        if not gpus:
            raise NoGpu("the page has no DCGM series of a GPU, or did not come in time; give the address of /metrics")

    def _look(self) -> tuple[Gpu, ...]:
        try:
            gpus = dcgm.read_page(self._fetch())
        except Exception as fault:
            self._failures.add(("", "", ""), "dcgm", type(fault).__name__)
            raise
        now = self._clock()
        return tuple(replace(gpu, read_time=now) for gpu in gpus)


def _stale(gpu: Gpu, now: float) -> Gpu:
    """The last answer, marked; without values when it is too old."""
    if now - gpu.read_time > STALE_SECONDS:
        gpu = replace(gpu, readings=(), instances=())
    return replace(gpu, stale=True)


def open_nvml(*, processes: bool, limit_seconds: float, nvml: Nvml | None = None) -> NvmlSource:
    """NVML of this machine, started. Raises NoGpu with the cure."""
    asked = nvml or live()
    starting = Timed(asked.start, max(START_SECONDS, limit_seconds), "nvml-start")
    starting.begin()
    if not starting.finished():
        raise NoGpu("the NVIDIA driver does not answer; see whether nvidia-smi hangs, too, and restart the machine")
    if starting.fault is not None:
        raise starting.fault
    return NvmlSource(asked, starting.last or 0, processes=processes, limit_seconds=limit_seconds)


def open_dcgm(url: str, *, limit_seconds: float) -> DcgmSource:
    """The DCGM exporter at an address. Raises NoGpu when it does not answer, SloError when it is no address."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SloError(f"--dcgm-url {url}: not an address; write http://HOST:9400/metrics")
    source = DcgmSource(partial(_page, url, limit_seconds), limit_seconds=limit_seconds)
    source.check()
    return source


def _page(url: str, timeout_seconds: float) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # an exporter is never behind a proxy
    try:
        with opener.open(url, timeout=timeout_seconds) as answer:
            return str(answer.read(_PAGE_BYTES).decode())
    except urllib.error.HTTPError as error:
        error.close()
        raise ConnectionError(f"HTTP status {error.code}") from None
