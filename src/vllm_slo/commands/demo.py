"""`vllm-slo demo`: a recorded run of a real vLLM in the pages."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import webbrowser
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import click

from vllm_slo.commands.invocation import Invocation
from vllm_slo.exporters.errors import SloError

HOST = "127.0.0.1"
PORT = 8501
START_SECONDS = 60.0


class DemoError(SloError):
    """The pages did not start."""


@click.command("demo")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    help="Port of the pages; 0 takes a free one. [default: 8501, else a free one]",
)
@click.option("--no-browser", is_flag=True, help="Print the address and open no browser.")
@click.option("--no-app", is_flag=True, help="Load the recording and serve no pages.")
@click.option(
    "--lake",
    "folder",
    metavar="PATH",
    help="Load it into this lake. [default: vllm-slo/demo-2 in the cache folder of the user]",
)
@click.pass_obj
def demo(invocation: Invocation, port: int | None, no_browser: bool, no_app: bool, folder: str | None) -> None:
    """Load a recorded run of a real vLLM and open the pages, until stopped.

    Two runs of 1,500 requests with the same arrivals, seen by the probe: first every server takes every request, then
    medium and long prompts have a server of their own. The lake of the demo is apart from yours.
    """
    invocation.lake_option = folder or str(default_lake(dict(os.environ)))
    loaded = load(invocation)
    click.echo(f"lake   {invocation.lake_location}  ({loaded})")
    if no_app:
        return
    from vllm_slo.serving import app

    if not app.installed():
        raise ModuleNotFoundError("No module named 'streamlit'", name="streamlit")
    app.check(HOST, port or 0, "--port")
    chosen = port or (PORT if port is None and app.is_free(HOST, PORT) else app.free_port(HOST))
    address = f"http://{HOST}:{chosen}"
    environment = invocation.export_environment()
    process = subprocess.Popen(
        app.command(HOST, chosen), env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    try:
        _wait(process, address, time.monotonic)
        click.echo(f"pages  {address}\nstop with Ctrl-C")
        if not no_browser and _has_display(dict(os.environ)):
            webbrowser.open(address)
        code = process.wait()
        if code:
            raise DemoError(f"the pages ended by themselves (exit code {code}); the reason is above")
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def default_lake(environment: dict[str, str]) -> Path:
    """Where the demo's lake lies unless told otherwise: in the user's cache folder, apart from other recordings."""
    cache = environment.get("XDG_CACHE_HOME")
    home = Path(environment.get("HOME") or "~").expanduser()
    return (Path(cache) if cache else home / ".cache") / "vllm-slo" / "demo-2"


def load(invocation: Invocation) -> str:
    """Load the recording into the lake; what is there already stays. A few words on it."""
    from dataclasses import replace
    from datetime import UTC, datetime
    from zoneinfo import ZoneInfo

    from vllm_slo.analytics.drain import Drain
    from vllm_slo.commands.loading import File, Loading

    folder = Path(str(files("vllm_slo") / "demo_data"))
    recordings = [File(path, path.name) for path in sorted(folder.glob("*.gz"))]
    lake = invocation.open_lake(create=True)
    config = invocation.config
    settings = replace(config.decode_settings(), models=_models(folder / "engine_samples.parquet.gz"))
    loading = Loading(lake, Drain(lake, config.bucket_settings()), settings, datetime.now(UTC), ZoneInfo("UTC"))
    new = sum(loading.load([recording]).requests for recording in recordings)
    return f"{new} requests loaded" if new else "loaded before"


def _models(samples: Path) -> tuple[tuple[str, str], ...]:
    """The model of each instance, as its samples say; spans of a stock vLLM do not name it."""
    import gzip

    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = pq.read_table(pa.BufferReader(gzip.decompress(samples.read_bytes()))).to_pylist()
    return tuple(sorted({(row["service_instance_id"], row["model"]) for row in rows if row.get("model")}))


def _has_display(environment: dict[str, str]) -> bool:
    return sys.platform in ("darwin", "win32") or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))


def _wait(process: subprocess.Popen[bytes], address: str, clock: Callable[[], float]) -> None:
    deadline = clock() + START_SECONDS
    while process.poll() is None:
        try:
            with urlopen(f"{address}/_stcore/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError):
            pass
        if clock() > deadline:
            raise DemoError(f"the pages did not answer at {address} within {START_SECONDS:g} s; try another --port")
        time.sleep(0.1)
    raise DemoError(
        f"the pages ended at once (exit code {process.returncode}); the reason is above; try another --port"
    )
