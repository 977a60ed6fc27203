"""Random histories on vLLM's own schedulers: what `kv.KvReader` reads against a walk of every block of every request.

Runs under an interpreter that has vLLM, with `src` and `benchmarks` on the path; prints one JSON line a shape: how many
looks were compared and what the history had in it. Ends with an error at the first difference.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import schedulers
from schedulers import Engine, Shape, VirtualTime
from vllm_slo.exporters.probe import kv
from vllm_slo.exporters.probe.kv import KvReader, KvState

NAMES, UPPERS = ("short", "medium", "long"), (60, 200)


def groups_of(kind: str, block_size: int) -> list[Any]:
    """KV-cache groups: what models of today have."""
    import torch
    from vllm.v1.kv_cache_interface import (
        CrossAttentionSpec,
        FullAttentionSpec,
        KVCacheGroupSpec,
        MambaSpec,
        SlidingWindowSpec,
    )

    heads = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
    full = FullAttentionSpec(block_size=block_size, **heads)
    window = SlidingWindowSpec(block_size=block_size, sliding_window=3 * block_size, **heads)
    # Half the heads: the page is as large with twice the tokens.
    wide = SlidingWindowSpec(block_size=2 * block_size, sliding_window=4 * block_size, **heads)
    mamba = MambaSpec(block_size=65536, shapes=((1,),), dtypes=(torch.float32,), page_size_padded=64)
    specs = {
        "full": [full],
        "window": [full, window],
        "two windows": [full, window, window],
        "two sizes": [full, wide],
        "mamba": [full, mamba],
        "cross": [full, CrossAttentionSpec(block_size=block_size, **heads)],
        "two ranks": [FullAttentionSpec(block_size=block_size, dcp_sharded=True, **heads)],
    }[kind]
    return [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)]


def scheduler_of(shape: Shape, kind: str) -> Any:
    """The scheduler of `schedulers`, with a KV-cache manager of other groups."""
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

    scheduler = schedulers.make_scheduler(shape)
    if kind != "full":
        config = KVCacheConfig(
            num_blocks=shape.num_blocks, kv_cache_tensors=[], kv_cache_groups=groups_of(kind, shape.block_size)
        )
        ranks = 2 if kind == "two ranks" else 1
        sizes = [ranks * group.kv_cache_spec.block_size for group in config.kv_cache_groups]
        scheduler.kv_cache_manager = KVCacheManager(
            kv_cache_config=config,
            max_model_len=shape.max_model_len,
            scheduler_block_size=max(sizes),
            hash_block_size=min(sizes),
            enable_caching=shape.prefix_caching and kind != "cross",
            log_stats=True,
            dcp_world_size=ranks,
        )
    return scheduler


@dataclass
class Walk:
    """The same by looking at every block."""

    used: int = 0
    cached: int = 0
    slots: int = 0
    wasted: int = 0
    shared: int = 0
    unnamed: int = 0


def walk(scheduler: Any) -> tuple[Walk, dict[str, int], dict[str, int]]:
    """(Counts, distinct blocks by bucket, blocks by request)."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    filled: dict[int, int] = {}
    size_of: dict[int, int] = {}
    holders: dict[int, int] = defaultdict(int)
    buckets: dict[str, set[int]] = {name: set() for name in NAMES}
    held: dict[str, int] = defaultdict(int)
    for one in manager.coordinator.single_type_managers:
        spec = type(one.kv_cache_spec).__name__
        size = 0 if spec in ("MambaSpec", "CrossAttentionSpec") else one.block_size
        for request_id, blocks in one.req_to_blocks.items():
            request = scheduler.requests[request_id]
            name = NAMES[sum(request.num_prompt_tokens > upper for upper in UPPERS)]
            for index, block in enumerate(blocks):
                if block.is_null:
                    continue
                size_of[block.block_id] = size
                holders[block.block_id] += 1
                buckets[name].add(block.block_id)
                held[request_id] += 1
                inside = max(0, min(size, request.num_computed_tokens - index * size))
                filled[block.block_id] = max(filled.get(block.block_id, 0), inside)
    found = Walk(shared=sum(count > 1 for count in holders.values()))
    for block in pool.blocks[1:]:
        if block.ref_cnt == 0:
            found.cached += block.block_hash is not None
            continue
        found.used += 1
        if block.block_id not in size_of:
            found.unnamed += 1
        size = size_of.get(block.block_id, scheduler.block_size)
        found.slots += size
        found.wasted += size - filled.get(block.block_id, size)
    return found, {name: len(ids) for name, ids in buckets.items()}, held


