"""Everything that `vllm-slo up` runs, started and stopped in order."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prometheus_client.registry import CollectorRegistry

from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.drain import Drain
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.maintenance import Maintenance, MaintenanceSettings
from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.otlp import fast, json, plain
from vllm_slo.exporters.otlp.decoded import DecodeSettings
from vllm_slo.exporters.otlp.lot import Tables
from vllm_slo.exporters.receiver.server import Receiver
from vllm_slo.exporters.receiver.settings import ReceiverSettings
from vllm_slo.exporters.receiver.spool import Spool
from vllm_slo.exporters.receiver.state import COUNTERS_FILE, SCRAPING_FILE
from vllm_slo.exporters.receiver.tally import Tally
from vllm_slo.exporters.schema import TABLES
from vllm_slo.exporters.vllm.scrape_health import ScrapeCollector, save
from vllm_slo.serving.app import App, AppSettings, check
from vllm_slo.serving.draining import Commit, Committed, Draining
from vllm_slo.serving.periodic import Periodic

if TYPE_CHECKING:
    from vllm_slo.exporters.vllm.metrics import Target
    from vllm_slo.exporters.vllm.scrape import Scraper

_PATIENCE_SECONDS = 5.0


@dataclass(frozen=True)
class ScrapeSettings:
    """Servers whose ``/metrics`` is read every ``interval_seconds``."""

    targets: tuple[Target, ...]
    interval_seconds: float


@dataclass(frozen=True)
class ServeSettings:
    """What one `up` runs. ``spool`` is a local folder; ``quarantine`` lies beside it."""

    lake: str
    spool: Path
    receiver: ReceiverSettings
    decode: DecodeSettings = field(default_factory=DecodeSettings)
    buckets: Buckets = field(default_factory=Buckets)
    maintenance: MaintenanceSettings = field(default_factory=MaintenanceSettings)
    maintenance_seconds: float = 10.0
    """Small merges often: one a minute would take the core from the drain for seconds, and rows be decoded twice."""
    scrape: tuple[ScrapeSettings, ...] = ()
    app: AppSettings | None = None


@dataclass(frozen=True)
class Addresses:
    """Where what listens; 0 and None for what does not."""

    grpc_port: int
    http_port: int
    app_port: int | None


def serve(settings: ServeSettings, ready: Callable[[Addresses], None]) -> None:
    """Run until SIGTERM or SIGINT, then stop in order: doors, open segment, drain, app. Raises SloError at the start.

    ``ready`` is called once everything listens.
    """
    settings.receiver.check()
    if "://" not in settings.lake and Path(settings.lake).is_file():
        raise SloError(f"{settings.lake}: is a file; a lake is a folder: name another place with --lake")
    _check_instances([target for group in settings.scrape for target in group.targets])
    if settings.app is not None:
        check(settings.app.host, settings.app.port, "--app-port")
    spool = Spool.open(settings.spool)
    try:
        _run(_serve(settings, spool, ready))
    finally:
        spool.close()


def _check_instances(targets: Sequence[Target]) -> None:
    """Raises SloError when two targets share an instance: their counters would be read as one that keeps resetting."""
    named: dict[str, Target] = {}
    for target in targets:
        other = named.setdefault(target.instance, target)
        if other is not target:
            raise SloError(
                f"--scrape: {other.url} and {target.url} are both called {target.instance}; give each server "
                "its own service.instance.id and write URL=INSTANCE"
            )


def _run(main: Coroutine[Any, Any, None]) -> None:
    try:
        import uvloop
    except ImportError:
        asyncio.run(main)
    else:
        uvloop.run(main)


async def _serve(settings: ServeSettings, spool: Spool, ready: Callable[[Addresses], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    lake = Lake.open(settings.lake, create=True)
    spool.number_after(max((lake.applied(table.name, spool.id) or 0) for table in TABLES))
    counters = settings.spool / COUNTERS_FILE
    tally = Tally.load(counters)
    decode = fast.decode if fast.available() else plain.decode
    registry = CollectorRegistry()
    receiver = Receiver(
        settings.receiver,
        spool,
        decode,
        settings.decode,
        json.to_protobuf,
        tally,
        registry,
        lambda: draining.committed_time,
    )
    shards: dict[str, str] = {}
    draining = Draining(spool, receiver.intake, decode, _commit(Drain(lake, settings.buckets), shards), tally, counters)
    upkeep = Maintenance(lake, settings.maintenance, lambda: datetime.now(UTC))
    maintenance = Periodic("maintenance", upkeep.run_once, settings.maintenance_seconds)
    async with contextlib.AsyncExitStack() as ending:
        ending.callback(maintenance.stop, 2 * _PATIENCE_SECONDS)
        await receiver.start()
        draining.start()
        ending.push_async_callback(asyncio.to_thread, draining.stop, _PATIENCE_SECONDS)
        ending.push_async_callback(receiver.stop)
        maintenance.start()
        if settings.scrape:
            await ending.enter_async_context(_scraping(settings.scrape, lake, spool, receiver, shards, registry))
        else:
            (settings.spool / SCRAPING_FILE).unlink(missing_ok=True)
        app = None
        if settings.app is not None:
            app = App(settings.app)
            await app.start()
            ending.push_async_callback(app.stop)
        ready(Addresses(receiver.grpc_port, receiver.http_port, app.port if app else None))
        await stop.wait()


def _commit(drain: Drain, shards: dict[str, str]) -> Commit:
    from vllm_slo.serving.scraping import shards_of

    def commit(writer: str, number: int, tables: Tables) -> Committed:
        if "requests" in tables:
            shards.update(shards_of(tables["requests"]))
        applied = drain.apply(writer, number, tables)
        return Committed(applied.duplicates, applied.replayed)

    return commit


@contextlib.asynccontextmanager
async def _scraping(
    groups: tuple[ScrapeSettings, ...],
    lake: Lake,
    spool: Spool,
    receiver: Receiver,
    shards: Mapping[str, str],
    registry: CollectorRegistry,
) -> Any:
    import httpx

    from vllm_slo.exporters.vllm.scrape import Scraper
    from vllm_slo.serving.scraping import LakeSink, Models

    configured = receiver.intake.settings.models
    scraped: Models = {}

    def learned(models: Models) -> None:
        scraped.update(models)
        merged = {**scraped, **dict(configured)}
        receiver.intake.settings = replace(receiver.intake.settings, models=tuple(merged.items()))

    stop = asyncio.Event()
    async with httpx.AsyncClient() as client:
        scrapers: list[Scraper] = [
            Scraper(
                group.targets,
                client=client,
                sink=LakeSink(lake, f"scrape{position}-{spool.id}", learned, shards),
                interval_seconds=group.interval_seconds,
            )
            for position, group in enumerate(groups)
        ]
        registry.register(ScrapeCollector(scrapers))
        report = Periodic("report of the scraping", partial(save, spool.folder / SCRAPING_FILE, scrapers), 5.0)
        report.start()
        tasks = [asyncio.create_task(scraper.run(stop)) for scraper in scrapers]
        try:
            yield
        finally:
            stop.set()
            await asyncio.wait(tasks, timeout=_PATIENCE_SECONDS)
            await asyncio.to_thread(report.stop, _PATIENCE_SECONDS)
            with contextlib.suppress(OSError):
                save(spool.folder / SCRAPING_FILE, scrapers)


def default_spool(lake: str, given: str | None) -> Path:
    """The spool's folder: as given, else inside a local lake. Raises SloError for a lake at a URL without one."""
    if given is not None:
        return Path(given).absolute()
    if "://" in lake:
        raise SloError(f"{lake}: a lake at a URL needs a local folder for its spool; give --spool FOLDER")
    return Path(lake) / "spool"
