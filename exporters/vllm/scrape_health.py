"""How scraping goes: states of scrapers -> metric families for Prometheus, and the document that `status` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_slo.exporters.vllm.scrape import Scraper, TargetState

PREFIX = "vllm_slo_scrape_"
_LABELS = ("instance", "url")


class ScrapeCollector(Collector):
    """What ``/metrics`` shows of the scraping; counts begin with the process."""

    def __init__(self, scrapers: Sequence[Scraper]) -> None:
        self._scrapers = scrapers

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not collect."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Every family, freshly read."""
        states = {
            (state.target.instance, shown(state.target.url)): state
            for scraper in self._scrapers
            for state in scraper.states
        }
        reads = CounterMetricFamily(PREFIX + "reads", "Pages read, by outcome.", labels=(*_LABELS, "outcome"))
        failing = GaugeMetricFamily(PREFIX + "failing", "1 while the last read failed, else 0.", labels=_LABELS)
        last = GaugeMetricFamily(
            PREFIX + "last_success_timestamp_seconds", "When a page was last read.", labels=_LABELS
        )
        for target, state in states.items():
            reads.add_metric((*target, "success"), state.successes)
            reads.add_metric((*target, "failure"), state.failures)
            failing.add_metric(target, int(state.failing))
            if state.last_success is not None:
                last.add_metric(target, state.last_success.timestamp())
        yield from (reads, failing, last)
        for name, help_text, attribute in (
            ("rows_stored", "Rows of `engine_samples` in the lake.", "rows_delivered"),
            ("rows_dropped", "Rows given up because the lake took none for too long.", "rows_dropped"),
            ("store_failures", "Batches that the lake did not take; they are given again.", "sink_failures"),
        ):
            family = CounterMetricFamily(PREFIX + name, help_text)
            family.add_metric([], sum(getattr(scraper, attribute) for scraper in self._scrapers))
            yield family


def document(scrapers: Sequence[Scraper]) -> dict[str, Any]:
    """How the scraping goes, as a JSON object; times in ISO 8601. ``store_error`` is about now, None for none."""
    return {
        "targets": [_target(state) for scraper in scrapers for state in scraper.states],
        "rows_stored": sum(scraper.rows_delivered for scraper in scrapers),
        "rows_dropped": sum(scraper.rows_dropped for scraper in scrapers),
        "store_error": next((scraper.sink_error for scraper in scrapers if scraper.sink_error), None),
    }


def save(path: Path, scrapers: Sequence[Scraper]) -> None:
    """Write the document, atomically. Raises OSError."""
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(document(scrapers), indent=1) + "\n", encoding="utf-8")
    os.replace(draft, path)


def shown(url: str) -> str:
    """The address without a name and password in it.

    >>> shown("http://me:secret@a:8000/metrics")
    'http://a:8000/metrics'
    """
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _target(state: TargetState) -> dict[str, Any]:
    url = state.target.url
    error = state.last_error
    return {
        "instance": state.target.instance,
        "url": shown(url),
        "failing": state.failing,
        "successes": state.successes,
        "failures": state.failures,
        "last_success": _iso(state.last_success),
        "last_failure": _iso(state.last_failure),
        "last_error": None if error is None else error.replace(url, shown(url)),
        "warning": state.warning,
        "bad_lines": state.bad_lines,
    }


def _iso(time: datetime | None) -> str | None:
    return None if time is None else time.isoformat()
