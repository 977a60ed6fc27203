"""KV blocks in use against slots that hold a token, one engine at a time: the gap is internal fragmentation."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import duckdb

from vllm_slo.analytics.engine_series import BEST_SOURCE, engine_names
from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection
from vllm_slo.analytics.series import moment, start_of_step, steps

_USED = "coalesce(kv_blocks_used / nullif(kv_blocks_total, 0), kv_cache_usage_ratio)"
_STORED = "kv_tokens_stored / nullif(kv_blocks_total * kv_block_size_tokens, 0)"
_CACHED = "kv_blocks_cached / nullif(kv_blocks_total, 0)"


@dataclass(frozen=True)
class KvUse:
    """One engine over time; shares of its KV blocks (0 to 1), means of each step, None without a sample.

    ``used``: blocks in use. ``stored``: slots that hold a computed token, as a share of all slots; ``used - stored``
    is internal fragmentation. ``cached``: free blocks that keep content for reuse. The last two are None throughout
    where only vLLM's own metrics are known (``source`` is `scrape`; it is `probe` where any sample is).
    ``used_max`` is the highest sample. ``wasted_ratio``: slots without a token over slots of used blocks, both summed
    over the samples; None where unknown or no block was ever used. ``blocks`` is the engine's number of blocks.
    """

    name: str
    source: str
    times: tuple[datetime, ...]
    used: tuple[float | None, ...]
    stored: tuple[float | None, ...]
    cached: tuple[float | None, ...]
    used_max: float | None
    wasted_ratio: float | None
    blocks: float | None

    @property
    def occupancy_known(self) -> bool:
        """Whether the samples tell how many slots hold a token."""
        return any(value is not None for value in self.stored)


def kv_use(connection: duckdb.DuckDBPyConnection, selection: Selection, step: timedelta) -> tuple[KvUse, ...]:
    """Every engine with samples of its KV cache, by name.

    The probe's samples where a server has any in a step, else those that were scraped.
    """
    found = records(
        connection,
        "with sampled as (select service_instance_id as instance, engine, source, shard, "
        f"{start_of_step('time', step)} as step, {_USED} as used, {_STORED} as stored, {_CACHED} as cached, "
        "kv_slots_wasted as wasted, kv_slots_wasted + kv_tokens_stored as slots, kv_blocks_total as blocks "
        f"from engine_samples where {selection.within('time')} and {selection.engines()}), "
        "means as (select instance, engine, source, max(shard) as shard, step, avg(used) as used, "
        "avg(stored) as stored, avg(cached) as cached, max(used) as most, sum(wasted) as wasted, sum(slots) as slots, "
        "max(blocks) as blocks from sampled where used is not null group by instance, engine, source, step) "
        "select coalesce(max(shard) over (partition by instance), instance) as name, instance, engine, step, source, "
        f"used, stored, cached, most, wasted, slots, blocks from means {BEST_SOURCE} order by all",
    )
    engines: dict[tuple[str, str, str | None], list[tuple[Any, ...]]] = {}
    for name, instance, engine, *rest in found:
        engines.setdefault((name, instance, engine), []).append(tuple(rest))
    names = engine_names(list(engines))
    times = steps(selection, step)
    return tuple(_kv_use(names[key], times, rows) for key, rows in engines.items())


def _kv_use(name: str, times: tuple[datetime, ...], rows: list[tuple[Any, ...]]) -> KvUse:
    """One engine; a row is step, source, means of used, stored and cached, highest use, slots wasted, slots, blocks."""
    at = {moment(row[0]): row for row in rows}
    used, stored, cached = (tuple(at[time][i] if time in at else None for time in times) for i in (2, 3, 4))
    highest, wasted, slots, blocks = ([row[i] for row in rows if row[i] is not None] for i in (5, 6, 7, 8))
    return KvUse(
        name=name,
        source="probe" if any(row[1] == "probe" for row in rows) else "scrape",
        times=times,
        used=used,
        stored=stored,
        cached=cached,
        used_max=max(highest, default=None),
        wasted_ratio=sum(wasted) / sum(slots) if any(slots) else None,
        blocks=max(blocks, default=None),
    )
