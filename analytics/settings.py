"""What a configuration sets of queries and of retention. Loads no library, so that reading a configuration is quick."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class QuerySettings:
    """Limits of one connection: memory in DuckDB's notation, threads (None: every core), seconds a query may run."""

    memory_limit: str = "2GiB"
    threads: int | None = None
    timeout_seconds: float = 60.0


@dataclass(frozen=True)
class RetentionSettings:
    """How long rows stay, in whole days before today, and how large the lake may grow.

    ``total_bytes``: above it the oldest days of `requests` and `spans` go first; today's never do. Null: no limit.
    """

    requests_days: int = 30
    spans_days: int = 7
    engine_samples_days: int = 30
    rollups_minute_days: int = 7
    rollups_hour_days: int = 90
    rollups_day_days: int = 800
    total_bytes: int | None = None
