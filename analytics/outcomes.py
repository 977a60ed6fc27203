"""How requests ended: finished, given up, failed or refused; and of how many nobody can tell."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

import duckdb

from vllm_slo.analytics.counts import NO_REQUESTS_OF_THEIR_OWN, Basis
from vllm_slo.analytics.levels import rollups
from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection, literal
from vllm_slo.analytics.series import moment, start_of_step, steps
from vllm_slo.exporters.schema import UNFINISHED


@dataclass(frozen=True)
class Outcomes:
    """Requests of a selection by how they ended.

    ``requests`` is every one; ``told`` of them come from a server with the probe (or a client), which tells how each
    ended. Of the others, whose servers are stock, only those that finished are known to exist.
    ``unfinished`` counts, by reason of UNFINISHED, those that did not finish: they are all among ``told``.
    ``disconnected`` of the aborted are known to have lost their client; ``edge`` of the unfinished passed the HTTP
    middleware, and ``http`` counts these by class of status (4 for 4xx; 429 and 503 stand apart, None: none was sent).
    ``series`` and ``arrived`` are by arrival, in steps from ``times`` on.
    """

    requests: int
    told: int
    unfinished: dict[str, int]
    disconnected: int
    edge: int
    http: dict[int | None, int]
    step: timedelta
    times: tuple[datetime, ...]
    series: dict[str, tuple[int, ...]]
    arrived: tuple[int, ...]
    told_by_step: tuple[int, ...]

    @property
    def finished(self) -> int:
        """Told requests that finished."""
        return self.told - sum(self.unfinished.values())


def outcomes(connection: duckdb.DuckDBPyConnection, selection: Selection, basis: Basis, step: timedelta) -> Outcomes:
    """Counts of a selection, exact; those that did not finish are always counted from rows."""
    times = steps(selection, step)
    arrived: dict[datetime, int] = {}
    told: dict[datetime, int] = {}
    for at, tells, count in records(connection, _arrivals(selection, basis, step)):
        arrived[moment(at)] = arrived.get(moment(at), 0) + count
        if tells:
            told[moment(at)] = told.get(moment(at), 0) + count
    unfinished: dict[str, dict[datetime, int]] = {}
    http: dict[int | None, int] = {}
    disconnected = edge = 0
    for at, reason, gone, passed, status, count in records(
        connection,
        f"select {start_of_step('start_time', step)}, finish_reason, client_disconnected, "
        "http_route is not null or http_status is not null or client_disconnected is not null, "
        "case when http_status in (429, 503) then http_status else http_status // 100 end, count(*) "
        f"from requests where quality = 'unfinished' and {selection.requests()} group by all",
    ):
        by_step = unfinished.setdefault(reason if reason in UNFINISHED else "error", {})
        by_step[moment(at)] = by_step.get(moment(at), 0) + count
        if gone and reason == "abort":
            disconnected += count
        if passed:
            edge += count
            http[status] = http.get(status, 0) + count
    return Outcomes(
        requests=sum(arrived.values()),
        told=sum(told.values()),
        unfinished={reason: sum(unfinished[reason].values()) for reason in UNFINISHED if reason in unfinished},
        disconnected=disconnected,
        edge=edge,
        http=dict(sorted(http.items(), key=lambda item: (item[0] is None, item[0] or 0))),
        step=step,
        times=times,
        series={
            reason: tuple(unfinished[reason].get(time, 0) for time in times)
            for reason in UNFINISHED
            if reason in unfinished
        },
        arrived=tuple(arrived.get(time, 0) for time in times),
        told_by_step=tuple(told.get(time, 0) for time in times),
    )


def _arrivals(selection: Selection, basis: Basis, step: timedelta) -> str:
    marks = ", ".join(literal(mark) for mark in NO_REQUESTS_OF_THEIR_OWN)
    own = f"coalesce(quality, '') not in ({marks})"
    if basis == "rows":
        return (
            f"select {start_of_step('start_time', step)}, source <> 'stock', count(*) from requests "
            f"where {own} and {selection.requests()} group by all"
        )
    stored = rollups(selection, ["requests"], "time, source, count, quality", coarsest=step)
    return (
        f"select {start_of_step('time', step)}, source <> 'stock', sum(count)::bigint from ({stored}) "
        f"where {own} group by all"
    )
