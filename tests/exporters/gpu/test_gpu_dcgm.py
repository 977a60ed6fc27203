"""A DCGM exporter's page comes out under our names and in base units."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from gpu_replaying import DCGM_PAGES, page, samples, source_of
from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.gpu.choice import choose
from vllm_slo.exporters.gpu.dcgm import read_page
from vllm_slo.exporters.gpu.nvml import NoGpu
from vllm_slo.exporters.gpu.sources import STALE_SECONDS, DcgmSource, open_dcgm

MIB = 2**20
PAGES = sorted(path.stem for path in DCGM_PAGES.glob("*.txt"))


def text(name: str) -> str:
    return (DCGM_PAGES / f"{name}.txt").read_text()


def dcgm(name: str) -> DcgmSource:
    return DcgmSource(lambda: text(name), limit_seconds=5.0)


@pytest.fixture
def exporter() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A DCGM exporter's address, and the page that it gives."""
    served = {"/metrics": text("plain").encode()}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in served else 404)
            self.end_headers()
            self.wfile.write(served.get(self.path, b""))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/metrics", served
        http.shutdown()
        thread.join()


def test_units_of_dcgm_become_base_units() -> None:
    found = samples(page(dcgm("plain")), "gpu", "sensor", "domain", "reason", "cause", "error")
    assert found["memory_used_bytes", "0"] == 72872 * MIB
    assert found["memory_reserved_bytes", "1"] == 564 * MIB
    assert found["power_watts", "0"] == 612.345
    assert found["energy_joules_total", "0"] == pytest.approx(123456789.012)
    assert found["utilization_ratio", "0"] == 0.98
    assert found["memory_copy_utilization_ratio", "0"] == pytest.approx(0.41)
    assert found["clock_hertz", "0", "sm"] == 1.98e9
    assert found["temperature_celsius", "0", "memory"] == 63
    assert found["throttle_reason", "0", "sw_power_cap"] == 1
    assert found["throttle_reason", "1", "sw_power_cap"] == 0
    assert found["throttle_seconds_total", "0", "power"] == 7.5
    assert found["ecc_errors_total", "0", "corrected"] == 2
    assert found["pcie_replays_total", "1"] == 4
    assert found["lost", "1"] == 0  # XID 31 is a fault of a program
    assert not any(key[0].startswith("mig_") for key in found)


def test_what_dcgm_marks_as_not_supported_is_absent() -> None:
    assert ("temperature_celsius", "1", "memory") not in samples(page(dcgm("plain")), "gpu", "sensor")


@pytest.mark.parametrize(
    "blank", ["9223372036854775792", "9223372036854775807", "2147483632", "140737488355328.000000"]
)
def test_every_blank_value_of_dcgm_is_absent(blank: str) -> None:
    line = f'DCGM_FI_DEV_POWER_USAGE{{gpu="0",UUID="GPU-1",modelName="H100"}} {blank}\n'
    (gpu,) = read_page(f"# TYPE DCGM_FI_DEV_POWER_USAGE gauge\n{line}")
    assert gpu.readings == ()


def test_the_source_and_the_driver_are_told() -> None:
    found = samples(page(dcgm("plain")), "gpu", "name", "source", "driver_version")
    assert ("info", "0", "NVIDIA H100 80GB HBM3", "dcgm", "535.104.12") in found
    assert ("exporter_info", "dcgm") in found


def test_of_a_mig_page_memory_and_activity_are_the_instances_and_the_rest_the_gpus() -> None:
    found = samples(page(dcgm("mig")), "gpu", "gpu_instance", "profile")
    assert found["mig_memory_used_bytes", "0", "1", "4g.40gb"] == 30448 * MIB
    assert found["mig_memory_free_bytes", "0", "2", "3g.40gb"] == 40000 * MIB
    assert found["mig_utilization_ratio", "0", "2", "3g.40gb"] == 0.125
    assert ("memory_used_bytes", "0") not in found
    assert (found["power_watts", "0"], found["energy_joules_total", "0"], found["mig_enabled", "0"]) == (402.5, 5, 1)
    assert {key[2] for key in found if key[0] == "mig_info"} == {"1", "2"}


def test_a_gpu_that_pods_share_is_told_once_and_a_lost_one_as_lost() -> None:
    shown = page(dcgm("shared_and_lost"))
    assert shown.count("vllm_slo_gpu_power_watts{") == 1
    found = samples(shown, "gpu")
    assert (found["memory_used_bytes", "0"], found["lost", "0"], found["lost", "1"]) == (1024 * MIB, 0, 1)


@pytest.mark.parametrize("name", PAGES)
def test_promtool_has_no_complaint(name: str) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    checked = subprocess.run([promtool, "check", "metrics"], input=page(dcgm(name)), text=True, capture_output=True)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_a_running_exporter_is_read_over_http(exporter: tuple[str, dict[str, bytes]]) -> None:
    source = open_dcgm(exporter[0], limit_seconds=5.0)
    assert [gpu.index for gpu in source.read()] == ["0", "1"]


def test_an_exporter_that_goes_away_leaves_stale_values_for_a_while(exporter: tuple[str, dict[str, bytes]]) -> None:
    now = [1000.0]
    source = DcgmSource(open_dcgm(exporter[0], limit_seconds=5.0)._fetch, limit_seconds=5.0, clock=lambda: now[0])
    source.read()
    exporter[1].clear()
    now[0] += STALE_SECONDS
    found = samples(page(source), "gpu", "error")
    assert (found["stale", "0"], found["read_timestamp_seconds", "0"]) == (1, 1000)
    assert ("power_watts", "0") in found
    now[0] += 1
    later = samples(page(source), "gpu", "error")
    assert ("power_watts", "0") not in later
    assert later["read_errors_total", "", "ConnectionError"] == 2


def test_a_page_without_gpus_and_a_dead_address_are_said(exporter: tuple[str, dict[str, bytes]]) -> None:
    url, served = exporter
    served["/metrics"] = b"go_goroutines 7\n"
    with pytest.raises(NoGpu, match="no DCGM series"):
        open_dcgm(url, limit_seconds=5.0)
    with pytest.raises(NoGpu, match=r"does not answer: .*404"):
        open_dcgm(url + "x", limit_seconds=5.0)
    with pytest.raises(NoGpu, match="does not answer"):
        open_dcgm("http://127.0.0.1:9/metrics", limit_seconds=5.0)
    with pytest.raises(SloError, match="write http://HOST:9400/metrics"):
        open_dcgm("node-a", limit_seconds=5.0)


def test_dcgm_is_preferred_where_it_runs_and_nvml_is_read_where_not(exporter: tuple[str, dict[str, bytes]]) -> None:
    url, served = exporter

    def chosen(*, look_for_dcgm: bool = True, processes: bool = False) -> str:
        source = choose(
            None,
            look_for_dcgm=look_for_dcgm,
            processes=processes,
            nvml=lambda: source_of("a100"),
            default_url=url,
        )
        return source.name

    assert chosen() == "dcgm"
    assert chosen(look_for_dcgm=False) == "nvml"
    assert chosen(processes=True) == "nvml"
    served.clear()
    assert chosen() == "nvml"
