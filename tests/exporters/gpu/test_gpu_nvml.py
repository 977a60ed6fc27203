"""Recorded GPUs come out in base units; what they do not support is absent; one lost GPU does not hide the others."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
from collections.abc import Iterator
from typing import Any

import pynvml
import pytest

from gpu_replaying import RECORDINGS, page, replayed, samples, source_of
from vllm_slo.exporters.gpu.device import ABSENT, read_gpu
from vllm_slo.exporters.gpu.nvml import NoGpu, Nvml, Refused
from vllm_slo.exporters.gpu.recording import Replay
from vllm_slo.exporters.gpu.series import BY_NAME, COMPARED, REASONS, SERIES, Ask, Constant

GIB = 2**30


def asks() -> Iterator[Ask]:
    for series in SERIES:
        waiting = list(series.nvml)
        while waiting:
            ask = waiting.pop()
            yield ask
            waiting += [ask.otherwise] if ask.otherwise else []


def names_in(arguments: tuple[Constant, ...]) -> Iterator[str]:
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from names_in(argument)
        elif isinstance(argument, str):
            yield argument


def test_every_function_and_constant_of_the_table_is_in_pynvml_and_takes_these_arguments() -> None:
    for ask in asks():
        if ask.function == COMPARED:
            continue
        inspect.signature(getattr(pynvml, ask.function)).bind("handle", *ask.arguments)
        if ask.within:
            inspect.signature(getattr(pynvml, ask.within)).bind("handle")
        assert all(isinstance(getattr(pynvml, name), int) for name in names_in(ask.arguments))


def test_bits_of_throttle_reasons_are_those_of_pynvml() -> None:
    for _, bit, name in REASONS:
        assert getattr(pynvml, f"nvmlClocksEventReason{name}") == bit
        assert getattr(pynvml, f"nvmlClocksThrottleReason{name}") == bit


def test_errors_that_mean_absent_are_errors_of_pynvml() -> None:
    assert {name for name in ABSENT if hasattr(pynvml, name)} == ABSENT


def test_names_end_in_base_units_and_labels_fit_the_values() -> None:
    for series in SERIES:
        assert series.name.endswith("_total") == (series.kind == "counter")
        assert not any(word in series.name for word in ("percent", "milli", "mib", "mhz"))
        assert all(len(ask.labels) == len(series.labels) for ask in series.nvml if series.scope != "process")
        assert all(len(wanted.labels) == len(series.labels) for wanted in series.dcgm)


def test_an_a100_is_told_in_base_units() -> None:
    found = samples(page(source_of("a100")), "sensor", "domain", "reason", "cause", "error", "direction")
    assert found["memory_total_bytes",] == 85899345920
    assert found["memory_used_bytes",] == 64 * GIB + 123 * 2**20
    assert found["memory_reserved_bytes",] == 611057664
    assert found["memory_free_bytes",] == 85899345920 - 611057664 - (64 * GIB + 123 * 2**20)
    assert found["utilization_ratio",] == 0.97
    assert found["memory_copy_utilization_ratio",] == 0.43
    assert found["power_watts",] == pytest.approx(312.456)
    assert found["power_limit_watts",] == 400
    assert found["energy_joules_total",] == pytest.approx(987654321.012, abs=1e-3)
    assert (found["temperature_celsius", "gpu"], found["temperature_celsius", "memory"]) == (61, 74)
    assert (found["clock_hertz", "sm"], found["clock_max_hertz", "sm"]) == (1.29e9, 1.41e9)
    assert found["clock_hertz", "memory"] == 1.593e9
    assert {key[1] for key, value in found.items() if key[0] == "throttle_reason" and value} == {"sw_power_cap"}
    assert found["throttle_seconds_total", "power"] == pytest.approx(12.345678901)
    assert (found["ecc_errors_total", "corrected"], found["ecc_errors_total", "uncorrected"]) == (3, 0)
    assert found["pcie_replays_total",] == 2
    assert found["nvlink_bytes_total", "sent"] == 123456 * 1024
    assert found["mig_enabled",] == 0
    assert (found["lost",], found["stale",]) == (0, 0)
    assert not any(key[0].startswith(("mig_memory", "mig_info", "pcie_bytes", "process")) for key in found)


def test_mig_instances_have_their_profile_and_their_memory_once() -> None:
    found = samples(page(source_of("h100_mig")), "gpu", "gpu_instance", "profile", "compute_instance")
    used = {key[1:]: value / GIB for key, value in found.items() if key[0] == "mig_memory_used_bytes"}
    assert used == {("0", "0", "7g.80gb"): 60, ("1", "1", "4g.40gb"): 10, ("1", "2", "3g.40gb"): 32}
    told = {key[1:] for key in found if key[0] == "mig_info"}
    assert told == {
        ("0", "0", "7g.80gb", "0"),
        ("1", "1", "4g.40gb", "0"),
        ("1", "2", "3g.40gb", "0"),
        ("1", "2", "3g.40gb", "1"),
    }
    assert found["mig_enabled", "1"] == 1
    assert not any(key[0] == "utilization_ratio" for key in found)
    assert found["power_watts", "1"] == pytest.approx(601.25)


def test_what_a_consumer_card_does_not_support_is_absent_and_named() -> None:
    source = source_of("consumer")
    found = samples(page(source))
    (gpu,) = source.read()
    for name in ("energy_joules_total", "ecc_errors_total", "ecc_enabled", "mig_enabled", "throttle_seconds_total"):
        assert (name,) not in found
        assert any(absent.startswith(name) for absent, _ in gpu.absent)
    assert ("temperature_celsius{memory}", "NVML_ERROR_NOT_SUPPORTED") in gpu.absent
    assert gpu.failures == ()
    assert found["power_watts",] == pytest.approx(61.234)


def test_only_reasons_that_the_gpu_can_give_are_told() -> None:
    reasons = {key[1] for key in samples(page(source_of("consumer")), "reason") if key[0] == "throttle_reason"}
    assert reasons == {label for label, bit, _ in REASONS if bit & 0xFF}


def test_a_lost_gpu_is_told_as_lost_and_the_others_go_on() -> None:
    found = samples(page(source_of("lost")), "gpu", "uuid")
    lost = {key[1]: value for key, value in found.items() if key[0] == "lost"}
    assert lost == {"0": 0, "1": 1, "2": 1}
    assert {key[1] for key in found if key[0] == "power_watts"} == {"0"}
    assert ("lost", "2", "GPU-5a1e7c3b-0000-4000-8000-00000000a102") in found
    assert not any(key[0] == "read_errors_total" for key in found)


def test_an_older_driver_is_asked_in_its_own_way() -> None:
    source = source_of("old_driver")
    found = samples(page(source), "reason", "function", "error")
    assert (found["memory_used_bytes",], ("memory_reserved_bytes",) in found) == (GIB, False)
    set_now = {key[1] for key, value in found.items() if key[0] == "throttle_reason" and value}
    assert set_now == {"sw_power_cap", "sw_thermal_slowdown"}
    assert ("throttle_seconds_total{power}", "NVML_ERROR_NO_PERMISSION") in source.read()[0].absent


def test_a_function_that_ought_to_work_and_fails_is_counted_and_costs_its_series_only() -> None:
    source = source_of("old_driver")
    page(source)
    found = samples(page(source), "function", "error")
    assert found["read_errors_total", "nvmlDeviceGetTotalEnergyConsumption", "NVML_ERROR_UNKNOWN"] == 2
    assert ("energy_joules_total",) not in found
    assert ("power_watts",) in found


def test_memory_of_processes_is_told_on_request_only() -> None:
    assert "process_memory" not in page(source_of("a100"))
    found = samples(page(source_of("a100", processes=True)), "pid")
    assert {key[1]: value for key, value in found.items() if "process" in key[0]} == {"4711": 64 * GIB}
    shared = samples(page(source_of("h100_mig", processes=True)), "gpu", "pid")
    assert shared["process_memory_used_bytes", "1", "99"] == 12 * GIB


@pytest.mark.parametrize("name", RECORDINGS)
def test_promtool_has_no_complaint(name: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=page(source_of(name, processes=True)), text=True, capture_output=True
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_reading_is_of_the_table_and_plausible(name: str) -> None:
    for gpu in source_of(name, processes=True).read():
        for reading in gpu.readings:
            series = BY_NAME[reading.series]
            assert len(gpu.identity) + len(reading.labels) == len(series.all_labels)
            assert reading.value >= 0
            assert not series.name.endswith("_ratio") or reading.value <= 1
        of = [(reading.series, reading.labels) for reading in gpu.readings]
        assert len(of) == len(set(of))


def test_a_recording_with_a_wrong_field_fails() -> None:
    recording = json.loads(RECORDINGS["a100"].read_text())
    for call in recording["calls"]:
        if call["function"] == "nvmlDeviceGetMemoryInfo":
            call["value"]["occupied"] = 1
    nvml = Nvml(Replay(recording, pynvml))
    nvml.start()
    with pytest.raises(AttributeError, match="c_nvmlMemory_v2_t has no field occupied"):
        read_gpu(nvml, 0)


def test_a_function_that_pynvml_does_not_have_is_refused_and_wrong_arguments_are_an_error() -> None:
    nvml = replayed("a100")
    nvml.start()
    with pytest.raises(Refused, match="FUNCTION_NOT_FOUND"):
        nvml.ask((), "nvmlDeviceGetHappiness")
    with pytest.raises(TypeError):
        nvml.ask((), "nvmlDeviceGetCount", (1, 2, 3))
    with pytest.raises(AttributeError):
        nvml.ask((), "nvmlDeviceGetCount", ("NVML_NO_SUCH_CONSTANT",))


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("NVML_ERROR_LIBRARY_NOT_FOUND", "no NVIDIA driver here .*; install the driver"),
        ("NVML_ERROR_DRIVER_NOT_LOADED", "not loaded; load it"),
        ("NVML_ERROR_LIB_RM_VERSION_MISMATCH", "restart the machine"),
        ("NVML_ERROR_NO_PERMISSION", "access to /dev/nvidia"),
        ("NVML_ERROR_UNKNOWN", "NVML cannot start: NVML_ERROR_UNKNOWN; see whether nvidia-smi works"),
    ],
)
def test_a_driver_that_does_not_start_is_said_with_the_cure(error: str, said: str) -> None:
    call: dict[str, Any] = {"device": [], "function": "nvmlInit", "arguments": [], "error": error}
    with pytest.raises(NoGpu, match=said):
        Nvml(Replay({"calls": [call]}, pynvml)).start()


def test_a_driver_without_a_gpu_is_no_gpu() -> None:
    calls = [
        {"device": [], "function": "nvmlInit", "arguments": [], "value": None},
        {"device": [], "function": "nvmlDeviceGetCount", "arguments": [], "value": 0},
    ]
    with pytest.raises(NoGpu, match="has no GPU"):
        Nvml(Replay({"calls": calls}, pynvml)).start()


def test_this_machine_without_a_driver_is_told_by_pynvml_itself() -> None:
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        if error.value != pynvml.NVML_ERROR_LIBRARY_NOT_FOUND:
            pytest.skip(f"this machine has a driver: {error}")
    else:
        pytest.skip("this machine has a GPU")
    with pytest.raises(NoGpu, match=r"libnvidia-ml\.so\.1 is not found"):
        Nvml(pynvml).start()
