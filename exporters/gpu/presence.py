"""Whether this machine has a GPU that can be read, for whoever wants to say why GPU series are absent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from vllm_slo.exporters.gpu.nvml import NoGpu, Nvml, live
from vllm_slo.exporters.gpu.timed import Timed

_MISSING = "the module pynvml is not installed; pip install 'vllm-slo[gpu]'"
_HANGS = "the NVIDIA driver does not answer; see whether nvidia-smi hangs, too"


@dataclass(frozen=True)
class Presence:
    """How many GPUs this machine has. With none, ``reason`` says why their series are absent, and the cure."""

    gpus: int
    reason: str = ""


def presence(nvml: Callable[[], Nvml] = live, limit_seconds: float = 5.0) -> Presence:
    """The GPUs that NVML finds on this machine. Never raises, and returns within the limit."""
    counting = Timed(lambda: nvml().start(), limit_seconds, "nvml-presence")
    counting.begin()
    if not counting.finished():
        return Presence(0, _HANGS)
    fault = counting.fault
    if fault is None:
        return Presence(counting.last or 0)
    if isinstance(fault, ModuleNotFoundError):
        return Presence(0, _MISSING)
    return Presence(0, str(fault) if isinstance(fault, NoGpu) else f"NVML failed: {type(fault).__name__}: {fault}")
