"""What vLLM calls in each of its processes: decides whether the probe is on, and hooks what the process has.

Nothing of vLLM is imported here: hooks wait for the modules that hold what they wrap. So an API server, an engine core
and a worker each get theirs, also when one process is several of them, or was forked from another.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from typing import Any

from vllm_slo import __version__
from vllm_slo.exporters.probe import imports, versions
from vllm_slo.exporters.probe.guard import guarded
from vllm_slo.exporters.probe.settings import LOGGER_NAME, Settings, SettingsError
from vllm_slo.exporters.records import PROBE_VERSION

RESOURCE = "OTEL_RESOURCE_ATTRIBUTES"

logger = logging.getLogger(LOGGER_NAME)
_registered = False


def register() -> None:
    """Switches the probe on in this process, or says why not. Never raises; a second call has no effect."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        _register()
    except Exception as error:
        logger.warning("vllm-slo: the probe is off, vLLM is not affected: %r", error, exc_info=True)


def _register() -> None:
    try:
        settings = Settings.from_environment(os.environ)
    except SettingsError as error:
        logger.warning("vllm-slo: the probe is off, its settings are wrong:\n%s", error)
        return
    if not settings.enabled:
        logger.info("vllm-slo: the probe is off, VLLM_SLO_PROBE says so")
        return
    version = str(getattr(sys.modules.get("vllm"), "__version__", None) or _installed_version())
    row = versions.find(version)
    if row is None:
        logger.warning(
            "vllm-slo: the probe is off: vLLM %s is none of the versions it knows (%s)", version, versions.known()
        )
        return
    from vllm_slo.exporters.probe.process import Process

    process = Process(settings, row, version)

    def hook(what: str, hooks: tuple[versions.Hooked, ...], install: Callable[[Process], None]) -> Callable[[], None]:
        def when_there() -> None:
            lacking = versions.differences(hooks)
            if lacking:
                logger.warning(
                    "vllm-slo: the probe is off in the %s: vLLM %s is not as expected of %s (known: %s): %s",
                    what,
                    version,
                    row.minor,
                    versions.known(),
                    "; ".join(lacking),
                )
            else:
                install(process)

        return guarded(f"plugin.{what}", when_there)

    imports.when_imported("vllm.v1.core.sched.scheduler", hook("engine core", (*row.engine, row.look), _hook_engine))
    imports.when_imported("vllm.v1.engine.output_processor", hook("front end", row.frontend, _hook_frontend))
    for module, name in (("async_llm", "AsyncLLM"), ("llm_engine", "LLMEngine")):
        imports.when_imported(f"vllm.v1.engine.{module}", guarded(f"plugin.{name}", _learner(process, module, name)))
    imports.when_imported("vllm.v1.worker.worker_base", guarded("plugin.worker", lambda: _hook_worker(process)))


def _installed_version() -> str:
    """Of whatever distribution brings the package: builds for other devices have names of their own."""
    from importlib.metadata import packages_distributions, version

    names = packages_distributions().get("vllm", ())
    return version(names[0]) if names else "of an unknown version"


def _hook_engine(process: Any) -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_slo.exporters.probe.hooks import wrap_scheduler
    from vllm_slo.exporters.probe.start import start

    wrap_scheduler(Scheduler, BlockPool, process.row.look.method, lambda scheduler: start(scheduler, process))


def _hook_frontend(process: Any) -> None:
    from vllm_slo.exporters.probe import frontend

    frontend.install(process.settings, process.outbox, process.row)
    _mark_resource()


def _mark_resource() -> None:
    """So that vLLM's own spans show that there is a probe: its tracer reads the variable when it is made, later."""
    said = os.environ.get(RESOURCE, "")
    if f"{PROBE_VERSION}=" not in said:
        os.environ[RESOURCE] = f"{said},{PROBE_VERSION}={__version__}".lstrip(",")


def _learner(process: Any, module: str, name: str) -> Callable[[], None]:
    """The front end learns vLLM's configuration when its client of the engine is made."""

    def learn() -> None:
        import functools
        import importlib

        client = getattr(importlib.import_module(f"vllm.v1.engine.{module}"), name)
        original = client.__init__
        knows = guarded(f"plugin.{name}.__init__", process.knows)

        @functools.wraps(original)
        def __init__(self: Any, vllm_config: Any, *arguments: Any, **named: Any) -> None:
            knows(vllm_config, "api_server")
            original(self, vllm_config, *arguments, **named)

        client.__init__ = __init__

    return learn


def _hook_worker(process: Any) -> None:
    from vllm_slo.exporters.probe import worker

    worker.install(process.settings)
