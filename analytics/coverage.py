"""Spans received against the requests that vLLM itself counted as finished, for each instance."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import duckdb

from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection, literal
from vllm_slo.analytics.series import moment

LONGEST_REQUEST = timedelta(hours=6)
"""Rows are looked for from so long before the first sample: a request that finished after it had to start somewhere."""


@dataclass(frozen=True)
class Coverage:
    """One instance between its first and last sample of the range (``since``, ``until``]; the whole range without any.

    ``received`` counts every request and further completion that ended then, whatever its quality and context bucket:
    vLLM counts them all. ``finished`` is what vLLM's counters rose by, restarts allowed for; None with fewer than two
    samples.
    ``received`` can pass ``finished`` by the few requests that end while a scrape is answered; more is a sign of two
    servers under one name. ``failed`` of the finished ended as `error` or `abort`; None where vLLM does not count them.
    ``uncounted`` more were received that vLLM's counters leave out, by finish reason: clients gave them up, or they
    never reached the engine. Only the probe tells of them.
    ``reason`` says why coverage is unknown, None where it is known.
    """

    instance: str
    received: int
    finished: int | None
    since: datetime
    until: datetime
    failed: int | None = None
    reason: str | None = None
    uncounted: dict[str, int] = field(default_factory=dict)

    @property
    def covered(self) -> int | None:
        """Finished requests whose span was received, at most all of them; None where that is unknown."""
        return None if self.finished is None or self.reason is not None else min(self.received, self.finished)


NOT_SCRAPED = "fewer than two samples; scrape its /metrics (up --scrape HOST:PORT=INSTANCE)"
UNMATCHED = (
    "no span names this instance, while others or none are named; start vLLM with "
    "OTEL_RESOURCE_ATTRIBUTES=service.instance.id=INSTANCE, the name of its scrape target"
)


_UNCOUNTED = (
    "quality = 'unfinished' and (finish_reason in ('rejected', 'invalid', 'failed') "
    "or (finish_reason = 'abort' and coalesce(records, '') not like '%stock%'))"
)
"""SQL: requests that vLLM does not count as finished. It writes a span, a `stock` record, of all those it counts."""


def coverage(connection: duckdb.DuckDBPyConnection, selection: Selection) -> tuple[Coverage, ...]:
    """Coverage of every instance that has samples or rows in the selection, by name; not of rows without an instance.

    A counter that falls, or whose process started anew, was reset: it then rose by its new value. Buckets of the
    selection play no role. An instance without any row, while rows of the range belong to no scraped instance, is
    unknown, not uncovered: the two sides do not agree on names.
    """
    chosen = replace(selection, buckets=None, sources=None)
    scraped = {
        instance: (round(finished), moment(first), moment(last), None if failed is None else round(failed))
        for instance, finished, first, last, failed in records(
            connection,
            "with steps as (select service_instance_id as instance, time, requests_finished_total as value, "
            "requests_finished_error_total as errors, lag(value) over engine as before, "
            "lag(errors) over engine as errors_before, "
            "process_start_time > lag(process_start_time) over engine as restarted "
            f"from engine_samples where {chosen.within('time')} and {chosen.engines()} "
            "and source = 'scrape' and requests_finished_total is not null "
            "window engine as (partition by service_instance_id, model, engine order by time)) "
            "select instance, sum(case when before is null then 0 "
            "when restarted or value < before then value else value - before end), "
            "epoch_us(min(time)), epoch_us(max(time)), sum(case when before is null or errors is null then null "
            "when restarted or value < before or errors < errors_before then errors "
            "else errors - errors_before end) from steps group by instance having min(time) < max(time)",
        )
    }
    whole = f"({chosen.within('end_time')})"
    windows = " ".join(
        f"when {literal(instance)} then end_time > {literal(first)} and end_time <= {literal(last)}"
        for instance, (_, first, last, _) in scraped.items()
    )
    ended = f"case service_instance_id {windows} else {whole} end" if windows else whole
    wanted = (
        f"from requests where start_time >= {literal(chosen.start - LONGEST_REQUEST)} "
        f"and start_time < {literal(chosen.end)} and {chosen.dimensions()} and source <> 'client'"
    )
    received: dict[str | None, int] = dict(
        records(
            connection,
            f"select service_instance_id, count(*) filter (where {ended}) {wanted} group by service_instance_id",
        )
    )
    uncounted: dict[str | None, dict[str, int]] = {}
    for instance, reason, count in records(
        connection,
        f"select service_instance_id, case when {_UNCOUNTED} then finish_reason end, count(*) filter (where {ended}) "
        f"{wanted} and quality in ('superseded', 'late_record', 'unfinished') "
        f"and (quality <> 'unfinished' or {_UNCOUNTED}) group by 1, 2",
    ):
        received[instance] -= count
        if reason is not None and count:
            uncounted.setdefault(instance, {})[reason] = count
    unmatched = any(count for instance, count in received.items() if instance not in scraped)
    unscraped = {instance for instance, count in received.items() if instance and count and instance not in scraped}
    found = [
        Coverage(name, received.get(name, 0), *given, UNMATCHED if unmatched and not received.get(name) else None)
        for name, given in scraped.items()
    ]
    found += [Coverage(name, received[name], None, chosen.start, chosen.end, reason=NOT_SCRAPED) for name in unscraped]
    told = (replace(covered, uncounted=uncounted.get(covered.instance, {})) for covered in found)
    return tuple(sorted(told, key=lambda covered: covered.instance))
