"""The command line as its users run it: a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from vllm_slo.serving.app import command


def vllm_slo(lake: Path, *arguments: str, timeout: float = 180) -> str:
    """What `vllm-slo --lake LAKE ARGUMENTS` prints; fails with its errors when it does not exit 0."""
    command = [sys.executable, "-m", "vllm_slo", "--lake", str(lake), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{arguments[0]} exited {done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


def query(lake: Path, sql: str) -> list[dict[str, Any]]:
    """Rows of a query, numbers as numbers."""
    rows = json.loads(vllm_slo(lake, "query", "--format", "json", sql))
    assert isinstance(rows, list)
    return rows


def import_files(lake: Path, files: Sequence[Path]) -> None:
    """Imports recordings."""
    vllm_slo(lake, "import", *(str(file) for file in files))


def free_port() -> int:
    """A TCP port of the loopback that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(met: Callable[[], object], otherwise: str, seconds: float = 60.0, every: float = 0.5) -> None:
    """Returns when the condition holds; fails with the message when it does not within the time."""
    deadline = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < deadline, otherwise
        time.sleep(every)


class Up:
    """`vllm-slo up` without the app, on ports of its own; can be stopped and started again."""

    def __init__(self, lake: Path, log: Path, *arguments: str) -> None:
        self.grpc_port, self.http_port = free_port(), free_port()
        self._log = log
        self._command = [
            *(sys.executable, "-m", "vllm_slo", "--lake", str(lake), "up", "--no-app"),
            *("--grpc", f"127.0.0.1:{self.grpc_port}", "--http", f"127.0.0.1:{self.http_port}"),
            *arguments,
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns when it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                if httpx.get(f"http://127.0.0.1:{self.http_port}/healthz", timeout=2).status_code == 200:
                    return
            except httpx.TransportError:
                time.sleep(0.1)
        self.stop()
        raise AssertionError(f"`up` does not answer; the end of its log:\n{self._log.read_text()[-3000:]}")

    def stop(self) -> int:
        """Asks it to end, as Ctrl-C does; its exit code."""
        assert self._process is not None
        self._process.terminate()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    @contextmanager
    def running(self) -> Iterator[None]:
        """Started at the beginning, stopped at the end."""
        self.start()
        try:
            yield
        finally:
            self.stop()


@contextmanager
def app(lake: Path) -> Iterator[str]:
    """The pages of a lake, as `up` and `demo` serve them; their address."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(
        command("127.0.0.1", port),
        env={**os.environ, "VLLM_SLO_LAKE": str(lake)},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                if httpx.get(f"{address}/healthz", timeout=2).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        else:
            raise AssertionError("the pages do not answer")
        yield address
    finally:
        process.terminate()
        process.communicate(timeout=30)
