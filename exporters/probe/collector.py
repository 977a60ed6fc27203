"""Fills the table of `series` at a scrape: meters, the last sample, lives in flight and workers -> metric families.

Scrapes come from a thread of their own beside the engine's. Dictionaries are copied before they are walked, and between
two families the interpreter is offered to whoever waits for it, so that the engine never waits for a whole page.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_slo.exporters.probe.histogram import NANOSECONDS, Histogram
from vllm_slo.exporters.probe.in_flight import InFlight, Now, past
from vllm_slo.exporters.probe.meters import STEP, Meters
from vllm_slo.exporters.probe.objectives import Objective
from vllm_slo.exporters.probe.series import ENGINE_LABELS, PREFIX, REASONS, SERIES, Series
from vllm_slo.exporters.probe.worker import Allocator

OUTCOMES: tuple[str, ...] = ("stop", "length", "repetition", "abort", "error")
PREEMPTION_CAUSES: tuple[str, ...] = ("kv_blocks", "reset")
LIVES_AT_ONCE = 2_000
"""Lives looked at before the interpreter is offered to the engine: about a millisecond."""
_ALLOCATOR: dict[str, str] = {
    "allocator_allocated_bytes": "allocated_bytes",
    "allocator_reserved_bytes": "reserved_bytes",
    "allocator_inactive_split_bytes": "inactive_split_bytes",
    "allocator_retries_total": "retries",
    "out_of_memory_errors_total": "out_of_memory_errors",
}

Values = dict[tuple[str, ...], float]


class Records(Protocol):
    """The counters of an `outbox.Outbox`."""

    exported: int
    dropped: int
    failed: int


class Identity(NamedTuple):
    """Who the series are of; see ``series.ENGINE_LABELS``."""

    model: str
    shard: str
    engine: str
    version: str
    vllm_version: str
    instance: str = ""


class ProbeCollector(Collector):
    """Everything that ``/metrics`` of an engine shows.

    ``sampled`` is called each second; its interval sums are added up here. ``errors`` gives errors by hook, ``workers``
    what the allocators hold. Objectives of other models and shards are left out. While not ``on`` (too many errors
    switched the hooks off) only what the probe says of itself is shown: numbers that stand still are none.
    """

    def __init__(
        self,
        meters: Meters,
        identity: Identity,
        in_flight: Mapping[str, InFlight],
        records: Records,
        objectives: Sequence[Objective] = (),
        workers: Callable[[], Sequence[Allocator]] = tuple,
        errors: Callable[[], Mapping[str, int]] = dict,
        on: Callable[[], bool] = lambda: True,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
        time_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.scrape_errors = 0
        """Counted by whoever answers scrapes."""
        self._meters, self._identity, self._in_flight, self._records = meters, identity, in_flight, records
        self._objectives = tuple(
            one for one in objectives if one.model in (None, identity.model) and one.shard in (None, identity.shard)
        )
        self._workers, self._errors, self._on = workers, errors, on
        self._monotonic_ns, self._time_ns = monotonic_ns, time_ns
        self._labels = (identity.model, identity.shard, identity.engine)
        self._sample: Mapping[str, Any] = {}
        self._sampled_ns = 0
        self._blocked = dict.fromkeys(REASONS, 0.0)
        self._scheduled = {"prefill": 0.0, "decode": 0.0}
        self._bounds = {
            name: (*(repr(bound / NANOSECONDS) for bound in bounds), "+Inf") for name, bounds in meters.bounds.items()
        }

    def sampled(self, sample: Mapping[str, Any]) -> None:
        """A sample was taken: columns of `engine_samples`. From one thread."""
        for reason in self._blocked:
            self._blocked[reason] += sample.get(f"blocked_{reason}_seconds") or 0.0
        for kind in self._scheduled:
            self._scheduled[kind] += sample.get(f"scheduled_{kind}_tokens") or 0.0
        self._sample = sample
        self._sampled_ns = self._time_ns()

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not collect."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Every family that has a value, freshly read."""
        on = self._on()
        values = self._of_probe()
        if on:
            values.update({**self._of_sample(), **self._of_meters(), **self._of_lives(), **self._of_engine()})
        for series in SERIES:
            if series.kind == "histogram":
                if on:
                    yield self._histogram(series)
            elif found := values.get(series.name):
                family = CounterMetricFamily if series.kind == "counter" else GaugeMetricFamily
                metric = family(PREFIX + series.name, series.help, labels=(*ENGINE_LABELS, *series.labels))
                for labels, value in found.items():
                    metric.add_metric((*self._labels, *labels), value)
                yield metric
            time.sleep(0)

    def _histogram(self, series: Series) -> Metric:
        name = series.name.removesuffix("_seconds")
        labels = (*ENGINE_LABELS, *series.labels)
        family = HistogramMetricFamily(PREFIX + series.name, series.help, labels=labels)
        if name == STEP:
            _add(family, self._labels, self._bounds[name], self._meters.steps)
            return family
        for cell, histogram in self._meters.histograms[name].copy().items():
            _add(family, (*self._labels, *self._label(cell)), self._bounds[name], histogram)
        return family

    def _label(self, cell: tuple[str, int]) -> tuple[str, str]:
        return cell[0], self._meters.priorities[cell[1]]

    def _of_meters(self) -> dict[str, Values]:
        meters = self._meters
        cells = meters.cells
        ended, preempted, lost = meters.requests.copy(), meters.preemptions.copy(), meters.lost_tokens.copy()
        known = {*OUTCOMES, *(reason for _, _, reason in ended)}
        causes = {*PREEMPTION_CAUSES, *(cause for _, _, cause in preempted)}
        return {
            "requests_total": {
                (*self._label(cell), reason): ended.get((*cell, reason), 0)
                for cell in cells
                for reason in sorted(known)
            },
            "preemptions_total": {
                (*self._label(cell), cause): preempted.get((*cell, cause), 0)
                for cell in cells
                for cause in sorted(causes)
            },
            "lost_tokens_total": {self._label(cell): lost.get(cell, 0) for cell in cells},
            "recomputed_tokens_total": {(): meters.recomputed_tokens},
            "kv_evicted_blocks_total": {(): meters.evicted_blocks},
        }

    def _of_lives(self) -> dict[str, Values]:
        lives = list(self._in_flight.values())
        cells = self._meters.cells
        counts = dict.fromkeys(cells, 0)
        for life in lives:
            counts[life.cell] = counts.get(life.cell, 0) + 1
        now = Now(self._monotonic_ns(), self._time_ns(), self._meters.last_step_ns)
        beyond: Values = {}
        for objective in self._objectives:
            sums: dict[tuple[str, int], int] = {}
            for part in _parts(lives):
                for cell, count in past(objective, cells, part, now, self._meters.priority_class).items():
                    sums[cell] = sums.get(cell, 0) + count
            beyond.update({(objective.name, *self._label(cell)): count for cell, count in sums.items()})
        return {
            "requests_in_flight": {self._label(cell): count for cell, count in counts.items()},
            "requests_in_flight_past_objective": beyond,
            "objective_threshold_seconds": {(one.name, one.sli): one.threshold_seconds for one in self._objectives},
        }

    def _of_sample(self) -> dict[str, Values]:
        sample = self._sample
        found: dict[str, Values] = {}
        for series in SERIES:
            if series.column and (value := sample.get(series.column)) is not None:
                found[series.name] = (
                    {(key,): count for key, count in json.loads(value).items()} if series.labels else {(): value}
                )
        if self._sampled_ns:
            found["sample_timestamp_seconds"] = {(): self._sampled_ns / NANOSECONDS}
            found["queue_blocked_seconds_total"] = {(reason,): total for reason, total in self._blocked.items()}
            found["scheduled_tokens_total"] = {(kind,): total for kind, total in self._scheduled.items()}
        capacity, deferred = sample.get("requests_waiting_capacity"), sample.get("requests_waiting_deferred")
        if capacity is not None and deferred is not None:
            waiting = dict.fromkeys((*REASONS, "step", "deferred"), 0.0)
            waiting["deferred"] = deferred
            waiting[sample.get("blocked_by") or "step"] = capacity
            found["requests_waiting_for"] = {(reason,): count for reason, count in waiting.items()}
        if budget := (sample.get("token_budget") or 0) * (sample.get("steps") or 0):
            used = (sample.get("scheduled_prefill_tokens") or 0) + (sample.get("scheduled_decode_tokens") or 0)
            found["token_budget_used_ratio"] = {(): used / budget}
        if (cap := sample.get("sequence_cap")) and (running := sample.get("requests_running")) is not None:
            found["sequence_cap_used_ratio"] = {(): running / cap}
        return found

    def _of_probe(self) -> dict[str, Values]:
        identity, records = self._identity, self._records
        return {
            "probe_info": {(identity.instance, identity.version, identity.vllm_version): 1},
            "probe_records_exported_total": {(): records.exported},
            "probe_records_dropped_total": {(): records.dropped + records.failed},
            "probe_errors_total": {(hook,): count for hook, count in tuple(self._errors().items())},
            "probe_scrape_errors_total": {(): self.scrape_errors},
        }

    def _of_engine(self) -> dict[str, Values]:
        found: dict[str, Values] = {}
        if last := self._meters.last_step_ns:
            since = self._monotonic_ns() - last
            found["last_step_timestamp_seconds"] = {(): (self._time_ns() - since) / NANOSECONDS}
        allocators = self._workers()
        for name, field in _ALLOCATOR.items():
            found[name] = {(one.worker,): getattr(one, field) for one in allocators}
        found["allocator_fragmentation_ratio"] = {
            (one.worker,): one.fragmentation_ratio for one in allocators if one.fragmentation_ratio is not None
        }
        return found


def _parts(lives: Sequence[InFlight]) -> Iterator[Sequence[InFlight]]:
    for start in range(0, len(lives), LIVES_AT_ONCE):
        yield lives[start : start + LIVES_AT_ONCE]
        time.sleep(0)
    if not lives:
        yield ()


def _add(family: HistogramMetricFamily, labels: Iterable[str], bounds: Sequence[str], histogram: Histogram) -> None:
    counts, total = histogram.read()
    running, buckets = 0, []
    for bound, count in zip(bounds, counts, strict=True):
        running += count
        buckets.append((bound, float(running)))
    family.add_metric(tuple(labels), buckets, total / NANOSECONDS)
