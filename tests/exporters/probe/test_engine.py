"""What the hooks make of vLLM's own schedulers, case by case; the cases are in `engine_cases.py`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from vllm_slo.exporters.otlp.probe import KEYS
from vllm_slo.exporters.records import DECODE_PARTS, PREFILL_PARTS, PREFIX, QUEUE_PARTS

pytestmark = pytest.mark.vllm
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent.parent
STEP = 30_000_000
"""No step of these cases is longer."""


@pytest.fixture(scope="module")
def played(vllm_python: str) -> dict[str, Any]:
    folders = [str(ROOT / "src"), str(ROOT / "benchmarks")]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_SLO", "OTEL"))}
    done = subprocess.run(
        [vllm_python, str(HERE / "engine_cases.py"), *folders],
        env={**environment, "VLLM_SLO_METRICS_PORT": "0", "PYTHONPATH": ""},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["errors"] == {}, done.stderr[-3000:]
    return found["results"]  # type: ignore[no-any-return]


@pytest.fixture(params=["Scheduler", "AsyncScheduler"])
def cases(request: pytest.FixtureRequest, played: dict[str, Any]) -> dict[str, Any]:
    return played[request.param]  # type: ignore[no-any-return]


def ns(span: dict[str, Any], stem: str) -> int:
    return int(span.get(f"{stem}_nanoseconds", 0))


def every_span(cases: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for case in cases.values():
        spans = case.get("spans", [])
        found += list(spans.values()) if isinstance(spans, dict) else spans
    return found


def test_parts_sum_to_the_time_between_milestones(cases: dict[str, Any]) -> None:
    spans = every_span(cases)
    assert len(spans) > 20
    for span in spans:
        queue = sum(ns(span, stem) for stem in QUEUE_PARTS)
        prefill = sum(ns(span, stem) for stem in PREFILL_PARTS)
        decode = sum(ns(span, stem) for stem in (*DECODE_PARTS, "preempted", "recompute"))
        decode -= ns(span, "preempted_before_first_token") + ns(span, "recompute_before_first_token")
        assert queue == ns(span, "queue")
        whole = span["engine_end_time_unix_nano"] - span["queued_time_unix_nano"]
        assert queue + prefill + decode == whole
        if "first_token_time_unix_nano" in span:
            assert (prefill, decode) == (ns(span, "prefill"), ns(span, "decode"))


def test_the_lake_knows_every_attribute(cases: dict[str, Any]) -> None:
    written = {PREFIX + name if not name.startswith("gen_ai.") else name for span in every_span(cases) for name in span}
    written |= {PREFIX + name for sample in cases["sample"]["samples"] for name in sample}
    assert written <= set(KEYS)


def test_an_abort_ends_a_life_where_it_stood(cases: dict[str, Any]) -> None:
    case = cases["aborts"]
    spans = case["spans"]
    assert len(spans) == 4
    reasons = {who: spans[case[who]]["finish_reason"] for who in ("running", "during", "waiting", "rest")}
    assert reasons == {"running": "abort", "during": "abort", "waiting": "abort", "rest": "length"}
    waiting = spans[case["waiting"]]
    assert "scheduled_time_unix_nano" not in waiting
    assert "prefill_nanoseconds" not in waiting
    assert ns(waiting, "queue_sequence_cap") > 0.99 * ns(waiting, "queue") > 0
    assert 0 < spans[case["during"]]["gen_ai.usage.completion_tokens"] < 30
    assert ns(spans[case["during"]], "decode") > ns(spans[case["running"]], "decode") > 0


def test_an_urgent_request_is_never_behind(cases: dict[str, Any]) -> None:
    case = cases["priority"]
    spans = case["spans"]
    order = sorted(spans.values(), key=lambda span: span["scheduled_time_unix_nano"])
    assert [span["engine_request_id"] for span in order] == [case[w] for w in ("first", "urgent", "middle", "low")]
    assert [span["priority"] for span in order] == [5, -1, 5, 9]
    assert ns(spans[case["urgent"]], "queue_behind") == 0
    assert ns(spans[case["low"]], "queue_behind") > ns(spans[case["middle"]], "queue_behind") > 0


def test_cached_tokens_are_those_of_whole_blocks(cases: dict[str, Any]) -> None:
    case = cases["prefix_cache"]
    first, second = case["spans"][case["first"]], case["spans"][case["second"]]
    assert (first["cached_tokens"], second["cached_tokens"]) == (0, 96)
    assert (second["cached_tokens_local"], second["cached_tokens_external"]) == (96, 0)
    assert ns(second, "prefill_own") < ns(first, "prefill_own") / 3


def test_evicted_blocks_are_those_that_vllm_evicted(cases: dict[str, Any]) -> None:
    assert cases["evictions"]["evicted"] == cases["evictions"]["seen"] > 0


def test_waiting_for_a_grammar_is_ones_own_affair(cases: dict[str, Any]) -> None:
    case = cases["grammar"]
    held, behind = case["spans"][case["held"]], case["spans"][case["behind"]]
    assert json.loads(held["queue_deferred_reasons"]).keys() == {"grammar"}
    assert 60_000_000 - STEP < ns(held, "queue_deferred") <= 60_000_000 + STEP
    assert ns(held, "queue_deferred") > 0.99 * ns(held, "queue")
    assert ns(behind, "queue") < 100_000


def test_waiting_for_a_place_for_an_adapter_is_deferred(cases: dict[str, Any]) -> None:
    case = cases["lora"]
    first, second, plain = (case["spans"][case[who]] for who in ("first", "second", "plain"))
    assert json.loads(second["queue_deferred_reasons"]).keys() == {"lora"}
    assert ns(second, "queue_deferred") > 0.99 * ns(second, "queue") > STEP
    assert (first["lora"], second["lora"]) == ("adapter-1", "adapter-2")
    assert ns(plain, "queue") < 100_000
    assert "lora" not in plain


def test_a_session_waits_for_its_client_not_for_the_engine(cases: dict[str, Any]) -> None:
    (span,) = cases["session"]["spans"]
    assert span["finish_reason"] == "stop"
    reasons = json.loads(span["queue_deferred_reasons"])
    assert reasons.keys() == {"streaming"}
    assert 600_000_000 <= reasons["streaming"] < 600_000_000 + STEP
    assert span["gen_ai.usage.completion_tokens"] == cases["session"]["made"] >= 12
    assert cases["session"]["in_flight"] == 0


def test_a_turn_of_one_token_has_its_token_though_the_next_input_is_there(cases: dict[str, Any]) -> None:
    (span,) = cases["short_turns"]["spans"]
    assert span["gen_ai.usage.completion_tokens"] == cases["short_turns"]["made"] >= 2
    assert 0 < ns(span, "time_to_first_token") < 2 * STEP
    assert "queue_deferred_reasons" not in span


def test_while_all_stands_still_nobody_waits_for_a_place(cases: dict[str, Any]) -> None:
    case = cases["frozen"]
    running, waiting, late = (case["spans"][case[who]] for who in ("running", "waiting", "late"))
    for span, pause in ((waiting, 500_000_000), (late, 250_000_000)):
        reasons = json.loads(span["queue_deferred_reasons"])
        assert reasons.keys() == {"paused"}
        assert reasons["paused"] == pytest.approx(pause, abs=1_000_000)
        assert ns(span, "queue_step") < 1_000_000
    assert ns(waiting, "queue_sequence_cap") == pytest.approx(ns(waiting, "queue") - 500_000_000, abs=2_000_000)
    assert ns(running, "decode") > 500_000_000
    assert 0 < case["longest_step"] < STEP


@pytest.mark.parametrize("method", ["schedule", "update_from_output"])
def test_a_scheduler_that_overrides_what_is_hooked_switches_the_probe_off(cases: dict[str, Any], method: str) -> None:
    case = cases["foreign"]
    assert case[method]["finished"] == 30
    assert case[method]["state"] is False
    assert set(case["errors"]) == {"engine.update_ends", "engine.schedule_ends"}


def test_a_reset_takes_what_was_computed_and_blames_no_blocks(cases: dict[str, Any]) -> None:
    case = cases["reset"]
    assert case["causes"] == ["reset"]
    for name, span in case["spans"].items():
        assert span["preemptions"] == 1
        assert span["lost_tokens"] == span["recomputed_tokens"] == case["lost"][name] > 0
        assert ns(span, "queue_kv_blocks") == 0
        assert 0 < ns(span, "preempted") < STEP
        assert 0 < ns(span, "recompute") < STEP


def test_stop_and_length_are_told_apart(cases: dict[str, Any]) -> None:
    case = cases["stops"]
    stopping, limited = case["spans"][case["stopping"]], case["spans"][case["limited"]]
    assert (stopping["finish_reason"], limited["finish_reason"]) == ("stop", "length")
    assert (stopping["gen_ai.usage.completion_tokens"], limited["gen_ai.usage.completion_tokens"]) == (5, 1)
    assert ns(limited, "decode") == 0
    assert "first_token_time_unix_nano" in limited


def test_drafts_are_counted_as_vllm_counts_them(cases: dict[str, Any]) -> None:
    case = cases["drafts"]
    assert sum(span["draft_tokens"] for span in case["spans"]) == case["drafted"] > 0
    assert sum(span["accepted_tokens"] for span in case["spans"]) == case["accepted"] > 0


def test_without_log_stats_a_request_is_accounted_for(cases: dict[str, Any]) -> None:
    (span,) = cases["without_stats"]["spans"]
    assert ns(span, "prefill") > 0
    assert span["cached_tokens"] == 0


def test_a_paused_engine_defers_whoever_comes(cases: dict[str, Any]) -> None:
    case = cases["paused"]
    late = case["spans"][case["late"]]
    assert json.loads(late["queue_deferred_reasons"]).keys() == {"paused"}
    assert ns(late, "queue_deferred") > 0.99 * ns(late, "queue") > 80_000_000 - STEP


def test_a_second_registration_changes_nothing(cases: dict[str, Any]) -> None:
    assert cases["twice"]["same"]
    assert len(cases["twice"]["spans"]) == 1


def test_a_sample_shows_the_engine_as_it_is(cases: dict[str, Any]) -> None:
    (sample,) = cases["sample"]["samples"]
    assert (sample["requests_running"], sample["requests_waiting"]) == (2, 3)
    assert sample["blocked_by"] == "sequence_cap"
    assert sample["blocked_sequence_cap_seconds"] == pytest.approx(sample["interval_seconds"], rel=0.01)
    assert sample["step_seconds"] == pytest.approx(sample["interval_seconds"], rel=0.01)
    assert sample["oldest_waiting_seconds"] == pytest.approx(sample["interval_seconds"], rel=0.01)
    assert (sample["scheduled_prefill_tokens"], sample["sequence_cap"], sample["token_budget"]) == (200, 2, 256)
    assert sample["kv_blocks_used"] + sample["kv_blocks_free"] == sample["kv_blocks_total"] == cases["sample"]["total"]
    assert json.loads(sample["requests_waiting_by_bucket"]) == {"short": 3, "medium": 0, "long": 0}


def test_whichever_hook_breaks_vllm_goes_on(cases: dict[str, Any]) -> None:
    case = cases["broken"]
    assert case["before"]
    assert case["after"]
    assert {"engine.added", "engine.looked", "engine.schedule_ends", "engine.update_ends"} <= set(case["errors"])
    assert case["off"]
