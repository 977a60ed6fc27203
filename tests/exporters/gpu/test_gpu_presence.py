"""Whoever asks whether there is a GPU is told in time, and why not."""

from __future__ import annotations

import threading
import time

import pynvml

from gpu_replaying import replayed
from vllm_slo.exporters.gpu.nvml import Nvml
from vllm_slo.exporters.gpu.presence import Presence, presence
from vllm_slo.exporters.gpu.recording import Replay


def test_gpus_are_counted() -> None:
    assert presence(lambda: replayed("h100_mig")) == Presence(2)


def test_without_a_driver_the_reason_has_the_cure() -> None:
    call = {"device": [], "function": "nvmlInit", "arguments": [], "error": "NVML_ERROR_DRIVER_NOT_LOADED"}
    found = presence(lambda: Nvml(Replay({"calls": [call]}, pynvml)))
    assert (found.gpus, "load it (modprobe nvidia)" in found.reason) == (0, True)


def test_without_the_module_the_extra_is_named() -> None:
    def absent() -> Nvml:
        raise ModuleNotFoundError("No module named 'pynvml'", name="pynvml")

    assert presence(absent) == Presence(0, "the module pynvml is not installed; pip install 'vllm-slo[gpu]'")


def test_an_unexpected_fault_is_told_and_not_raised() -> None:
    assert presence(lambda: 1 / 0).reason.startswith("NVML failed: ZeroDivisionError")  # type: ignore[arg-type, return-value]


def test_a_driver_that_hangs_is_waited_for_no_longer_than_the_limit() -> None:
    release = threading.Event()

    def hanging() -> Nvml:
        release.wait(10)
        return replayed("a100")

    begun = time.monotonic()
    found = presence(hanging, limit_seconds=0.2)
    release.set()
    assert time.monotonic() - begun < 5
    assert (found.gpus, "does not answer" in found.reason) == (0, True)
