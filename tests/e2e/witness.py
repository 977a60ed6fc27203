"""A plugin of the tests for a vLLM server: writes down what its scheduler really did, knowing nothing of the probe.

Loaded inside vLLM as a general plugin of its own (`witness_folder`), or called by whoever runs a scheduler without a
server. It appends JSON lines to the file that ``WITNESS_LOG`` names:

* ``{"add": id, "at": ns}``, ``{"finish": [ids], "at": ns}`` (aborts and errors), ``{"preempt": id, "lost": tokens}``
  (inside the step that follows)
* ``{"step": n, "at": ns, "tokens": {id: tokens}, "prefill": {id: computed}, "running": n, "waiting": n,
  "failed": bool, "budget": n, "cap": n}`` after `schedule`; ``at`` is its beginning, ``failed`` says that blocks were
  asked for in vain, ``prefill`` names those whose tokens are known ones (of the prompt, or computed again after a
  preemption) with how many of them are computed then
* ``{"update": n, "at": ns, "outputs": {id: new tokens}}`` after `update_from_output`
* ``{"stalled": n, "at": "start"}`` or ``"end"``: while the step was chosen, or its output taken in, the system took the
  processor away, so that two readings of the clock in there may be far apart
* ``{"walk": {...}, "probe": {...}}`` the KV blocks block by block, and what the probe says at the same moment
"""

from __future__ import annotations

import functools
import json
import os
import random
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BUCKETS = {"short": 600, "medium": 8192, "long": 1 << 40}
"""Largest prompt of each, such that the loads of the tests have some in all three."""
WALK_SHARE = 0.3
"""Of the updates, how many are followed by a walk over every block."""


def register() -> None:
    """Wraps the scheduler of this process, where a file is named."""
    path = os.environ.get("WITNESS_LOG")
    if path:
        Witness(Path(path)).watch()


def walk(scheduler: Any) -> dict[str, Any]:
    """What each block and each slot of it holds, looked at one by one; for attention over everything before."""
    manager = scheduler.kv_cache_manager
    (single,) = manager.coordinator.single_type_managers
    size, pool = single.block_size, manager.block_pool
    filled: dict[int, set[int]] = {}
    by_bucket: dict[str, set[int]] = {name: set() for name in BUCKETS}
    for request_id, blocks in single.req_to_blocks.items():
        request = scheduler.requests[request_id]
        bucket = next(name for name, upper in BUCKETS.items() if request.num_prompt_tokens <= upper)
        for index, block in enumerate(blocks):
            slots = filled.setdefault(block.block_id, set())
            slots.update(slot for slot in range(size) if index * size + slot < request.num_computed_tokens)
            by_bucket[bucket].add(block.block_id)
    used = {block.block_id for block in pool.blocks if not block.is_null and block.ref_cnt > 0}
    assert used == filled.keys(), "a block is used by nobody, or held and free"
    free = [block for block in pool.blocks if not block.is_null and block.ref_cnt == 0]
    slots_used = len(filled) * size
    stored = sum(map(len, filled.values()))
    return {
        "blocks_total": len(used) + len(free),
        "blocks_used": len(used),
        "blocks_free": len(free),
        "blocks_cached": sum(block.block_hash is not None for block in free),
        "slots": slots_used,
        "slots_wasted": slots_used - stored,
        "tokens_stored": stored,
        "fragmentation_ratio": (slots_used - stored) / slots_used if slots_used else None,
        "blocks_by_bucket": {name: len(blocks) for name, blocks in by_bucket.items()},
        "largest_holder_blocks": max(map(len, single.req_to_blocks.values()), default=0),
    }


def probe_says(scheduler: Any) -> dict[str, Any]:
    """The same by the probe."""
    from vllm_slo.exporters.probe.kv import KvReader

    state = KvReader(scheduler, tuple(BUCKETS), tuple(BUCKETS.values())).read()
    names = (*state.__dataclass_fields__, "tokens_stored", "fragmentation_ratio")
    return {name: getattr(state, name) for name in names}


