"""The product as a user has it beside vLLM: a wheel, installed without its dependencies, found by its entry points."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from e2e.product import free_port
from e2e.vllm_server import MODEL_NAME, VllmServer, build_model, serve

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("alerts", "analytics", "dashboards", "exporters", "src", "pyproject.toml", "README.md", "LICENSE")

_installed: list[Path] = []


def build_wheel(folder: Path) -> Path:
    """A wheel of this checkout, built from a copy so that nothing is left in it."""
    source = folder / "source"
    source.mkdir(parents=True)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, source / name)
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--no-index")
    _run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(source))
    shutil.rmtree(source)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_product(folder: Path) -> Path:
    """A folder for PYTHONPATH with the product in it; made once a test run, in the folder of who asks first."""
    for known in _installed:
        if known.is_dir():
            return known
    wheel, target = build_wheel(folder / "wheel"), folder / "product"
    options = ("--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", "--target", str(target))
    _run(sys.executable, "-m", "pip", "install", *options, str(wheel))
    _installed.append(target)
    return target


def probe_environment(folder: Path) -> dict[str, str]:
    """What a vLLM server needs to have the probe, with a runtime folder of its own; for ``serve``."""
    product = install_product(folder)
    runtime = folder / "runtime"
    runtime.mkdir(exist_ok=True, mode=0o700)
    return {"PYTHONPATH": str(product), "VLLM_SLO_RUNTIME_DIR": str(runtime), "VLLM_SLO_METRICS_PORT": "0"}


@contextmanager
def serve_with_probe(
    python: str,
    folder: Path,
    *,
    otlp_endpoint: str | None = None,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    site: Sequence[Path] = (),
) -> Iterator[VllmServer]:
    """A vLLM with the probe; ``site`` are further folders in front on PYTHONPATH, its log is ``folder``/vllm.log."""
    settings = {**probe_environment(folder), **(environment or {})}
    settings["PYTHONPATH"] = os.pathsep.join((*map(str, site), settings["PYTHONPATH"]))
    with serve(
        python,
        build_model(python, ROOT / ".cache" / MODEL_NAME),
        folder / "vllm.log",
        port=free_port(),
        otlp_endpoint=otlp_endpoint,
        arguments=arguments,
        environment=settings,
    ) as server:
        yield server


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-3000:]}"
    return done.stdout
