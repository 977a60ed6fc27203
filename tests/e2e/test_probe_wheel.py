"""The wheel that goes beside vLLM: whole, and it brings nothing along."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from e2e.probe_server import ROOT, build_wheel, probe_environment
from vllm_slo.exporters.probe import ids

PACKAGES = ("alerts", "analytics", "dashboards", "exporters")
DATA = (".sql", ".yaml", ".json", ".gz", ".css", ".typed")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_every_module_and_data_file_of_the_packages(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = [
        (path, Path("vllm_slo") / package / path.relative_to(ROOT / package))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
    ]
    own = ROOT / "src" / "vllm_slo"
    sources += [(path, Path("vllm_slo") / path.relative_to(own)) for path in own.rglob("*")]
    wanted = {
        place.as_posix()
        for path, place in sources
        if path.is_file() and path.suffix in (".py", *DATA) and "__pycache__" not in path.parts
    }
    assert len(wanted) > 100
    assert not wanted - names, "files that a user would miss"
    (entry_points,) = (name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entry_points).decode()
    assert "[vllm.general_plugins]" in text
    assert "[vllm.stat_logger_plugins]" in text


def test_installing_it_with_its_dependencies_beside_vllm_brings_nothing_else(wheel: Path, vllm_python: str) -> None:
    # Without an index: pip would fail on anything that vLLM's environment lacks.
    command = [vllm_python, "-m", "pip", "install", "--dry-run", "--no-index", "--quiet", "--report", "-", str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [each["metadata"]["name"] for each in json.loads(done.stdout)["install"]] == ["vllm-slo"]


def test_what_vllm_imports_of_it_needs_nothing_but_opentelemetry_and_the_prometheus_client(
    vllm_python: str, tmp_path: Path
) -> None:
    code = """
import sys, pkgutil, importlib
import vllm_slo.exporters.probe as probe
heavy = "click deltalake duckdb grpc httpx numpy plotly psutil pyarrow pydantic starlette streamlit torch".split()
for module in pkgutil.iter_modules(probe.__path__):
    if module.name not in ("stat_logger",):  # subclasses a class of vLLM
        importlib.import_module(f"vllm_slo.exporters.probe.{module.name}")
print(sorted(set(heavy) & set(sys.modules)), [name for name in sys.modules if name.split(".")[0] == "vllm"])
"""
    environment = {"PYTHONPATH": probe_environment(tmp_path)["PYTHONPATH"], "PATH": "/usr/bin:/bin"}
    done = subprocess.run([vllm_python, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "[] []"


@pytest.mark.parametrize("module", ["vllm_slo.exporters.probe.settings", "vllm_slo.exporters.probe.outbox"])
def test_importing_the_probe_starts_nothing(module: str) -> None:
    code = f"import threading, atexit, {module}; print(threading.active_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "1", done.stderr


_VLLM = """
from types import SimpleNamespace
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.sampling_params import SamplingParams
for external in ("cmpl-abc-0", "chatcmpl-x", "7", "cmpl-3_4-0"):
    request = SimpleNamespace(request_id=external, external_req_id=None, params=SamplingParams(n=2))
    InputProcessor.assign_request_id(request)
    print(external, request.request_id, ParentRequest(request).get_child_info(1)[0])
"""


def test_internal_ids_that_vllm_itself_makes_give_the_external_ones(vllm_python: str) -> None:
    done = subprocess.run([vllm_python, "-c", _VLLM], capture_output=True, text=True, timeout=120)
    made = [line.split() for line in done.stdout.splitlines() if len(line.split()) == 3]
    assert len(made) == 4, done.stderr[-2000:]
    for external, internal, child in made:
        assert internal != external
        assert ids.external_id(internal) == ids.external_id(child) == external
        assert (ids.child_index(internal), ids.child_index(child)) == (None, 1)
