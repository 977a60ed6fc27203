"""Inputs shared by all tests."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("house", deadline=None)  # a busy machine is no fault
settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the long tests too")
    parser.addoption("--rewrite-golden", action="store_true", help="rewrite the golden files; read the diff afterwards")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="long; runs with ./run test --all"))


def _folder(variable: str, default: Path) -> Path:
    path = Path(os.environ.get(variable, default))
    if not path.is_dir():
        pytest.skip(f"{path} is absent; set {variable} to the folder of the inputs")
    return path


@pytest.fixture(scope="session")
def public_data() -> Path:
    """Public inputs nobody here wrote; read in place, never part of the project."""
    return _folder("VLLM_SLO_PUBLIC_DATA", ROOT.parent / "shared" / "data" / "public")


@pytest.fixture(scope="session")
def captures() -> Path:
    """Recordings of a real vLLM under load, with what the clients saw."""
    return _folder("VLLM_SLO_CAPTURES", ROOT.parent / "shared" / "data" / "captures")


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """An interpreter that has vLLM."""
    python = os.environ.get("VLLM_SLO_VLLM_PYTHON", "")
    if python in ("", "none") or shutil.which(python) is None:
        reason = os.environ.get(
            "VLLM_SLO_VLLM_MISSING", "VLLM_SLO_VLLM_PYTHON names no interpreter; ./run test makes one"
        )
        if os.environ.get("VLLM_SLO_REQUIRE_VLLM") == "1":
            pytest.fail(f"{reason} (VLLM_SLO_REQUIRE_VLLM=1 forbids to skip)")
        pytest.skip(reason)
    return python
