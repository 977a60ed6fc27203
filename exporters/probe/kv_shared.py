"""Blocks at the heads of requests that others hold as well: how often each was counted too often. On vLLM's objects.

A look at every block of every head would cost more than the sample may: so a head that was looked at once is known as
long as its request keeps it, and equal heads (a system prompt, the children of n > 1) are one object here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import Any

BLOCKS_A_LOOK = 4
"""Blocks of a list that are copied and compared in the time of one look at a block."""

Blocks = list[Any]
Shared = tuple[int, Blocks, int]
"""(Bucket, blocks of a request, index of the first that is not null), where the first has other holders as well."""


class _Head:
    """A run of shared blocks at the start of a request's own, and the buckets of its holders, one bit each."""

    __slots__ = ("blocks", "buckets")

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.buckets = 0


class SharedHeads:
    """Of one KV-cache group. ``nulls_anywhere``: null blocks are not only in front, so nothing is known of a list."""

    def __init__(self, nulls_anywhere: bool) -> None:
        self._nulls_anywhere = nulls_anywhere
        self._known: dict[int, tuple[Blocks, int, _Head]] = {}
        """By the identity of a request's list, which is held here and thus no other's."""

    def take_repeats(self, shared: Iterable[Shared], by_bucket: list[int], budget: int) -> tuple[int, int] | None:
        """Takes repeated blocks out of ``by_bucket``: (repeats over all buckets, what is left of the budget).

        Null where more looks would be needed; what was learned until then is kept for the next time.
        """
        known, self._known = self._known, {}
        heads: dict[int, _Head] = {}
        families: dict[int, list[_Head]] = {}
        references = [0] * len(by_bucket)
        for bucket, blocks, start in shared:
            found = known.get(id(blocks))
            if found is not None and found[1] == start and _still(blocks, start, found[2]):
                head = found[2]
                self._known[id(blocks)] = found
            else:
                if self._nulls_anywhere:
                    blocks = [block for block in blocks if not block.is_null]
                    if not blocks:
                        continue
                if budget < 0:
                    self._known = {**known, **self._known}
                    return None
                head, looked_at = self._look(blocks, start, families.get(id(blocks[start]), ()))
                budget -= looked_at // BLOCKS_A_LOOK
                if not self._nulls_anywhere:
                    self._known[id(blocks)] = blocks, start, head
            if id(head) not in heads:
                head.buckets = 0
                heads[id(head)] = head
                families.setdefault(id(head.blocks[0]), []).append(head)
            head.buckets |= 1 << bucket
            references[bucket] += len(head.blocks)
        return self._count(families.values(), references, by_bucket, budget)

    def _look(self, blocks: Blocks, start: int, family: Iterable[_Head]) -> tuple[_Head, int]:
        """The head of a list, one of the family where they are equal; and how many blocks that took."""
        end = len(blocks) if self._nulls_anywhere else bisect_left(blocks, True, start + 1, key=_unshared)
        mine, looked_at = blocks[start:end], end - start
        for head in family:
            if len(head.blocks) == len(mine) and head.blocks[-1] is mine[-1]:
                looked_at += len(mine)
                if head.blocks == mine:
                    return head, looked_at
        return _Head(mine), looked_at

    @staticmethod
    def _count(
        families: Iterable[list[_Head]], references: list[int], by_bucket: list[int], budget: int
    ) -> tuple[int, int] | None:
        distinct, everywhere = [0] * len(by_bucket), 0
        numbers = range(len(by_bucket))
        for family in families:
            if len(family) == 1:
                head = family[0]
                everywhere += len(head.blocks)
                for bucket in numbers:
                    if head.buckets >> bucket & 1:
                        distinct[bucket] += len(head.blocks)
                continue
            seen: dict[int, set[int]] = {}
            for head in family:
                budget -= len(head.blocks) * head.buckets.bit_count()
                if budget < 0:
                    return None
                for bucket in numbers:
                    if head.buckets >> bucket & 1:
                        seen.setdefault(bucket, set()).update(map(id, head.blocks))
            everywhere += len(set().union(*seen.values()))
            for bucket, ids in seen.items():
                distinct[bucket] += len(ids)
        for bucket, count in enumerate(distinct):
            by_bucket[bucket] -= references[bucket] - count
        return sum(references) - everywhere, budget


def _still(blocks: Blocks, start: int, head: _Head) -> bool:
    """Whether the head ends where it did: vLLM only appends to a list, and whoever shares it comes and goes."""
    end = start + len(head.blocks)
    return blocks[end - 1].ref_cnt > 1 and (end == len(blocks) or blocks[end].ref_cnt == 1)


def _unshared(block: Any) -> bool:
    return bool(block.ref_cnt == 1)
