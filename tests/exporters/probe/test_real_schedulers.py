"""The probe on vLLM's own `Scheduler` and `AsyncScheduler` objects: what it says against a log of every step."""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from e2e import recomputed
from vllm_slo.exporters.records import (
    DECODE_PARTS,
    ENGINE_REQUEST,
    PREFILL_PARTS,
    QUEUE_PARTS,
    duration_key,
    key,
    time_key,
)

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parent.parent.parent.parent
SCHEDULERS = ("Scheduler", "AsyncScheduler", "AsyncScheduler, three in flight")
SCENARIOS = (
    *("sequence_cap", "token_budget", "kv_blocks", "long_among_short", "nothing_wrong", "priorities", "drafts"),
    "anything",
)
LONG = "long-0-0badcafe"
MICROSECOND = 1_000
READINGS = 100 * MICROSECOND
"""The probe reads the clock a few times later than the witness, and each reading moves it by a microsecond."""


class Life:
    """One request as the probe reported it."""

    def __init__(self, span: dict[str, Any]) -> None:
        self.span = span
        self.id = str(span[key("engine_request_id")])
        self.reason = span.get(key("finish_reason"))

    def part(self, stem: str) -> int:
        """Nanoseconds; what is absent is 0."""
        return int(self.span.get(duration_key(stem), 0))

    def parts(self, stems: tuple[str, ...]) -> int:
        """Nanoseconds in all of them."""
        return sum(self.part(stem) for stem in stems)

    def number(self, column: str) -> int:
        """A count; what is absent is 0."""
        return int(self.span.get(key(column), 0))

    def reached(self, milestone: str) -> bool:
        """Whether it came to that."""
        return time_key(milestone) in self.span


@dataclass(frozen=True)
class Play:
    """One scenario on one scheduler."""

    lives: dict[str, Life]
    log: recomputed.Log
    other: list[dict[str, Any]]

    def total(self, stem: str) -> int:
        """Nanoseconds over all requests."""
        return sum(life.part(stem) for life in self.lives.values())


