"""The pages as a process of their own: Streamlit on ``page.py``; see ``pages`` for how it ends with this one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from vllm_slo.exporters.errors import SloError

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AppSettings:
    """Where the pages are served; port 0 takes a free one. ``environment`` names the lake and the configuration."""

    host: str
    port: int
    environment: Mapping[str, str]


def installed() -> bool:
    """Whether the extra ``app`` is there."""
    return find_spec("streamlit") is not None


def command(host: str, port: int) -> list[str]:
    """The command line that serves the pages. Start it with a pipe as standard input: it ends when that is closed."""
    options = {
        "server.address": host,
        "server.port": str(port),
        "server.headless": "true",
        "browser.gatherUsageStats": "false",
        "client.toolbarMode": "minimal",
        "theme.light.primaryColor": "#2f7fbf",
        "theme.dark.primaryColor": "#7fb8e6",
    }
    page = Path(__file__).parent.with_name("page.py")
    return [
        sys.executable,
        "-m",
        "vllm_slo.serving.pages",
        "run",
        str(page),
        *(f"--{key}={value}" for key, value in options.items()),
    ]


def free_port(host: str) -> int:
    """A TCP port that is free on ``host`` now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def is_free(host: str, port: int) -> bool:
    """Whether nothing listens on the port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def check(host: str, port: int, option: str) -> None:
    """Raises SloError when the port is taken: whoever opens the address would see the pages of another lake."""
    if port and not is_free(host, port):
        raise SloError(
            f"{option} {port}: {host}:{port} cannot be had, something else may serve its pages there, "
            f"such as the demo or another `up`; stop that, or give {option} 0 or another port"
        )


class App:
    """The running pages. When they end by themselves that is logged, and nothing else stops."""

    def __init__(self, settings: AppSettings) -> None:
        self.settings = settings
        self.port = settings.port or free_port(settings.host)
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = False

    async def start(self) -> None:
        """Start the process; the pages answer a second or two later."""
        self._process = await asyncio.create_subprocess_exec(
            *command(self.settings.host, self.port),
            env=dict(self.settings.environment),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
        )
        self._watch = asyncio.create_task(self._until_end(self._process))

    async def stop(self, patience_seconds: float = 3.0) -> None:
        """End the process."""
        self._stopping = True
        if self._process is None or self._watch is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            await asyncio.wait_for(asyncio.shield(self._watch), patience_seconds)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._watch

    async def _until_end(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        if not self._stopping:
            _log.error("the app ended by itself (exit code %d); spans are still received", code)
