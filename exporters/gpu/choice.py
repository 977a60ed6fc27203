"""Which source is read: a DCGM exporter where one runs, else NVML. Chosen once, so that counters do not jump."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from vllm_slo.exporters.gpu.nvml import NoGpu
from vllm_slo.exporters.gpu.sources import DEFAULT_DCGM_URL, LIMIT_SECONDS, Source, open_dcgm, open_nvml


def choose(
    dcgm_url: str | None,
    *,
    look_for_dcgm: bool,
    processes: bool = False,
    limit_seconds: float = LIMIT_SECONDS,
    nvml: Callable[[], Source] | None = None,
    default_url: str = DEFAULT_DCGM_URL,
) -> Source:
    """The source that works now. Raises NoGpu with the cure.

    An address of a DCGM exporter leaves no choice. Processes are told by NVML only, so they leave DCGM out.
    """
    if dcgm_url is not None:
        return open_dcgm(dcgm_url, limit_seconds=limit_seconds)
    if look_for_dcgm and not processes:
        with contextlib.suppress(NoGpu):
            return open_dcgm(default_url, limit_seconds=limit_seconds)
    return nvml() if nvml is not None else open_nvml(processes=processes, limit_seconds=limit_seconds)