@pytest.fixture(scope="session")
def stage(vllm_python: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the spans and the log of every scenario on every scheduler."""
    folder = tmp_path_factory.mktemp("stage")
    path = os.pathsep.join(str(ROOT / name) for name in ("src", "benchmarks", "tests/e2e"))
    done = subprocess.run(
        [vllm_python, str(Path(__file__).with_name("real_schedulers.py")), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "VLLM_SLO_METRICS_PORT": "0", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return folder


def play(stage: Path, scenario: str, scheduler: str) -> Play:
    """What came out of it; fails when a request is reported twice."""
    spans = [json.loads(line) for line in (stage / f"{scenario}.{scheduler}.spans").read_text().splitlines()]
    lives = [Life(span) for span in spans if span["name"] == ENGINE_REQUEST]
    found = {life.id: life for life in lives}
    assert len(found) == len(lives), "a request was reported twice"
    log = recomputed.read(stage / f"{scenario}.{scheduler}.witness")
    return Play(found, log, [span for span in spans if span["name"] != ENGINE_REQUEST])


def near(found: int, expected: int) -> bool:
    """Within 1 %, and the readings of the clock."""
    return abs(found - expected) <= 0.01 * expected + READINGS


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("scenario", SCENARIOS)
class TestEverything:
    """Holds whatever the load."""

    def test_every_request_is_reported_once(self, stage: Path, scenario: str, scheduler: str) -> None:
        seen = play(stage, scenario, scheduler)
        assert seen.lives.keys() == seen.log.added.keys()
        for life in seen.lives.values():
            assert life.reason == ("abort" if life.id in seen.log.ended_early else "length")

    def test_parts_sum_to_the_whole_to_the_nanosecond(self, stage: Path, scenario: str, scheduler: str) -> None:
        for life in play(stage, scenario, scheduler).lives.values():
            span, parts = life.span, (*QUEUE_PARTS, *PREFILL_PARTS, *DECODE_PARTS)
            assert min(life.part(stem) for stem in parts) >= 0, span
            assert life.parts(QUEUE_PARTS) == life.part("queue"), span
            if life.reached("first_token_time"):
                assert life.parts(PREFILL_PARTS) == life.part("prefill"), span
                later = sum(life.part(s) - life.part(f"{s}_before_first_token") for s in ("preempted", "recompute"))
                assert life.parts(DECODE_PARTS) + later == life.part("decode"), span
                whole = span[time_key("engine_end_time")] - span[time_key("queued_time")]
                assert abs(life.part("queue") + life.part("prefill") + life.part("decode") - whole) <= READINGS, span

    def test_what_blocked_the_queue_agrees_with_the_log(self, stage: Path, scenario: str, scheduler: str) -> None:
        seen = play(stage, scenario, scheduler)
        for life in seen.lives.values():
            parts = recomputed.queue_parts(seen.log, life.id)
            if parts is None:
                assert not life.reached("scheduled_time"), life.span
                continue
            for stem, expected in parts.items():
                assert near(life.part(stem), expected), (stem, parts, life.span)

    def test_who_took_the_budget_agrees_with_the_log(self, stage: Path, scenario: str, scheduler: str) -> None:
        seen = play(stage, scenario, scheduler)
        for life in seen.lives.values():
            blocker = recomputed.token_budget_blocker(seen.log, life.id)
            if blocker is None or recomputed.queue_parts(seen.log, life.id) is None:
                continue
            assert near(life.part("token_budget_blocker"), blocker[1]), (blocker, life.span)

    def test_prefill_agrees_with_the_log(self, stage: Path, scenario: str, scheduler: str) -> None:
        seen = play(stage, scenario, scheduler)
        for life in seen.lives.values():
            parts = recomputed.prefill_parts(seen.log, life.id)
            for stem, expected in (parts or {}).items():
                # Of the whole: the probe and the witness read the clock at different moments of each step.
                off = abs(life.part(stem) - expected)
                assert off <= 0.01 * life.part("prefill") + READINGS, (stem, parts, life.span)

    def test_preemptions_and_lost_tokens_agree_with_the_log(self, stage: Path, scenario: str, scheduler: str) -> None:
        seen = play(stage, scenario, scheduler)
        for life in seen.lives.values():
            lost = recomputed.lost_tokens(seen.log, life.id)
            assert (life.number("preemptions"), life.number("lost_tokens")) == (len(lost), sum(lost)), life.span
            assert life.number("recomputed_tokens") <= sum(lost), life.span

    def test_the_time_that_preemption_cost_agrees_with_the_log(
        self, stage: Path, scenario: str, scheduler: str
    ) -> None:
        seen = play(stage, scenario, scheduler)
        for life in seen.lives.values():
            for stem, expected in (recomputed.preemption_parts(seen.log, life.id) or {}).items():
                assert near(life.part(stem), expected), (stem, expected, life.span)

    def test_tokens_agree_with_the_log(self, stage: Path, scenario: str, scheduler: str) -> None:
        seen = play(stage, scenario, scheduler)
        tokens = Counter[str]()
        for step in seen.log.steps:
            tokens.update(step.outputs)
        for life in seen.lives.values():
            assert life.span.get("gen_ai.usage.completion_tokens", 0) == tokens[life.id], life.span

    def test_kv_figures_equal_a_walk_over_every_block(self, stage: Path, scenario: str, scheduler: str) -> None:
        walks = play(stage, scenario, scheduler).log.walks
        assert len(walks) >= 8
        for probe, walked in walks:
            assert {name: probe[name] for name in walked} == walked


@pytest.mark.parametrize("scheduler", SCHEDULERS)
class TestScenarios:
    """What each load must look like."""

    def test_a_cap_of_two_sequences_is_what_the_others_wait_for(self, stage: Path, scheduler: str) -> None:
        seen = play(stage, "sequence_cap", scheduler)
        assert seen.total("queue_sequence_cap") >= 0.99 * seen.total("queue") > 0
        assert seen.total("queue_token_budget") == seen.total("queue_kv_blocks") == 0

    def test_a_small_budget_is_what_short_ones_wait_for_behind_a_long_one(self, stage: Path, scheduler: str) -> None:
        seen = play(stage, "token_budget", scheduler)
        assert seen.total("queue_token_budget") >= 0.99 * seen.total("queue") > 0
        for life in seen.lives.values():
            if life.id != LONG:
                assert life.span[key("token_budget_blocker")] == LONG
                # Beside it they had to wait for each other, at the end.
                assert life.part("token_budget_blocker") >= 0.95 * life.part("queue_token_budget")

    def test_too_few_blocks_are_what_others_wait_for_and_preempt(self, stage: Path, scheduler: str) -> None:
        seen = play(stage, "kv_blocks", scheduler)
        assert seen.total("queue_kv_blocks") >= 0.99 * seen.total("queue") > 0
        lives = seen.lives.values()
        lost = sum(sum(recomputed.lost_tokens(seen.log, life.id)) for life in lives)
        assert sum(life.number("lost_tokens") for life in lives) == lost > 0
        # Without a prefix cache everything lost is computed again.
        assert sum(life.number("recomputed_tokens") for life in lives) == lost
        assert seen.total("preempted") > 0
        assert seen.total("recompute") > 0

    def test_short_ones_wait_on_the_budget_that_a_long_prompt_eats(self, stage: Path, scheduler: str) -> None:
        seen = play(stage, "long_among_short", scheduler)
        short = [life for life in seen.lives.values() if life.id.startswith("short")]
        assert len(short) == 3
        for life in short:
            assert life.part("queue_token_budget") >= 0.98 * life.part("queue") > 0
            assert life.span[key("token_budget_blocker")] == LONG

    def test_running_ones_are_slowed_by_the_prefill_of_the_long_prompt(self, stage: Path, scheduler: str) -> None:
        seen = play(stage, "long_among_short", scheduler)
        prefill = seen.lives[LONG].part("prefill")
        decoding = [life for life in seen.lives.values() if life.id.startswith("decoding")]
        assert len(decoding) == 4
        for life in decoding:
            assert life.part("decode_interference") >= 0.85 * prefill
            assert life.part("decode_slowdown") <= 0.05 * life.part("decode")

    def test_where_nothing_is_wrong_nothing_is_blamed(self, stage: Path, scheduler: str) -> None:
        seen = play(stage, "nothing_wrong", scheduler)
        assert seen.total("queue") <= len(seen.lives) * READINGS
        for stem in ("queue_sequence_cap", "queue_token_budget", "queue_kv_blocks", "prefill_interference"):
            assert seen.total(stem) == 0
        for stem in ("decode_interference", "preempted", "recompute"):
            assert seen.total(stem) == 0
        # Of the decode time of one that is alone; what is left is the scheduler's own time between steps.
        assert seen.total("decode_slowdown") <= 0.05 * seen.total("decode")

    def test_drafted_and_accepted_tokens_are_counted(self, stage: Path, scheduler: str) -> None:
        for life in play(stage, "drafts", scheduler).lives.values():
            drafted, accepted = life.number("draft_tokens"), life.number("accepted_tokens")
            # 39 tokens after the first, two a step; asynchronous scheduling drafts on for a step or two after the end.
            assert 19 <= accepted <= 22, life.span
            assert drafted == pytest.approx(3 * accepted, abs=6), life.span
