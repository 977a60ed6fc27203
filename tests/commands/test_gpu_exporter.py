"""`vllm-slo gpu-exporter` as a program: the page, JSON, recordings, waiting, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pynvml
import pytest

from gpu_driver import Driver, below_pynvml
from gpu_replaying import DCGM_PAGES, samples
from vllm_slo.__main__ import EXTRAS, run

DRIVER_HERE = any(Path("/dev").glob("nvidia[0-9]*"))
no_gpu = pytest.mark.skipif(DRIVER_HERE, reason="this machine has a GPU")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    with below_pynvml(made, monkeypatch):
        yield made


@pytest.fixture
def dcgm() -> Iterator[tuple[str, dict[str, bytes]]]:
    """A DCGM exporter's address, and what it serves."""
    served = {"/metrics": (DCGM_PAGES / "plain.txt").read_bytes()}

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in served else 503)
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


def fetched(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def started(*arguments: str) -> tuple[subprocess.Popen[str], str]:
    """The exporter as a process of its own, and the address that it prints."""
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm_slo", "gpu-exporter", "--listen", "127.0.0.1:0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found is not None
    return process, found[0]


def ended(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> tuple[int, str]:
    process.send_signal(number)
    _, log = process.communicate(timeout=30)
    return process.returncode, log


@no_gpu
@pytest.mark.parametrize("options", [(), ("--once",), ("--json",), ("--record", "r.json")])
def test_without_a_gpu_it_ends_and_says_the_cure(options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpu-exporter", "--dcgm", "off", *options]) == 1
    said = capsys.readouterr()
    assert "no NVIDIA driver here" in said.err
    assert "install the driver" in said.err
    assert said.out == ""


@no_gpu
def test_with_wait_it_serves_a_page_without_gpu_series_and_says_so_once() -> None:
    process, url = started("--dcgm", "off", "--wait")
    found = samples(fetched(url), "source")
    code, log = ended(process)
    assert found == {("exporter_info", "none"): 1, ("exporter_gpus",): 0}
    assert code == 0
    assert log.count("no NVIDIA driver here") == 1


def test_once_prints_the_page(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpu-exporter", "--dcgm", "off", "--once"]) == 0
    found = samples(capsys.readouterr().out, "gpu")
    assert (found["power_watts", "0"], found["exporter_gpus",]) == (250.5, 2)


def test_json_has_every_reading_and_what_is_absent(driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpu-exporter", "--dcgm", "off", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["source"] == "nvml"
    assert {"series": "power_watts", "value": 250.5, "labels": []} in told["gpus"][1]["readings"]
    assert ["utilization_ratio", "NVML_ERROR_FUNCTION_NOT_FOUND"] in told["gpus"][1]["absent"]


def test_a_recording_is_written(driver: Driver, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpus.json"
    assert run(["gpu-exporter", "--record", str(file), "--processes"]) == 0
    calls = json.loads(file.read_text())["calls"]
    assert f"{len(calls)} answers of 2 GPUs are in {file}" in capsys.readouterr().out
    assert any(call["function"] == "nvmlDeviceGetComputeRunningProcesses" for call in calls)


def test_it_serves_what_a_dcgm_exporter_has_and_ends_on_sigterm(dcgm: tuple[str, dict[str, bytes]]) -> None:
    process, url = started("--dcgm-url", dcgm[0])
    found = samples(fetched(url), "gpu", "source")
    code, log = ended(process)
    assert (found["power_watts", "0"], found["exporter_info", "dcgm"]) == (612.345, 1)
    assert code == 0
    assert "GPU 0 NVIDIA H100 80GB HBM3 (GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e50): read from dcgm" in log


def test_with_wait_a_source_that_comes_later_is_found(
    dcgm: tuple[str, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_slo.commands import gpu_exporter

    url, served = dcgm
    page = served.pop("/metrics")
    monkeypatch.setattr(gpu_exporter, "_RETRY_SECONDS", 0.05)
    threading.Timer(0.3, lambda: served.update({"/metrics": page})).start()
    begun = time.monotonic()
    assert run(["gpu-exporter", "--dcgm-url", url, "--wait", "--once"]) == 0
    assert time.monotonic() - begun >= 0.3


def test_an_interrupt_ends_it_well(dcgm: tuple[str, dict[str, bytes]]) -> None:
    process, _ = started("--dcgm-url", dcgm[0])
    assert ended(process, signal.SIGINT)[0] == 0


@pytest.mark.parametrize("listen", ["9454", "localhost", "127.0.0.1:70000", ":9454"])
def test_an_address_that_is_none_is_refused(listen: str, driver: Driver, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["gpu-exporter", "--dcgm", "off", "--listen", listen]) == 1
    assert "write HOST:PORT, such as 127.0.0.1:9454" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(
    dcgm: tuple[str, dict[str, bytes]], driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = dcgm[0].removeprefix("http://").removesuffix("/metrics")
    assert run(["gpu-exporter", "--dcgm", "off", "--listen", taken]) == 1
    assert f"--listen {taken}: Address already in use; give another HOST:PORT" in capsys.readouterr().err


def test_the_extra_that_installs_the_binding_is_named() -> None:
    assert EXTRAS[pynvml.__name__] == "gpu"


def test_it_needs_no_more_than_its_extra_brings() -> None:
    heavy = "{'duckdb', 'deltalake', 'pyarrow', 'pydantic', 'httpx', 'numpy', 'rich', 'orjson', 'yaml', 'streamlit'}"
    script = (
        "import sys\n"
        f"for name in {heavy}: sys.modules[name] = None\n"
        "from vllm_slo.__main__ import run\n"
        "sys.exit(run(['gpu-exporter', '--dcgm-url', 'http://127.0.0.1:9/metrics', '--once']))"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ran.returncode, "the DCGM exporter does not answer" in ran.stderr) == (1, True)
