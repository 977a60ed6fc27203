"""The KV reader on vLLM's own block tables, against a walk of every block of every request."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from vllm_slo.exporters.probe.kv import KvReader, KvState

ROOT = Path(__file__).resolve().parent.parent.parent.parent
KINDS = ("full", "window", "two windows", "two sizes", "mamba", "cross", "two ranks")


@pytest.fixture(scope="session")
def histories(vllm_python: str) -> list[dict[str, Any]]:
    """What `kv_twin.py` prints: it ends with an error where the reader and the walk differ."""
    done = subprocess.run(
        [vllm_python, str(Path(__file__).with_name("kv_twin.py")), "250"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / name) for name in ("src", "benchmarks"))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.vllm
class TestHistories:
    """Prefix sharing, preemption, chunked prefill, aborts, on both schedulers."""

    def test_every_look_equals_the_walk_for_every_kind_of_cache(self, histories: list[dict[str, Any]]) -> None:
        for kind in KINDS:
            for asynchronous in (False, True):
                (found,) = [h for h in histories if h["kind"] == kind and h["async"] == asynchronous]
                assert found["looks"] == 250
                assert found["waste"] > 200

    def test_the_histories_had_what_they_are_for(self, histories: list[dict[str, Any]]) -> None:
        by_kind = {(h["kind"], h.get("async")): h for h in histories}
        for asynchronous in (False, True):
            assert by_kind["full", asynchronous]["preemptions"] > 2
            for kind in ("full", "window", "two windows", "two sizes", "two ranks"):
                assert by_kind[kind, asynchronous]["shared"] > 100
                assert by_kind[kind, asynchronous]["cached"] > 100
        assert by_kind["deferred", True]["unnamed"] > 0
        assert by_kind["drafts", False]["waste"] > 200

    def test_a_large_pool_is_counted_a_slice_a_call(self, histories: list[dict[str, Any]]) -> None:
        (found,) = [h for h in histories if h["kind"] == "slices"]
        assert found["counts"][0] < found["walk"]
        assert found["counts"][-1] == found["walk"]


@dataclass(eq=False)
class Block:
    """As much of vLLM's KVCacheBlock as the reader looks at."""

    ref_cnt: int = 1
    is_null: bool = False
    block_hash: bytes | None = None


class FullAttentionSpec:
    """Known by its name."""


@dataclass
class Request:
    """As much of vLLM's."""

    num_prompt_tokens: int
    num_computed_tokens: int


@dataclass
class Stage:
    """A scheduler that holds these blocks for these requests, with as many free blocks as there are in `free`."""

    table: dict[str, list[Block]]
    requests: dict[str, Request]
    used: int
    free: int = 10
    kv_cache_spec: Any = field(default_factory=FullAttentionSpec)
    block_size: int = 16
    enable_caching: bool = False

    @property
    def kv_cache_manager(self) -> Stage:
        return self

    coordinator = block_pool = kv_cache_manager

    @property
    def single_type_managers(self) -> list[Stage]:
        return [self]

    @property
    def req_to_blocks(self) -> dict[str, list[Block]]:
        return self.table

    @property
    def num_gpu_blocks(self) -> int:
        return self.used + self.free + 1

    @property
    def null_block(self) -> Block:
        return Block(is_null=True)

    def get_num_free_blocks(self) -> int:
        return self.free


def read(stage: Stage) -> KvState:
    """One look, with the buckets short (up to 60 tokens) and long."""
    return KvReader(stage, ("short", "long"), (60,)).read()


def test_an_empty_cache_has_no_holder_and_no_fragmentation() -> None:
    state = read(Stage({}, {}, used=0))
    assert (state.blocks_used, state.slots, state.tokens_stored, state.largest_holder) == (0, 0, 0, None)
    assert state.fragmentation_ratio is None
    assert state.blocks_by_bucket == {"short": 0, "long": 0}


