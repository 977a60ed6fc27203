"""One running system for all end-to-end tests: `vllm-slo up` and a real vLLM that sends to it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from e2e.product import Up, free_port, query, wait_until
from e2e.vllm_server import MODEL_NAME, VllmServer, build_model, serve

ROOT = Path(__file__).resolve().parent.parent.parent
INSTANCE = "general-0"
SHARD = "general"


def _missing(what: str, require: str) -> None:
    """Skips with the reason, or fails where nothing may be skipped."""
    if os.environ.get(require) == "1":
        pytest.fail(f"{what} ({require}=1 forbids to skip)")
    pytest.skip(what)


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        _missing("no Chromium; apt-get install chromium", "VLLM_SLO_REQUIRE_BROWSER")
    assert path is not None
    return path


@dataclass(frozen=True)
class System:
    """The receiver with its lake, and the server that sends to it."""

    up: Up
    server: VllmServer
    lake: Path


@pytest.fixture(scope="session")
def system(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """Receiver first, then vLLM: also the spans of its start arrive."""
    folder = tmp_path_factory.mktemp("system")
    model = build_model(vllm_python, ROOT / ".cache" / MODEL_NAME)
    lake, port = folder / "lake", free_port()
    up = Up(lake, folder / "up.log", "--scrape", f"http://127.0.0.1:{port}/metrics={INSTANCE}")
    with up.running():
        endpoint = f"grpc://127.0.0.1:{up.grpc_port}"
        log = folder / "vllm.log"
        with serve(
            vllm_python, model, log, port=port, otlp_endpoint=endpoint, instance=INSTANCE, shard=SHARD
        ) as server:
            wait_until(lambda: query(lake, "select 1 from engine_samples limit 1"), "no sample of the idle server came")
            yield System(up, server, lake)
