"""The receiver's own series, ``vllm_slo_receiver_*``: a tally and the state of the spool -> metric families."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from vllm_slo.exporters.receiver import tally as counts
from vllm_slo.exporters.receiver.intake import Intake
from vllm_slo.exporters.receiver.spool import Spool
from vllm_slo.exporters.receiver.tally import Tally

PREFIX = "vllm_slo_receiver_"


@dataclass(frozen=True)
class Counter:
    """One count of the tally as a series; ``labels`` are the parts of the tally's label."""

    count: str
    help: str
    labels: tuple[str, ...] = ()


COUNTERS: tuple[Counter, ...] = (
    Counter(counts.SPANS_ACCEPTED, "Spans acknowledged: fsynced in the spool."),
    Counter(counts.SPANS_REFUSED, "Spans refused (whole bodies count as one), by reason.", ("reason",)),
    Counter(counts.SPANS_DUPLICATE, "Spans that were in the lake already: retries."),
    Counter(
        counts.ATTRIBUTES_DROPPED, "Attributes with prompt or completion text removed, by key pattern.", ("pattern",)
    ),
    Counter(counts.BODIES, "Requests answered, by protocol and outcome.", ("protocol", "outcome")),
    Counter(counts.BACK_PRESSURE, "Requests pushed back, by cause.", ("cause",)),
    Counter(counts.TORN_TAILS, "Spool segments whose unacknowledged tail was cut after a crash."),
    Counter(counts.TORN_BYTES, "Bytes cut with those tails."),
    Counter(counts.DAMAGED_RECORDS, "Spool records whose checksum failed amid good ones; left out."),
    Counter(counts.SEGMENTS_QUARANTINED, "Segments set aside because they could not be decoded."),
    Counter(counts.SEGMENTS_COMMITTED, "Segments whose rows are in the lake."),
    Counter(counts.LAKE_ERRORS, "Commits to the lake that failed and were tried again, by kind.", ("kind",)),
)
"""Named as in the tally, ``vllm_slo_receiver_`` before and ``_total`` behind. They go on counting across restarts."""

FSYNC_BOUNDS: tuple[float, ...] = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)


class FsyncTimes:
    """A histogram with one writer: the intake's thread."""

    def __init__(self) -> None:
        self._bins = [0] * (len(FSYNC_BOUNDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one write with its fsync."""
        self._bins[bisect_left(FSYNC_BOUNDS, seconds)] += 1
        self._sum += seconds

    def family(self) -> Metric:
        """The histogram as a metric family."""
        buckets, running = [], 0
        for bound, count in zip([*map(repr, FSYNC_BOUNDS), "+Inf"], list(self._bins), strict=True):
            running += count
            buckets.append((bound, float(running)))
        family = HistogramMetricFamily(
            PREFIX + "fsync_seconds", "Writing one group of bodies to the spool and its fsync."
        )
        family.add_metric([], buckets, self._sum)
        return family


class ReceiverCollector(Collector):
    """What ``/metrics`` shows. ``committed_time`` gives the epoch second of the last commit to the lake, or None."""

    def __init__(
        self,
        tally: Tally,
        spool: Spool,
        intake: Intake,
        fsync: FsyncTimes,
        committed_time: Callable[[], float | None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tally = tally
        self._spool = spool
        self._intake = intake
        self._fsync = fsync
        self._committed_time = committed_time
        self._clock = clock

    def register(self, registry: CollectorRegistry) -> None:
        """Show these series in ``registry``."""
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not collect."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Every family, freshly read."""
        found = self._tally.counts()
        for counter in COUNTERS:
            family = CounterMetricFamily(PREFIX + counter.count, counter.help, labels=counter.labels)
            labels = found.get(counter.count, {})
            if not counter.labels:
                family.add_metric([], labels.get("", 0))
            else:
                for label, count in sorted(labels.items()):
                    family.add_metric(label.split("/", len(counter.labels) - 1), count)
            yield family
        yield self._fsync.family()
        now = self._clock()
        oldest, committed = self._spool.oldest_mtime(), self._committed_time()
        yield _gauge("spool_bytes", "Bytes that wait in the spool.", self._spool.size_bytes)
        yield _gauge("spool_segments", "Segments in the spool.", self._spool.segments)
        yield _gauge(
            "spool_oldest_age_seconds",
            "Age of the oldest segment not in the lake; 0: none.",
            now - oldest if oldest else 0,
        )
        yield _gauge("pending_bytes", "Bytes of requests that wait for their answer.", self._intake.pending_bytes)
        if committed is not None:
            yield _gauge("last_commit_timestamp_seconds", "When rows last went into the lake.", committed)


def _gauge(name: str, text: str, value: float) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text)
    family.add_metric([], value)
    return family