class Witness:
    """Keeps the log; one in a process."""

    def __init__(self, path: Path) -> None:
        self.start(path)

    def start(self, path: Path) -> None:
        """From now on it writes to this file."""
        self._path = path
        self._file: Any = None
        self._steps: dict[int, int] = {}
        self._scheduled = 0
        self._failed = self._walk = False
        self._random = random.Random(1)
        self._between = self._updating = 0
        self._updated: int | None = None

    def watch(self) -> None:
        """Replaces the methods of vLLM's classes by ones that also write."""
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.sched.scheduler import Scheduler

        for name in ("add_request", "finish_requests", "_preempt_request", "schedule", "update_from_output"):
            self._wrap(Scheduler, name, getattr(self, f"_{name.strip('_')}"))
        self._wrap(Scheduler, "has_requests", self._has_requests)
        self._wrap(KVCacheManager, "allocate_slots", self._allocate_slots)

    @staticmethod
    def _wrap(kind: type, name: str, around: Callable[..., Any]) -> None:
        original = getattr(kind, name)

        # With the signature of the original: the probe looks whether it knows it.
        @functools.wraps(original)
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            return around(original, self, *args, **kwargs)

        setattr(kind, name, wrapped)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            self._file = self._path.open("a", buffering=1)
        self._file.write(json.dumps(line) + "\n")

    def _add_request(self, original: Any, scheduler: Any, request: Any) -> None:
        original(scheduler, request)
        self._write({"add": request.request_id, "at": time.monotonic_ns(), "prompt": request.num_prompt_tokens})

    def _finish_requests(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        at = time.monotonic_ns()
        finished = original(scheduler, *args, **kwargs)
        self._write({"finish": [request.request_id for request in finished], "at": at})
        return finished

    def _preempt_request(self, original: Any, scheduler: Any, request: Any, *args: Any, **kwargs: Any) -> None:
        self._write({"preempt": request.request_id, "lost": request.num_computed_tokens})
        original(scheduler, request, *args, **kwargs)

    def _allocate_slots(self, original: Any, manager: Any, *args: Any, **kwargs: Any) -> Any:
        blocks = original(manager, *args, **kwargs)
        self._failed |= blocks is None
        return blocks

    def _schedule(self, original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
        self._failed = False
        at = time.monotonic_ns()
        output = original(scheduler, *args, **kwargs)
        self._scheduled += 1
        if _switches() > self._between:
            self._write({"stalled": self._scheduled, "at": "start"})
        self._steps[id(output)] = self._scheduled
        running, waiting = scheduler.get_request_counts()
        self._write(
            {
                "step": self._scheduled,
                "at": at,
                "tokens": dict(output.num_scheduled_tokens),
                "prefill": {
                    request_id: scheduler.requests[request_id].num_computed_tokens
                    for request_id, tokens in output.num_scheduled_tokens.items()
                    if scheduler.requests[request_id].num_computed_tokens - tokens
                    < scheduler.requests[request_id].num_prompt_tokens
                    or tokens > 1 + len(output.scheduled_spec_decode_tokens.get(request_id, ()))
                },
                "running": running,
                "waiting": waiting,
                "failed": self._failed,
                "budget": scheduler.max_num_scheduled_tokens,
                "cap": scheduler.max_num_active_reqs,
            }
        )
        return output

    def _update_from_output(self, original: Any, scheduler: Any, output: Any, *args: Any, **kwargs: Any) -> Any:
        self._updating = _switches()
        result = original(scheduler, output, *args, **kwargs)
        at = time.monotonic_ns()
        self._updated = self._steps[id(output)]
        new = {each.request_id: len(each.new_token_ids) for outputs in result.values() for each in outputs.outputs}
        self._write({"update": self._steps.pop(id(output)), "at": at, "outputs": new})
        self._walk = self._random.random() < WALK_SHARE
        return result

    def _has_requests(self, original: Any, scheduler: Any) -> Any:
        # Between two steps, so that the time that a walk takes is in neither of them.
        if self._updated is not None:
            if _switches() > self._updating:
                self._write({"stalled": self._updated, "at": "end"})
            self._updated = None
        if self._walk:
            self._walk = False
            self._write({"probe": probe_says(scheduler), "walk": walk(scheduler)})
        self._between = _switches()
        return original(scheduler)


def _switches() -> int:
    """How often the system took the processor from this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nivcsw


def witness_folder(folder: Path) -> Path:
    """A folder to put on PYTHONPATH: vLLM finds this module in it as an installed plugin."""
    (folder / "witness.py").write_text(Path(__file__).read_text())
    about = folder / "witness-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: witness\nVersion: 0\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nwitness = witness:register\n")
    return folder
