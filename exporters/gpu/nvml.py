"""The edge to NVIDIA's driver: asks ``pynvml``, or what stands in for it, and says refusals by their names."""

from __future__ import annotations

from typing import Any

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.gpu.series import Constant

Address = tuple[int, ...]
"""``()`` is the driver, ``(2,)`` the GPU with index 2, ``(2, 0)`` the first MIG device of that GPU."""

DRIVER: Address = ()
GPU_HANDLE = "nvmlDeviceGetHandleByIndex"
MIG_HANDLE = "nvmlDeviceGetMigDeviceHandleByIndex"
_UNKNOWN_FUNCTION = "NVML_ERROR_FUNCTION_NOT_FOUND"


class Refused(Exception):
    """NVML did not answer; ``error`` is its own name for why: ``NVML_ERROR_NOT_SUPPORTED``."""

    def __init__(self, error: str) -> None:
        super().__init__(error)
        self.error = error


class NoGpu(SloError):
    """There is no GPU to read; the message ends with the cure."""


CURES: dict[str, str] = {
    "NVML_ERROR_LIBRARY_NOT_FOUND": "no NVIDIA driver here (libnvidia-ml.so.1 is not found); install the driver, or "
    "give the container the GPUs (docker run --gpus all); a DCGM exporter elsewhere is read with --dcgm-url",
    "NVML_ERROR_DRIVER_NOT_LOADED": "the NVIDIA driver is installed but not loaded; load it (modprobe nvidia) and look "
    "at `dmesg | grep NVRM`",
    "NVML_ERROR_LIB_RM_VERSION_MISMATCH": "the NVIDIA library and the loaded kernel module have different versions; "
    "after an upgrade of the driver restart the machine",
    "NVML_ERROR_NO_PERMISSION": "the NVIDIA devices may not be opened; give this user access to /dev/nvidia*",
}
"""Why NVML cannot start -> what is wrong, and the cure."""


class Nvml:
    """NVML through ``binding``: the module ``pynvml``, or an object with the same functions and constants."""

    def __init__(self, binding: Any) -> None:
        self._binding = binding
        self._handles: dict[Address, Any] = {}
        self._names = {
            value: name
            for name in dir(binding)
            if name.startswith("NVML_ERROR_") and isinstance(value := getattr(binding, name), int)
        }

    def start(self) -> int:
        """Open the driver and return how many GPUs it has. Raises NoGpu."""
        try:
            self.ask(DRIVER, "nvmlInit")
            count = int(self.ask(DRIVER, "nvmlDeviceGetCount"))
        except Refused as refusal:
            told = CURES.get(refusal.error, f"NVML cannot start: {refusal.error}; see whether nvidia-smi works")
            raise NoGpu(told) from refusal
        if not count:
            raise NoGpu("the NVIDIA driver runs and has no GPU; see whether nvidia-smi lists one")
        return count

    def open(self, address: Address) -> None:
        """Look the device up anew, so that one that came back is found. Raises Refused."""
        *parent, index = address
        asked = (MIG_HANDLE, self.handle(tuple(parent))) if parent else (GPU_HANDLE,)
        self._handles[address] = self.call(*asked, index)

    def ask(self, address: Address, function: str, arguments: tuple[Constant, ...] = ()) -> Any:
        """The result of one function for one device, as ``pynvml`` gives it. Raises Refused."""
        handle = (self.handle(address),) if address else ()
        return self.call(function, *handle, *map(self.constant, arguments))

    def handle(self, address: Address) -> Any:
        """The handle of a device that was opened."""
        return self._handles[address]

    def constant(self, written: Constant) -> Any:
        """The value behind a constant's name; lists for tuples, anything else as it is."""
        if isinstance(written, tuple):
            return [self.constant(each) for each in written]
        return getattr(self._binding, written) if isinstance(written, str) else written

    def error_name(self, code: int) -> str:
        """NVML's own name of a return code."""
        return self._names.get(code, f"NVML_ERROR_{code}")

    def call(self, function: str, *arguments: Any) -> Any:
        """The result of one function for arguments as they are. Raises Refused."""
        called = getattr(self._binding, function, None)
        if called is None:
            raise Refused(_UNKNOWN_FUNCTION)  # an older pynvml
        try:
            return called(*arguments)
        except self._binding.NVMLError as error:
            raise Refused(self.error_name(error.value)) from error
        except self._binding.NVMLLibraryMismatchError as error:
            raise Refused(_UNKNOWN_FUNCTION) from error


def live() -> Nvml:
    """NVML of this machine, not started. ``pynvml`` is in the extra ``gpu``. Raises ModuleNotFoundError."""
    import pynvml

    return Nvml(pynvml)
