"""Makes the engine of a scheduler, and starts what goes with it: samples, series, the port, the step log."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from vllm_slo import __version__
from vllm_slo.exporters.conventions import SERVICE_NAME
from vllm_slo.exporters.probe import guard, objectives, port, versions
from vllm_slo.exporters.probe.collector import Identity, ProbeCollector
from vllm_slo.exporters.probe.engine import Engine
from vllm_slo.exporters.probe.kv import KvReader
from vllm_slo.exporters.probe.meters import Buckets, Meters
from vllm_slo.exporters.probe.process import Process
from vllm_slo.exporters.probe.sample import Sampler
from vllm_slo.exporters.probe.settings import LOGGER_NAME
from vllm_slo.exporters.probe.steplog import StepLog
from vllm_slo.exporters.probe.watch import Watch, each_second
from vllm_slo.exporters.probe.worker import Reader

logger = logging.getLogger(LOGGER_NAME)

OWN_SCHEDULERS = ("Scheduler", "AsyncScheduler", "DiffusionScheduler", "DiffusionAsyncScheduler")


def start(scheduler: Any, process: Process) -> Engine | None:
    """The engine; None, with a warning, where the scheduler is not what the table of versions says."""
    missing = versions.missing_attributes(scheduler, process.row)
    if missing:
        logger.warning(
            "vllm-slo: the probe is off in the engine core: the scheduler of vLLM %s has no %s, expected of %s "
            "(known: %s)",
            process.vllm_version,
            ", ".join(missing),
            process.row.minor,
            versions.known(),
        )
        return None
    if type(scheduler).__name__ not in OWN_SCHEDULERS:
        logger.warning(
            "vllm-slo: %s is not vLLM's own scheduler; what it overrides without calling vLLM's is not seen",
            type(scheduler).__name__,
        )
    process.knows(scheduler.vllm_config, "engine_core")
    settings, outbox = process.settings, process.outbox
    buckets = Buckets.of(settings.buckets)
    watched = objectives.read_or_none(
        settings.slo_file, buckets.names, lambda text: logger.warning("vllm-slo: %s", text)
    )
    meters = Meters(buckets, settings.priority_classes, objectives.thresholds(watched))
    engine = Engine(scheduler, process, meters)
    reader = Reader(settings.runtime_dir)
    identity = Identity(
        settings.model_for(scheduler.vllm_config) or "",
        settings.shard or settings.resource[SERVICE_NAME],
        engine.name,
        __version__,
        process.vllm_version,
        settings.instance or "",
    )
    collector = ProbeCollector(
        meters,
        identity,
        engine.accounting.in_flight,
        outbox,
        watched,
        workers=lambda: reader.latest,
        errors=lambda: guard.errors,
        on=_is_on(engine),
    )
    sampler = Sampler(
        engine,
        scheduler,
        KvReader(scheduler, buckets.names, buckets.uppers),
        lambda: reader.latest,
        process.row.skipped,
        monotonic_ns(),
    )
    engine.watch = Watch(engine, scheduler, sampler, collector.sampled)
    if settings.step_log is not None:
        engine.step_log = log = StepLog(settings.step_log)
        outbox.every_second.append(log.flush)
        outbox.before_close.append(log.flush)
    outbox.every_second.append(reader.refresh)
    served = port.serve(collector, settings.metrics_host, settings.metrics_port, int(engine.name))

    def ended() -> None:
        outbox.every_second.remove(reader.refresh)
        if served is not None:
            served.close()

    each_second(engine.watch, scheduler, outbox, ended)
    outbox.start()
    logger.info(
        "vllm-slo: probe %s on engine %s of vLLM %s, records go to %s",
        __version__,
        engine.name,
        process.vllm_version,
        settings.endpoint_for(scheduler.vllm_config),
    )
    return engine


def _is_on(engine: Engine) -> Callable[[], bool]:
    """Holds no engine that is off and otherwise gone."""
    held = weakref.ref(engine)

    def is_on() -> bool:
        one = held()
        return one is not None and not one.off

    return is_on
