"""What is recorded through the real ``pynvml`` and replayed is read as the same GPUs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pynvml
import pytest

from gpu_driver import Driver, below_pynvml
from gpu_replaying import page, samples
from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.gpu.device import read_gpu
from vllm_slo.exporters.gpu.nvml import Nvml
from vllm_slo.exporters.gpu.reading import Gpu
from vllm_slo.exporters.gpu.recording import Recorder, Replay
from vllm_slo.exporters.gpu.sources import open_nvml

GIB = 2**30


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    with below_pynvml(made, monkeypatch):
        yield made


def test_pynvml_reads_the_driver_and_units_come_out_right(driver: Driver) -> None:
    source = open_nvml(processes=True, limit_seconds=5.0)
    found = samples(page(source), "gpu", "gpu_instance", "sensor", "error", "direction", "cause", "pid")
    assert found["memory_used_bytes", "1"] == 10 * GIB
    assert found["memory_reserved_bytes", "1"] == GIB / 2
    assert found["energy_joules_total", "1"] == pytest.approx(123456.789)
    assert found["power_watts", "0"] == 250.5
    assert found["ecc_errors_total", "0", "corrected"] == 7
    assert ("ecc_errors_total", "0", "uncorrected") not in found
    assert found["temperature_celsius", "0", "memory"] == 81
    assert found["nvlink_bytes_total", "0", "sent"] == 2**50
    assert ("nvlink_bytes_total", "0", "received") not in found
    assert found["throttle_seconds_total", "0", "thermal"] == pytest.approx(3.0)
    assert found["mig_memory_used_bytes", "0", "2"] == 10 * GIB
    assert found["process_memory_used_bytes", "1", "4711"] == 5 * GIB
    assert ("process_memory_used_bytes", "1", "4712") not in found
    assert ("utilization_ratio", "0") not in found  # this driver lacks the function


def test_activity_of_a_mig_instance_is_told_from_the_second_reading_on(driver: Driver) -> None:
    source = open_nvml(processes=False, limit_seconds=5.0)
    assert "mig_utilization_ratio" not in page(source)
    found = samples(page(source), "gpu", "gpu_instance", "profile")
    told = {key[1:]: value for key, value in found.items() if key[0] == "mig_utilization_ratio"}
    assert told == {("0", "1", "3g.40gb"): 0.375, ("0", "2", "4g.40gb"): 0.375}
    for _ in range(10):
        page(source)
    assert driver.samples - driver.freed == 2  # one kept for each instance


def test_a_recording_replayed_is_read_as_the_same_gpus(driver: Driver, tmp_path: Path) -> None:
    driver.lost.add(1)
    recorder = Recorder(pynvml)
    count = recorder.start()
    recorded = [read_gpu(recorder, index, processes=True) for index in range(count)]
    file = tmp_path / "recording.json"
    recorder.save(file, "2026-07-01T00:00:00+00:00")
    nvml = Nvml(Replay.load(file, pynvml))
    assert nvml.start() == count
    assert [read_gpu(nvml, index, processes=True) for index in range(count)] == recorded
    assert recorded[0].readings
    assert recorded[1] == Gpu("1", lost=True)


def test_a_recording_holds_functions_with_values_and_errors_by_name(driver: Driver, tmp_path: Path) -> None:
    recorder = Recorder(pynvml)
    recorder.start()
    read_gpu(recorder, 0)
    recorder.save(tmp_path / "r.json", "now")
    calls = json.loads((tmp_path / "r.json").read_text())["calls"]
    by_name = {(call["function"], *map(str, call["arguments"])): call for call in calls if call["device"] == [0]}
    memory = by_name["nvmlDeviceGetMemoryInfo", "nvmlMemory_v2"]["value"]
    assert (memory["struct"], memory["used"]) == ("c_nvmlMemory_v2_t", 10 * GIB)
    assert by_name["nvmlDeviceGetPowerUsage",]["value"] == 250_500
    assert by_name["nvmlDeviceGetUtilizationRates",]["error"] == "NVML_ERROR_FUNCTION_NOT_FOUND"


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(SloError, match=r"--record .*give a file that can be written"):
        Recorder(pynvml).save(tmp_path / "absent" / "r.json", "now")


def test_a_gpu_that_hangs_is_stale_and_the_other_goes_on(driver: Driver) -> None:
    source = open_nvml(processes=False, limit_seconds=0.5)
    first = source.read()
    driver.hang[1] = 3.0
    well, hanging = source.read()
    assert (well.stale, hanging.stale) == (False, True)
    assert well.read_time > first[0].read_time
    assert hanging == replace(first[1], stale=True)
    found = samples(page(source), "gpu")  # asked again while the first call still hangs: nobody waits twice
    assert (found["stale", "0"], found["stale", "1"]) == (0, 1)
    assert found["memory_used_bytes", "1"] == 10 * GIB
    assert found["read_timestamp_seconds", "1"] == first[1].read_time


def test_a_gpu_that_comes_back_is_found_again(driver: Driver) -> None:
    source = open_nvml(processes=False, limit_seconds=5.0)
    source.read()
    driver.lost.add(1)
    lost = source.read()[1]
    assert (lost.lost, lost.uuid, lost.readings) == (True, "GPU-1001", ())
    driver.lost.clear()
    assert source.read()[1].readings