def compare(reader: KvReader, scheduler: Any) -> tuple[KvState, Walk]:
    """One look with both; fails on any difference."""
    state = reader.read()
    found, by_bucket, held = walk(scheduler)
    most = max(held.values(), default=0)
    ours = (state.blocks_used, state.blocks_cached, state.slots, state.slots_wasted, state.blocks_by_bucket)
    theirs = (found.used, found.cached, found.slots, found.wasted, by_bucket)
    if ours != theirs or state.largest_holder_blocks != most or (most and held[state.largest_holder or ""] != most):
        raise SystemExit(f"read {ours} {state.largest_holder_blocks}\nwalk {theirs} {most} {found}")
    if state.blocks_total != state.blocks_used + state.blocks_free:
        raise SystemExit("total is not used and free")
    return state, found


def encode(scheduler: Any) -> None:
    """Gives running requests the blocks of an encoder's output, as a model that listens would."""
    manager = scheduler.kv_cache_manager
    for request in scheduler.running:
        if request.request_id not in manager.coordinator.single_type_managers[1].req_to_blocks:
            manager.coordinator.single_type_managers[1].allocate_new_blocks(request.request_id, 40, 40)


def history(shape: Shape, kind: str, seed: int, steps: int, defer: bool = False) -> dict[str, Any]:
    """Requests that share prompts, come, grow, are preempted and aborted, with a look after most steps."""
    chance = random.Random(seed)
    scheduler = scheduler_of(shape, kind)
    engine = Engine(shape, VirtualTime(), scheduler=scheduler)
    engine.accepted_drafts = 1
    # As with a KV connector that reads blocks of ended requests while a step is in flight.
    scheduler.defer_block_free = defer
    reader = KvReader(scheduler, NAMES, UPPERS)
    tally: dict[str, Any] = {"looks": 0, "shared": 0, "unnamed": 0, "waste": 0, "cached": 0, "preemptions": 0}
    prompts: list[list[int]] = [[3] * 64]
    before = scheduler._preempt_request

    def preempt(*arguments: Any, **more: Any) -> Any:
        tally["preemptions"] += 1
        return before(*arguments, **more)

    scheduler._preempt_request = preempt
    for _ in range(steps):
        while len(scheduler.requests) < 14 and chance.random() < 0.6:
            base = chance.choice(prompts)
            prompt = base[: chance.randrange(1, len(base) + 1)] + [
                chance.randrange(3, 9) for _ in range(chance.choice((0, 0, 1, 16, 40, 90)))
            ]
            prompts = [*prompts[-12:], prompt]
            # The child of n = 2: all of the prompt again, before the first has computed it.
            for _ in range(chance.choice((1, 1, 2))):
                engine.add(prompt, chance.randrange(1, 120))
        if scheduler.requests and chance.random() < 0.05:
            engine.abort(chance.choice(list(scheduler.requests)), during_step=chance.random() < 0.5)
        engine.step()
        if kind == "cross":
            encode(scheduler)
        _, found = compare(reader, scheduler)
        tally["looks"] += 1
        tally["shared"] += found.shared > 0
        tally["unnamed"] += found.unnamed > 0
        tally["waste"] += found.wasted > 0
        tally["cached"] += found.cached > 0
    return tally


def main() -> None:
    """Every kind of cache on both schedulers; the number of steps of each is the first argument."""
    steps = int(sys.argv[1])
    small = Shape(max_num_seqs=8, max_num_batched_tokens=96, num_blocks=60, block_size=16, max_model_len=4096)
    for kind in ("full", "window", "two windows", "two sizes", "mamba", "cross", "two ranks"):
        for asynchronous in (False, True):
            blocks = 60 if kind == "full" else 120
            shape = replace(small, asynchronous=asynchronous, num_blocks=blocks, in_flight=2)
            print(json.dumps({"kind": kind, "async": asynchronous, **history(shape, kind, 7, steps)}), flush=True)
    deferred = replace(small, asynchronous=True)
    print(json.dumps({"kind": "deferred", "async": True, **history(deferred, "full", 7, steps, True)}), flush=True)
    drafts = replace(small, draft_tokens=3)
    print(json.dumps({"kind": "drafts", "async": False, **history(drafts, "full", 8, steps)}), flush=True)
    uncached = replace(small, prefix_caching=False)
    print(json.dumps({"kind": "no prefix cache", "async": False, **history(uncached, "full", 9, steps)}), flush=True)
    kv.SLICE = 16
    scheduler = scheduler_of(small, "full")
    engine = Engine(small, VirtualTime(), scheduler=scheduler)
    for length in (100, 130, 160):
        engine.add(length, 3)
    engine.run()
    reader = KvReader(scheduler, NAMES, UPPERS)
    counts = [reader.read().blocks_cached for _ in range(4)]
    print(json.dumps({"kind": "slices", "counts": counts, "walk": walk(scheduler)[0].cached}), flush=True)


if __name__ == "__main__":
    main()
