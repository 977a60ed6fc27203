"""What blocked the queue: queue time by reason, of all requests or of the tail; exact sums."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

import duckdb

from vllm_slo.analytics.counts import Basis
from vllm_slo.analytics.parts import Sums, Tail, summed
from vllm_slo.analytics.phases import NANOSECONDS
from vllm_slo.analytics.selection import Selection
from vllm_slo.analytics.series import moment, steps
from vllm_slo.exporters.records import QUEUE_PARTS

UNKNOWN = "queue_unknown"
REASONS: tuple[str, ...] = (*QUEUE_PARTS, UNKNOWN)
"""The last is the queue time of requests of which nobody knows what blocked them: servers without the probe."""


@dataclass(frozen=True)
class Blocked:
    """Queue time of requests taken together: integer nanoseconds, of REASONS in their order; they sum to the whole.

    ``known`` of the ``rows`` say why they waited; a request without the probe is in UNKNOWN, never 0 elsewhere.
    """

    rows: int
    known: int
    nanoseconds: tuple[int, ...]

    @property
    def queue_nanoseconds(self) -> int:
        """The whole queue time."""
        return sum(self.nanoseconds)

    def of(self, reason: str) -> int:
        """Nanoseconds of one reason."""
        return self.nanoseconds[REASONS.index(reason)]

    def mean(self, reason: str) -> float:
        """Mean seconds of a reason over all rows."""
        return self.of(reason) / self.rows / NANOSECONDS

    @property
    def mean_queue(self) -> float:
        """Mean queue time in seconds."""
        return self.queue_nanoseconds / self.rows / NANOSECONDS

    def share(self, reason: str) -> float:
        """Share of the whole queue time, the unknown part included; 0 where nobody waited."""
        whole = self.queue_nanoseconds
        return self.of(reason) / whole if whole else 0.0

    @property
    def leading(self) -> str | None:
        """The known reason with the most time; None where no queue time has a known reason."""
        worst = max(QUEUE_PARTS, key=self.of)
        return worst if self.of(worst) > 0 else None

    def __add__(self, other: Blocked) -> Blocked:
        pairs = zip(self.nanoseconds, other.nanoseconds, strict=True)
        return Blocked(self.rows + other.rows, self.known + other.known, tuple(a + b for a, b in pairs))


@dataclass(frozen=True)
class BlockedTable:
    """By (shard, bucket), those without a request absent; ``overall`` is None without any."""

    cells: dict[tuple[str | None, str | None], Blocked]
    overall: Blocked | None

    def by_shard(self) -> dict[str | None, Blocked]:
        """Totals of the shards."""
        return {shard: total(b for (s, _), b in self.cells.items() if s == shard) for shard, _ in self.cells}

    def by_bucket(self) -> dict[str | None, Blocked]:
        """Totals of the buckets."""
        return {bucket: total(b for (_, c), b in self.cells.items() if c == bucket) for _, bucket in self.cells}


@dataclass(frozen=True)
class BlockedSeries:
    """By arrival, in steps from ``times`` on; None for a step in which no request arrived."""

    step: timedelta
    times: tuple[datetime, ...]
    blocked: tuple[Blocked | None, ...]


def blocked(
    connection: duckdb.DuckDBPyConnection, selection: Selection, basis: Basis, tail: Tail | None = None
) -> BlockedTable:
    """Queue time by reason of every shard and bucket, of all requests that count or of the tail."""
    found = summed(connection, selection, basis, "queue", QUEUE_PARTS, ("shard", "bucket"), tail=tail)
    cells = {(shard, bucket): _blocked(sums) for (shard, bucket), sums in sorted(found.items(), key=_order)}
    return BlockedTable(cells, total(cells.values()) if cells else None)


def blocked_series(
    connection: duckdb.DuckDBPyConnection, selection: Selection, basis: Basis, step: timedelta, tail: Tail | None = None
) -> BlockedSeries:
    """Queue time by reason over time, of all requests that count or of the tail."""
    found = summed(connection, selection, basis, "queue", QUEUE_PARTS, step=step, tail=tail)
    at = {moment(key[0]): _blocked(sums) for key, sums in found.items()}
    times = steps(selection, step)
    return BlockedSeries(step, times, tuple(at.get(time) for time in times))


def total(parts: Iterable[Blocked]) -> Blocked:
    """All of them taken together."""
    return sum(parts, Blocked(0, 0, (0,) * len(REASONS)))


def _blocked(sums: Sums) -> Blocked:
    return Blocked(sums.rows, sums.known, (*sums.parts, sums.phase - sum(sums.parts)))


def _order(item: tuple[tuple[str | None, str | None], Sums]) -> tuple[bool, str, bool, str]:
    (shard, bucket), _ = item
    return shard is None, shard or "", bucket is None, bucket or ""
