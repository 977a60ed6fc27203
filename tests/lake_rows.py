"""Rows for the lake's tables, as the decoders give them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa

from vllm_slo.exporters.schema import ENGINE_SAMPLES, REQUESTS, SPANS, Table

NOON = datetime(2026, 11, 30, 12, tzinfo=UTC)
NO_SPANS = SPANS.schema.empty_table()
NO_REQUESTS = REQUESTS.schema.empty_table()


def rows(table: Table, given: Iterable[Mapping[str, Any]]) -> pa.Table:
    """Rows of a table: what is given, null elsewhere; `day` from the table's time column."""
    complete = [{"day": g[table.time_column].date(), **g} if table.partition_by else dict(g) for g in given]
    return pa.Table.from_pylist(complete, schema=table.schema)


def request(number: int, **given: Any) -> dict[str, Any]:
    """One request; the number makes its ids and spaces the requests a second apart."""
    start = given["start_time"] if "start_time" in given else NOON + timedelta(seconds=number)
    return {
        "start_time": start,
        "end_time": start + timedelta(seconds=2),
        "request_id": f"cmpl-{number:032x}-0",
        "trace_id": number.to_bytes(16, "big"),
        "span_id": number.to_bytes(8, "big"),
        "source": "stock",
        "service_instance_id": "a",
        "shard": "a",
        "model": "m",
        "prompt_tokens": 100,
        "completion_tokens": 11,
        "time_to_first_token_seconds": Decimal("0.5"),
        "request_duration_seconds": Decimal("1.5"),
        "queue_seconds": Decimal("0.2"),
        "prefill_seconds": Decimal("0.25"),
        "decode_seconds": Decimal("1.0"),
        "received_time": NOON + timedelta(hours=1),
        **given,
    }


def requests(numbers: Iterable[int], **given: Any) -> pa.Table:
    """The numbered requests."""
    return rows(REQUESTS, (request(number, **given) for number in numbers))


def random_requests(count: int, seed: int, start: datetime = NOON, over: timedelta = timedelta(hours=3)) -> pa.Table:
    """Requests with random ids, times, labels, lengths and durations, some of them marked or incomplete."""
    chance = random.Random(seed)

    def seconds(median: float) -> Decimal | None:
        value = chance.lognormvariate(0, 1.5) * median
        return chance.choice([None, Decimal(0)]) if chance.random() < 0.05 else Decimal(f"{value:.9f}")

    return rows(
        REQUESTS,
        (
            request(
                chance.getrandbits(60),
                start_time=start + timedelta(microseconds=chance.randrange(int(over.total_seconds() * 1e6))),
                shard=chance.choice(["a", "b", None]),
                model=chance.choice(["m", "n", None]),
                priority=chance.choice([0, 1, None]),
                source=chance.choice(["stock", "client"]),
                prompt_tokens=chance.choice([None, 1, 4096, 4097, 40_000, 128_000, 500_000]),
                completion_tokens=chance.choice([None, 0, 1, 2, 3, 700]),
                status=chance.choice(["unset", "ok", "error", None]),
                finish_reason=chance.choice(["stop", "abort", "error", "rejected", None]),
                time_to_first_token_seconds=seconds(0.3),
                request_duration_seconds=seconds(3),
                queue_seconds=seconds(0.05),
                prefill_seconds=seconds(0.2),
                decode_seconds=seconds(2),
                quality=chance.choice([None, None, None, "negative_time", "missing_milestone", "unfinished"]),
                **(
                    {"queue_step_seconds": seconds(0.01), "decode_work_seconds": seconds(1)}
                    if chance.random() < 0.3
                    else {}
                ),
            )
            for _ in range(count)
        ),
    )


def spans(numbers: Iterable[int], **given: Any) -> pa.Table:
    """The numbered spans that are no requests."""
    return rows(
        SPANS,
        (
            {
                "start_time": NOON + timedelta(seconds=number),
                "end_time": NOON + timedelta(seconds=number + 1),
                "trace_id": number.to_bytes(16, "big"),
                "span_id": number.to_bytes(8, "big"),
                "name": "gateway",
                "kind": "server",
                "received_time": NOON,
                **given,
            }
            for number in numbers
        ),
    )


def samples(values: Iterable[tuple[str, float, float]]) -> pa.Table:
    """Engine samples: (instance, seconds after noon, finished requests)."""
    return rows(
        ENGINE_SAMPLES,
        (
            {
                "time": NOON + timedelta(seconds=at),
                "source": "scrape",
                "service_instance_id": instance,
                "requests_finished_total": finished,
            }
            for instance, at, finished in values
        ),
    )
