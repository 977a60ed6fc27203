"""The stat logger plugin in vLLM's own StatLoggerManager; prints what it sent as JSON.

Runs under an interpreter that has vLLM, with the installed product or `src` on the path.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from vllm_slo.exporters.probe import link
from vllm_slo.exporters.probe.http_request import HttpRequest
from vllm_slo.exporters.probe.stat_logger import AdmissionStats

SENT: list[Any] = []


def manager() -> Any:
    """As AsyncLLM makes it, with the probe's logger alone; the wrong class would raise here."""
    loggers.PrometheusStatLogger = AdmissionStats
    config = SimpleNamespace()
    return loggers.StatLoggerManager(config, [0, 1], [AdmissionStats], enable_default_loggers=False)


def taken() -> list[Any]:
    spans = [record.span() for record in SENT]
    SENT.clear()
    return [{"name": span.name, "error": span.error, **span.attributes} for span in spans]


def main() -> None:
    found: dict[str, Any] = {"subclass": issubclass(AdmissionStats, loggers.AggregateStatLoggerBase)}
    of = manager()
    of.stat_loggers = of.stat_loggers[:1]
    for each in (of.log, of.log_engine_initialized):
        each()
    for engine in (0, 1):
        of.record(SchedulerStats(), IterationStats(), engine_idx=engine)
        of.record(None, None, engine_idx=engine)

    of.record_admission_rejection("max_num_queued_reqs")
    of.record_sleep_state(1, 2)
    found["while the probe is off"] = taken()

    front = link.Link(SENT.append)
    link.activate(link.Front(front, SENT.append, None, lambda value: None))
    for _ in range(2):
        of.record_admission_rejection("max_num_queued_tokens")
    found["without the middleware"] = taken()

    http = HttpRequest("/v1/completions", "mine")
    token = link.CURRENT.set(http)
    of.record_admission_rejection("max_num_queued_reqs")
    link.CURRENT.reset(token)
    found["behind it, before the answer"] = taken()
    http.status = 503
    front.http_ended(http)
    found["behind it"] = taken()

    of.record_sleep_state(1, 2)
    of.record_sleep_state(0, 0)
    found["sleep"] = taken()

    def broken(record: object) -> None:
        raise RuntimeError("a fault of the probe")

    link.activate(link.Front(link.Link(broken), broken, None, lambda value: None))
    of.record_admission_rejection("max_num_queued_reqs")
    of.record_sleep_state(1, 1)
    print(json.dumps(found))


main()
