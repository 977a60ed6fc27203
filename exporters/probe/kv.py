"""What a scheduler's KV blocks hold: used, free, cached, wasted, by context bucket. Works on vLLM's live objects.

A call costs a step of its time, so it looks at requests, not at blocks:

* used = total - 1 - free; the one is vLLM's null block.
* A request with n blocks of s tokens and c computed ones wastes max(0, n * s - c) slots: its blocks fill from the left,
  and whatever left a sliding window was full. Blocks that requests share are full, hence never wasted.
* Under asynchronous scheduling c counts the tokens of steps in flight: stored means computed or about to be. Draft
  tokens count until they are rejected.
* A used block that no request names (sent to another engine, waiting for a step in flight) counts as stored.
* Mamba states, cross-attention, circular buffers and blocks outside of the device's pool hold no token each: they are
  used blocks, but neither slots nor waste. A token in two attention groups has two slots.
* Per bucket, a block shared within the bucket counts once, one shared by several buckets once for each. Shared blocks
  are found from reference counts: the head of a request's list is shared, the rest is its own, and heads that begin
  with different blocks have none in common (`kv_shared`); where the sum over requests shows that this is not so, all
  are walked.
  Null where that would take more than WALK_LIMIT looks.
* Free blocks with cached content are counted one SLICE of the pool a call, so the number of a pool of more blocks is up
  to (blocks / SLICE) calls old.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_slo.exporters.probe.kv_shared import Shared, SharedHeads

SLICE = 4096
WALK_LIMIT = 20_000

_ATTENTION = frozenset({"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"})
_NOT_BY_TOKEN = frozenset({"CircularBufferSpec", "KpoolTailSpec", "CrossAttentionSpec", "MambaSpec"})
_NULLS_ANYWHERE = frozenset({"RSWASpec", "MambaSpec", "HiSparseResidentSpec"})


@dataclass(frozen=True, slots=True)
class KvState:
    """What ``KvReader.read`` found. ``slots`` are those of used blocks; null where it cannot be told in time.

    ``blocks_by_bucket`` names every bucket. ``largest_holder`` is an engine request id, null when nothing is held.
    """

    blocks_total: int
    blocks_used: int
    blocks_free: int
    blocks_cached: int
    block_size_tokens: int | None
    slots: int | None
    slots_wasted: int
    blocks_by_bucket: dict[str, int] | None
    largest_holder: str | None
    largest_holder_blocks: int

    @property
    def tokens_stored(self) -> int | None:
        """Slots of used blocks that hold a computed token."""
        return None if self.slots is None else self.slots - self.slots_wasted

    @property
    def fragmentation_ratio(self) -> float | None:
        """Wasted slots over slots of used blocks; null when there are none."""
        return self.slots_wasted / self.slots if self.slots else None

    @property
    def usage_ratio(self) -> float | None:
        """Used blocks over all."""
        return self.blocks_used / self.blocks_total if self.blocks_total else None


class _Group:
    """One KV-cache group: its table of blocks, tokens in a block, and what may be assumed of it."""

    __slots__ = ("block_size", "counted", "heads", "nulls_anywhere", "table")

    def __init__(self, manager: Any) -> None:
        kinds = {kind.__name__ for kind in type(manager.kv_cache_spec).__mro__}
        self.table: dict[str, list[Any]] = manager.req_to_blocks
        self.block_size = int(manager.block_size)  # times the ranks that share a sequence, unlike the spec's
        self.counted = bool(kinds & _ATTENTION) and not kinds & _NOT_BY_TOKEN
        self.nulls_anywhere = bool(kinds & _NULLS_ANYWHERE)
        self.heads = SharedHeads(self.nulls_anywhere)


class _Held:
    """Blocks of one group, so far with every reference counted."""

    __slots__ = ("by_bucket", "lists", "shared")

    def __init__(self, buckets: int) -> None:
        self.by_bucket = [0] * buckets
        self.shared: list[Shared] = []
        self.lists: list[tuple[int, list[Any]]] = []


class KvReader:
    """Reads one scheduler. ``names`` and ``uppers`` are the context buckets, see ``meters.Buckets``."""

    def __init__(self, scheduler: Any, names: Sequence[str], uppers: Sequence[int]) -> None:
        self._scheduler = scheduler
        self._names = tuple(names)
        self._uppers = tuple(uppers)
        manager = scheduler.kv_cache_manager
        self._pool = manager.block_pool
        self._groups = [_Group(one) for one in manager.coordinator.single_type_managers if one.block_pool is self._pool]
        self._cached: dict[int, int] = {}
        self._next = 0

    def read(self) -> KvState:
        """The state now, exact on the scheduler's own thread; on another one a step may be half done meanwhile.

        Raises what vLLM's objects raise when they are not as expected.
        """
        pool, requests = self._pool, self._scheduler.requests
        total, free = pool.num_gpu_blocks - 1, pool.get_num_free_blocks()
        used = total - free
        holders: dict[str, int] = {}
        found: list[tuple[_Group, _Held]] = []
        wasted = 0
        for group in self._groups:
            held, waste = self._held(group, requests, holders)
            found.append((group, held))
            wasted += waste
        distinct = self._distinct(found, used)
        by_bucket = None
        if distinct is not None:
            sums = [sum(column) for column in zip(*(held.by_bucket for _, held in found), strict=True)]
            by_bucket = dict(zip(self._names, sums or [0] * len(self._names), strict=True))
        largest = max(holders, key=holders.__getitem__, default=None)
        sizes = {group.block_size for group in self._groups if group.counted}
        return KvState(
            blocks_total=total,
            blocks_used=used,
            blocks_free=free,
            blocks_cached=self._count_cached() if pool.enable_caching else 0,
            block_size_tokens=next(iter(sizes)) if len(sizes) == 1 else None,
            slots=self._slots(used, sizes, distinct),
            slots_wasted=wasted,
            blocks_by_bucket=by_bucket,
            largest_holder=largest,
            largest_holder_blocks=holders[largest] if largest is not None else 0,
        )

    def _held(self, group: _Group, requests: Any, holders: dict[str, int]) -> tuple[_Held, int]:
        """Every request's blocks of a group, and its wasted slots."""
        held, waste = _Held(len(self._names)), 0
        by_bucket, shared, lists, uppers = held.by_bucket, held.shared, held.lists, self._uppers
        size, counted, nulls_anywhere, find = group.block_size, group.counted, group.nulls_anywhere, requests.get
        first_group = not holders
        for request_id, blocks in tuple(group.table.items()):
            if not blocks or (request := find(request_id)) is None:
                continue
            count = len(blocks)
            if counted and (over := count * size - request.num_computed_tokens) > 0:
                waste += over
            bucket = bisect_left(uppers, request.num_prompt_tokens)
            first, start = blocks[0], 0
            if nulls_anywhere:
                count = sum(not block.is_null for block in blocks)
                shared.append((bucket, blocks, 0))
            else:
                if first.is_null:
                    start = _first_not_null(blocks)
                    count -= start
                    first = blocks[start] if count else None
                if first is not None and first.ref_cnt > 1:
                    shared.append((bucket, blocks, start))
            by_bucket[bucket] += count
            lists.append((bucket, blocks))
            if first_group:
                holders[request_id] = count
            else:
                holders[request_id] = holders.get(request_id, 0) + count
        return held, waste

    def _distinct(self, found: list[tuple[_Group, _Held]], used: int) -> list[int] | None:
        """Blocks of each group, shared ones once; ``by_bucket`` of each is mended. Null when that would take too long.

        No more blocks can be held than are used: when the shared heads do not account for what is too much, blocks
        further back are shared too. That takes two requests which computed the same content at the same time.
        """
        references = [sum(held.by_bucket) for _, held in found]
        budget = WALK_LIMIT
        counts = []
        for (group, held), total in zip(found, references, strict=True):
            if not held.shared:
                counts.append(total)
                continue
            left = group.heads.take_repeats(held.shared, held.by_bucket, budget)
            if left is None:
                return None
            repeats, budget = left
            counts.append(total - repeats)
        if sum(counts) <= used:
            return counts
        if sum(references) > WALK_LIMIT:
            return None
        counts, null = [], id(self._pool.null_block)
        for _, held in found:
            seen: list[set[int]] = [set() for _ in held.by_bucket]
            for bucket, blocks in held.lists:
                seen[bucket].update(map(id, blocks))
            for ids in seen:
                ids.discard(null)
            held.by_bucket[:] = map(len, seen)
            counts.append(len(set().union(*seen)))
        return counts

    def _slots(self, used: int, sizes: set[int], distinct: list[int] | None) -> int | None:
        if not sizes:
            return None
        skipped = [not group.counted for group in self._groups]
        if len(sizes) == 1 and not any(skipped):
            return used * next(iter(sizes))
        if distinct is None:
            return None
        if len(sizes) == 1:
            other = sum(count for count, skip in zip(distinct, skipped, strict=True) if skip)
            return (used - other) * next(iter(sizes))
        return sum(
            count * group.block_size for count, group in zip(distinct, self._groups, strict=True) if group.counted
        )

    def _count_cached(self) -> int:
        """Blocks without a holder that a prompt could still be served from."""
        start = self._next
        part = self._pool.blocks[start : start + SLICE]
        self._cached[start] = sum(block.block_hash is not None for block in part if not block.ref_cnt)
        self._next = start + SLICE if start + SLICE < self._pool.num_gpu_blocks else 0
        return sum(self._cached.values())


def _first_not_null(blocks: list[Any]) -> int:
    """Blocks that left a window are null, all of them in front."""
    low, high = 0, len(blocks)
    while low < high:
        middle = (low + high) // 2
        if blocks[middle].is_null:
            low = middle + 1
        else:
            high = middle
    return low
