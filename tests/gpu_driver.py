"""The driver's library below ``pynvml``: functions that write into the memory that its real bindings hand them.

So ``pynvml``'s own code, its structures and its errors run in the test; only the shared library is made up.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pynvml
import pytest

Function = Callable[..., int]


@dataclass
class Driver:
    """Two H100: the first is cut into a 3g.40gb and a 4g.40gb. ``hang`` holds the calls of those GPUs."""

    hang: dict[int, float] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    samples: int = 0
    freed: int = 0

    def nvmlInitWithFlags(self, flags: int) -> int:
        return int(pynvml.NVML_SUCCESS)

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlSystemGetDriverVersion(self, text: Any, size: Any) -> int:
        text.value = b"570.86.15"
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        if index.value in self.lost:
            return int(pynvml.NVML_ERROR_GPU_IS_LOST)
        time.sleep(self.hang.get(index.value, 0))
        return _point(handle, 0x1000 + index.value)

    def nvmlDeviceGetName(self, handle: Any, text: Any, size: Any) -> int:
        profile = {0x2000: b" MIG 3g.40gb", 0x2001: b" MIG 4g.40gb"}.get(_address(handle), b"")
        text.value = b"NVIDIA H100 80GB HBM3" + profile
        return 0

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:
        text.value = b"%s-%x" % (b"MIG" if _address(handle) >= 0x2000 else b"GPU", _address(handle))
        return 0

    def nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> int:
        told = memory._obj
        if told.version != pynvml.nvmlMemory_v2:
            return int(pynvml.NVML_ERROR_ARGUMENT_VERSION_MISMATCH)
        told.total, told.reserved, told.used = 80 * 2**30, 2**29, 10 * 2**30
        told.free = told.total - told.reserved - told.used
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: Any, energy: Any) -> int:
        energy._obj.value = 123_456_789
        return 0

    def nvmlDeviceGetPowerUsage(self, handle: Any, power: Any) -> int:
        power._obj.value = 250_500
        return 0

    def nvmlDeviceGetTotalEccErrors(self, handle: Any, error: Any, counter: Any, count: Any) -> int:
        if (error.value, counter.value) == (pynvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, pynvml.NVML_VOLATILE_ECC):
            count._obj.value = 7
            return 0
        return int(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlDeviceGetFieldValues(self, handle: Any, number: Any, values: Any) -> int:
        for asked in values._obj:
            if (asked.fieldId, asked.scopeId) == (pynvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, 0xFFFFFFFF):
                asked.valueType, asked.value.ullVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, 2**40
            elif asked.fieldId == pynvml.NVML_FI_DEV_MEMORY_TEMP:
                asked.valueType, asked.value.uiVal = pynvml.NVML_VALUE_TYPE_UNSIGNED_INT, 81
            else:
                asked.nvmlReturn = pynvml.NVML_ERROR_NOT_SUPPORTED
        return 0

    def nvmlDeviceGetViolationStatus(self, handle: Any, policy: Any, told: Any) -> int:
        told._obj.violationTime = 1_500_000_000 * (policy.value + 1)
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        current._obj.value = pending._obj.value = int(_address(handle) == 0x1000)
        return 0

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: Any, count: Any) -> int:
        count._obj.value = 7
        return 0

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: Any, instance: Any) -> int:
        if index.value > 1:
            return int(pynvml.NVML_ERROR_NOT_FOUND)
        return _point(instance, 0x2000 + index.value)

    def nvmlDeviceGetGpuInstanceId(self, handle: Any, number: Any) -> int:
        number._obj.value = _address(handle) - 0x2000 + 1
        return 0

    def nvmlDeviceGetComputeInstanceId(self, handle: Any, number: Any) -> int:
        number._obj.value = 0
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, processes: Any) -> int:
        if processes is None:
            count._obj.value = 2
            return int(pynvml.NVML_ERROR_INSUFFICIENT_SIZE)
        count._obj.value = 2
        processes[0].pid, processes[0].usedGpuMemory = 4711, 5 * 2**30
        processes[1].pid, processes[1].usedGpuMemory = 4712, 2**64 - 1  # NVML: not available
        return 0

    def nvmlGpmQueryDeviceSupport(self, handle: Any, support: Any) -> int:
        support._obj.isSupportedDevice = 1
        return 0

    def nvmlGpmSampleAlloc(self, sample: Any) -> int:
        self.samples += 1
        return _point(sample, 0x3000 + self.samples)

    def nvmlGpmSampleFree(self, sample: Any) -> int:
        self.freed += 1
        return 0

    def nvmlGpmMigSampleGet(self, handle: Any, gpu_instance: int, sample: Any) -> int:
        return 0 if _address(handle) == 0x1000 else int(pynvml.NVML_ERROR_NOT_SUPPORTED)

    def nvmlGpmMetricsGet(self, wanted: Any) -> int:
        told = wanted._obj
        if told.version != 1 or told.numMetrics != 1 or _address(told.sample1) >= _address(told.sample2):
            return int(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        told.metrics[0].value = 37.5 if told.metrics[0].metricId == pynvml.NVML_GPM_METRIC_GRAPHICS_UTIL else 99
        return 0


def _point(pointer: Any, address: int) -> int:
    """Make what ``byref`` names point to an address."""
    ctypes.cast(ctypes.byref(pointer._obj), ctypes.POINTER(ctypes.c_void_p))[0] = address
    return 0


def _address(pointer: Any) -> int:
    return ctypes.cast(pointer, ctypes.c_void_p).value or 0


@contextmanager
def below_pynvml(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """``pynvml`` finds this driver instead of loading the machine's library."""
    with monkeypatch.context() as patch:
        patch.setattr(pynvml, "nvmlLib", driver)
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        yield