def test_the_last_block_of_a_request_is_wasted_where_it_is_empty() -> None:
    state = read(Stage({"a": [Block(), Block()]}, {"a": Request(20, 20)}, used=2))
    assert (state.slots, state.slots_wasted, state.tokens_stored) == (32, 12, 20)
    assert state.fragmentation_ratio == 12 / 32
    assert (state.largest_holder, state.largest_holder_blocks) == ("a", 2)


def test_blocks_behind_an_unshared_one_that_are_shared_are_found_by_a_walk() -> None:
    # Two requests computed the same prompt at once; a third was given the first block of one, the second of the other.
    mine, theirs, second = Block(2), Block(1), Block(2)
    table = {"a": [mine, Block()], "b": [theirs, second], "c": [mine, second, Block()]}
    requests = {"a": Request(32, 32), "b": Request(32, 32), "c": Request(48, 48)}
    state = read(Stage(table, requests, used=5))
    assert state.blocks_by_bucket == {"short": 5, "long": 0}


def test_heads_of_one_family_that_part_later_count_each_block_once() -> None:
    system = [Block(4), Block(4)]
    pair = [Block(2)]
    table = {
        "a": [*system, *pair, Block()],
        "b": [*system, *pair, Block()],
        "c": [*system, Block()],
        "d": [*system, Block()],
    }
    requests = {name: Request(70 if name == "d" else 50, 50) for name in table}
    state = read(Stage(table, requests, used=7))
    assert state.blocks_by_bucket == {"short": 6, "long": 3}


def test_too_many_shared_blocks_are_not_counted_by_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_slo.exporters.probe import kv

    monkeypatch.setattr(kv, "WALK_LIMIT", 20)
    system = [Block(3) for _ in range(10)]
    table = {"a": [*system, Block(2), Block()], "b": [*system, Block()], "c": [*system, Block(2), Block()]}
    requests = {name: Request(200, 170) for name in table}
    state = read(Stage(table, requests, used=15))
    assert state.blocks_by_bucket is None
    assert state.slots == 15 * 16


def test_what_was_learned_of_long_heads_is_kept_until_all_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm_slo.exporters.probe import kv

    monkeypatch.setattr(kv, "WALK_LIMIT", 20)
    system = [Block(6) for _ in range(40)]
    table = {str(number): [*system, Block()] for number in range(6)}
    stage = Stage(table, {name: Request(700, 650) for name in table}, used=46)
    reader = KvReader(stage, ("short", "long"), (60,))
    looks = [reader.read().blocks_by_bucket for _ in range(4)]
    assert looks[0] is None
    assert looks[-1] == {"short": 0, "long": 46}


def test_a_known_head_follows_who_comes_and_goes_and_what_is_copied() -> None:
    short, longer = [Block(3), Block(3)], Block(2)
    table = {"a": [*short, longer, Block()], "b": [*short, longer, Block()], "c": [*short, Block()]}
    stage = Stage(table, {name: Request(50, 50) for name in table}, used=6)
    reader = KvReader(stage, ("short", "long"), (60,))
    for _ in range(2):
        assert reader.read().blocks_by_bucket == {"short": 6, "long": 0}
    # One ends.
    for block in table.pop("b")[:-1]:
        block.ref_cnt -= 1
    stage.used = 5
    assert reader.read().blocks_by_bucket == {"short": 5, "long": 0}
    # Another comes, with a long prompt and the list's place in memory.
    for block in short:
        block.ref_cnt += 1
    table["d"], stage.requests["d"], stage.used = [*short, Block(), Block()], Request(64, 64), 7
    assert reader.read().blocks_by_bucket == {"short": 5, "long": 4}
    # One writes into its last shared block: it gets a copy, as vLLM does it.
    short[-1].ref_cnt -= 1
    table["c"][1], stage.used = Block(), 8
    assert reader.read().blocks_by_bucket == {"short": 6, "long": 4}


def test_a_block_that_no_request_names_counts_as_stored() -> None:
    state = read(Stage({"a": [Block()], "gone": [Block()]}, {"a": Request(10, 10)}, used=2))
    assert (state.slots, state.slots_wasted) == (32, 6)
    assert state.blocks_by_bucket == {"short": 1, "long": 0}
