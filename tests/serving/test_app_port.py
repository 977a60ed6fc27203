"""A port that something else has: nobody is sent to the pages of another lake."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("streamlit")


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on the loopback that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


def ended(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "vllm_slo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=60, check=False)


def test_up_does_not_start_and_makes_no_lake(tmp_path: Path, taken: int) -> None:
    done = ended(tmp_path, "up", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--app-port", str(taken))
    assert done.returncode == 1
    assert f"--app-port {taken}: 127.0.0.1:{taken} cannot be had" in done.stderr
    assert "give --app-port 0 or another port" in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "lake").exists()


def test_the_demo_does_not_take_another_than_the_one_asked_for(tmp_path: Path, taken: int) -> None:
    done = ended(tmp_path, "demo", "--no-browser", "--lake", "demo", "--port", str(taken))
    assert done.returncode == 1
    assert f"--port {taken}: 127.0.0.1:{taken} cannot be had" in done.stderr
    assert "pages" not in done.stdout
