"""`vllm-slo gpu-exporter`: the GPUs of this machine as Prometheus series."""

from __future__ import annotations

import json
import logging
import signal
import threading
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vllm_slo.exporters.errors import SloError

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_slo.exporters.gpu.sources import Source

DEFAULT_LISTEN = "127.0.0.1:9454"
_RETRY_SECONDS = 10.0
_log = logging.getLogger(__name__)


@click.command("gpu-exporter")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    default=DEFAULT_LISTEN,
    show_default=True,
    help="Where /metrics is served. Port 0: any free one.",
)
@click.option("--dcgm-url", metavar="URL", help="Read this DCGM exporter's page instead of NVML.")
@click.option(
    "--dcgm",
    type=click.Choice(("auto", "off")),
    default="auto",
    show_default=True,
    help="auto: read a DCGM exporter on this machine's port 9400 instead of NVML, if there is one at the start.",
)
@click.option("--processes", is_flag=True, help="Memory by process, too (a series for each; NVML only).")
@click.option(
    "--time-limit",
    metavar="SECONDS",
    type=click.FloatRange(min=0.1, max=60),
    default=2.0,
    show_default=True,
    help="How long a GPU may take to answer; then its last values are shown, marked stale.",
)
@click.option("--wait", is_flag=True, help="Where there is no GPU or no driver, go on trying instead of ending.")
@click.option("--once", is_flag=True, help="Print the page of /metrics and end.")
@click.option("--json", "as_json", is_flag=True, help="Print the readings as one JSON object and end.")
@click.option(
    "--record",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write what NVML answers, function by function, to this file and end.",
)
def gpu_exporter(
    listen: str,
    dcgm_url: str | None,
    dcgm: str,
    processes: bool,
    time_limit: float,
    wait: bool,
    once: bool,
    as_json: bool,
    record: Path | None,
) -> int:
    """Serve the state of this machine's NVIDIA GPUs as Prometheus series.

    Memory, utilisation, power, energy, clocks, throttling, ECC errors and MIG instances, read through NVML, or from a
    DCGM exporter where one runs. What a GPU does not support is absent. Exit code 1 when there is no GPU to read.

    \b
    vllm-slo gpu-exporter
    vllm-slo gpu-exporter --once
    vllm-slo gpu-exporter --dcgm-url http://10.0.0.5:9400/metrics
    """
    if record is not None:
        return _record(record, processes)
    from vllm_slo.exporters.gpu.choice import choose

    def open_source() -> Source:
        return choose(dcgm_url, look_for_dcgm=dcgm == "auto", processes=processes, limit_seconds=time_limit)

    if once or as_json:
        source = (_waited(open_source, threading.Event()) if wait else None) or open_source()
        click.echo(_json(source) if as_json else _page(source), nl=as_json)
        return 0
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    return _serve(listen, open_source, wait)


def _page(source: Source) -> str:
    from prometheus_client import CollectorRegistry, generate_latest

    from vllm_slo.exporters.gpu.collector import GpuCollector

    registry = CollectorRegistry()
    registry.register(GpuCollector(lambda: source))
    return generate_latest(registry).decode()


def _json(source: Source) -> str:
    gpus = [asdict(gpu) for gpu in source.read()]
    return json.dumps({"source": source.name, "gpus": gpus}, indent=2)


def _record(file: Path, processes: bool) -> int:
    import pynvml

    from vllm_slo.exporters.gpu.device import read_gpu
    from vllm_slo.exporters.gpu.recording import Recorder

    recorder = Recorder(pynvml)
    count = recorder.start()
    for index in range(count):
        read_gpu(recorder, index, processes=processes)
    recorder.save(file, datetime.now(UTC).isoformat(timespec="seconds"))
    click.echo(f"{len(recorder.calls)} answers of {count} GPU{'s' if count > 1 else ''} are in {file}")
    return 0


def _serve(listen: str, open_source: Callable[[], Source], wait: bool) -> int:
    """Serve until Ctrl-C or SIGTERM. Without ``wait`` a missing GPU ends it before anything is served."""
    from prometheus_client import CollectorRegistry, start_http_server

    from vllm_slo.exporters.gpu.collector import GpuCollector

    found: list[Source] = [] if wait else [open_source()]
    registry = CollectorRegistry()
    registry.register(GpuCollector(lambda: found[0] if found else None))
    host, port = _address(listen)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise SloError(f"--listen {listen}: {error.strerror}; give another HOST:PORT") from error
    stop = threading.Event()
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        shown = f"[{host}]" if ":" in host else host
        click.echo(f"GPU series  http://{shown}:{server.server_port}/metrics")
        if not found and (source := _waited(open_source, stop)) is not None:
            found.append(source)
        if found:
            _tell(found[0])
            stop.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        server.shutdown()
        server.server_close()
        thread.join()
    return 0


def _waited(open_source: Callable[[], Source], stop: threading.Event) -> Source | None:
    """The source as soon as there is one; None when ``stop`` was set before. Each new reason is logged once."""
    from vllm_slo.exporters.gpu.nvml import NoGpu

    told = ""
    while not stop.is_set():
        try:
            return open_source()
        except NoGpu as error:
            if str(error) != told:
                told = str(error)
                _log.warning("no GPU yet, trying every %g s: %s", _RETRY_SECONDS, told)
        stop.wait(_RETRY_SECONDS)
    return None


def _tell(source: Source) -> None:
    """Say once what is read, and what each GPU does not support."""
    for gpu in source.read():
        state = "lost: it fell off the bus" if gpu.lost else f"read from {source.name}"
        _log.info("GPU %s %s (%s): %s", gpu.index, gpu.name or "of unknown name", gpu.uuid or "no UUID", state)
        by_error: dict[str, list[str]] = {}
        for series, error in gpu.absent:
            by_error.setdefault(error, []).append(series)
        for error, names in by_error.items():
            _log.info("GPU %s: absent, %s: %s", gpu.index, error, ", ".join(names))


def _address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise SloError(f"--listen {listen}: not an address; write HOST:PORT, such as {DEFAULT_LISTEN}")
    return host.strip("[]"), int(port)
