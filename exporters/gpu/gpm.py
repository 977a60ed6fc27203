"""How busy a MIG instance was: NVML tells it by comparing two samples of its counters, from Hopper on ("GPM")."""

from __future__ import annotations

from typing import Any

from vllm_slo.exporters.gpu.nvml import DRIVER, Address, Nvml, Refused

_PERCENT = 100


class MigActivity:
    """Keeps the last sample of every MIG instance; one thread a GPU may use it."""

    def __init__(self, nvml: Nvml) -> None:
        self._nvml = nvml
        self._last: dict[tuple[int, int], Any] = {}

    def ratio(self, gpu: int, gpu_instance: int) -> float | None:
        """The share of the time since the last call in which the instance computed.

        None at the first call. Raises Refused, also where the GPU does not tell it.
        """
        address: Address = (gpu,)
        key = (gpu, gpu_instance)
        if not self._nvml.ask(address, "nvmlGpmQueryDeviceSupport").isSupportedDevice:
            raise Refused("NVML_ERROR_NOT_SUPPORTED")
        sample = self._nvml.ask(DRIVER, "nvmlGpmSampleAlloc")
        before = self._last.pop(key, None)
        try:
            self._nvml.call("nvmlGpmMigSampleGet", self._nvml.handle(address), gpu_instance, sample)
        except Refused:
            for unused in (sample, before):
                if unused is not None:
                    self._nvml.call("nvmlGpmSampleFree", unused)
            raise
        self._last[key] = sample
        if before is None:
            return None
        try:
            return self._between(before, sample)
        finally:
            self._nvml.call("nvmlGpmSampleFree", before)

    def _between(self, before: Any, after: Any) -> float | None:
        compared = self._nvml.constant("c_nvmlGpmMetricsGet_t")()
        compared.version = self._nvml.constant("NVML_GPM_METRICS_GET_VERSION")
        compared.numMetrics = 1
        compared.sample1, compared.sample2 = before, after
        compared.metrics[0].metricId = self._nvml.constant("NVML_GPM_METRIC_GRAPHICS_UTIL")
        self._nvml.call("nvmlGpmMetricsGet", compared)
        metric = compared.metrics[0]
        return None if metric.nvmlReturn else float(metric.value) / _PERCENT
