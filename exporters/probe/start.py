"""Makes the engine of a scheduler, and starts what goes with it."""

from __future__ import annotations

import logging
from typing import Any

from vllm_slo import __version__
from vllm_slo.exporters.probe import versions
from vllm_slo.exporters.probe.engine import Engine
from vllm_slo.exporters.probe.process import Process
from vllm_slo.exporters.probe.settings import LOGGER_NAME

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
    engine = Engine(scheduler, process)
    logger.info("vllm-slo: probe %s on engine %s of vLLM %s", __version__, engine.name, process.vllm_version)
    return engine
