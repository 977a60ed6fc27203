"""The front end's records on vLLM's own OutputProcessor: one for every request, however it ends."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from e2e.vllm_server import MODEL_NAME, build_model

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parent.parent.parent.parent
Span = dict[str, Any]


@pytest.fixture(scope="module")
def found(vllm_python: str) -> dict[str, Any]:
    """What `frontend_in_vllm.py` printed."""
    model = build_model(vllm_python, ROOT / ".cache" / MODEL_NAME)
    done = subprocess.run(
        [vllm_python, str(Path(__file__).with_name("frontend_in_vllm.py")), str(model)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(printed, dict)
    return printed


@pytest.fixture(scope="module")
def scenarios(found: dict[str, Any]) -> dict[str, Any]:
    """What was sent, by scenario."""
    return dict(found["scenarios"])


def spans(scenarios: dict[str, Any], name: str) -> list[Span]:
    """The scenario's records, attributes without the prefix."""
    return [{key.removeprefix("vllm_slo."): value for key, value in s.items()} for s in scenarios[name]["spans"]]


def test_nothing_of_vllm_is_held_when_all_have_ended(scenarios: dict[str, Any]) -> None:
    assert {name: (found["left"], found["states"]) for name, found in scenarios.items()} == dict.fromkeys(
        scenarios, (0, 0)
    )


def test_a_finished_request_says_what_vllms_own_span_says_and_more(scenarios: dict[str, Any]) -> None:
    (span,), (stock,) = spans(scenarios, "finished"), scenarios["finished"]["stock"]
    assert span["name"] == "vllm_slo.frontend_request"
    assert span["start"] == stock["start"]
    for name in ("id", "top_p", "max_tokens", "n"):
        assert span[f"gen_ai.request.{name}"] == stock[f"gen_ai.request.{name}"]
    for name in ("prompt_tokens", "completion_tokens"):
        assert span[f"gen_ai.usage.{name}"] == stock[f"gen_ai.usage.{name}"]
    assert span["request_duration_nanoseconds"] == round(stock["gen_ai.latency.e2e"] * 1e9)
    assert span["time_to_first_token_nanoseconds"] == round(stock["gen_ai.latency.time_to_first_token"] * 1e9)
    assert span["end"] - span["start"] == span["request_duration_nanoseconds"]
    assert span["gen_ai.request.temperature"] == 0.0
    assert (span["finish_reason"], span["lora"], span["priority"]) == ("length", "adapter", -3)
    assert (span["engine_request_id"], span["cached_tokens"], span["error"]) == ("length-0badcafe", 1, False)


def test_a_stop_string_is_a_stop_and_no_abort(scenarios: dict[str, Any]) -> None:
    (span,) = spans(scenarios, "stop_string")
    assert span["finish_reason"] == "stop"


def test_a_client_that_goes_away_is_an_abort_queued_or_running(scenarios: dict[str, Any]) -> None:
    queued, running = spans(scenarios, "aborted_by_the_client")
    assert scenarios["aborted_by_the_client"]["stock"] == [], "vLLM itself says nothing of them"
    assert (queued["finish_reason"], running["finish_reason"]) == ("abort", "abort")
    assert (queued["gen_ai.usage.completion_tokens"], running["gen_ai.usage.completion_tokens"]) == (0, 2)
    assert "time_to_first_token_nanoseconds" not in queued
    assert 0 < running["time_to_first_token_nanoseconds"] < running["request_duration_nanoseconds"]
    assert running["request_duration_nanoseconds"] >= 20_000_000
    assert not running["error"]


def test_an_abort_by_external_id_ends_every_request_of_that_id(scenarios: dict[str, Any]) -> None:
    found = spans(scenarios, "aborted_by_an_operator")
    assert [(s["gen_ai.request.id"], s["engine_request_id"], s["finish_reason"]) for s in found] == [
        ("shared", "shared-0badcafe", "abort"),
        ("shared", "shared-1badcafe", "abort"),
    ]


def test_what_the_engine_ends_before_a_token_has_no_first_token(scenarios: dict[str, Any]) -> None:
    paused, faulty = spans(scenarios, "aborted_by_the_engine")
    assert (paused["finish_reason"], paused["error"]) == ("abort", False)
    assert (faulty["finish_reason"], faulty["error"]) == ("error", True)
    for span, stock in zip((paused, faulty), scenarios["aborted_by_the_engine"]["stock"], strict=True):
        assert "time_to_first_token_nanoseconds" not in span
        assert stock["gen_ai.latency.time_to_first_token"] > 0, "vLLM makes one up"


def test_each_completion_of_n_is_a_record_with_the_real_n(scenarios: dict[str, Any]) -> None:
    found = sorted(spans(scenarios, "parallel"), key=lambda span: str(span["engine_request_id"]))
    assert [s["engine_request_id"] for s in found] == ["0_three-0badcafe", "1_three-0badcafe", "2_three-0badcafe"]
    assert {s["gen_ai.request.id"] for s in found} == {"three"}
    assert [s["gen_ai.request.n"] for s in found] == [3, 3, 3]
    assert [s["finish_reason"] for s in found] == ["stop", "abort", "abort"]


def test_the_death_of_the_engine_is_an_error_of_every_request_once(scenarios: dict[str, Any]) -> None:
    found = spans(scenarios, "engine_dead")
    assert [(s["gen_ai.request.id"], s["finish_reason"], s["error"]) for s in found] == [
        ("dead-a", "error", True),
        ("dead-b", "error", True),
    ]
    assert "time_to_first_token_nanoseconds" not in found[0]
    assert "time_to_first_token_nanoseconds" in found[1]


def test_a_request_that_the_engine_refuses_on_arrival_ends(scenarios: dict[str, Any]) -> None:
    found = spans(scenarios, "refused_on_arrival")
    assert [(s["gen_ai.request.id"], s["finish_reason"]) for s in found] == [("busy", "rejected"), ("broken", "error")]


def test_a_session_of_streamed_input_is_one_record(scenarios: dict[str, Any]) -> None:
    (span,) = spans(scenarios, "streaming_input")
    assert (span["finish_reason"], span["gen_ai.usage.completion_tokens"]) == ("stop", 2)


def test_without_vllms_statistics_the_probe_keeps_its_own_time(scenarios: dict[str, Any]) -> None:
    plain, gone = spans(scenarios, "without_statistics")
    assert 0.05 <= plain["time_to_first_token_nanoseconds"] / 1e9 < plain["request_duration_nanoseconds"] / 1e9 - 0.02
    assert plain["gen_ai.usage.completion_tokens"] == 3
    assert (gone["finish_reason"], gone["gen_ai.usage.completion_tokens"]) == ("abort", 0)
    assert "time_to_first_token_nanoseconds" not in gone


def test_behind_the_middleware_the_record_carries_the_http_side(scenarios: dict[str, Any]) -> None:
    (span,) = spans(scenarios, "behind_the_middleware")
    assert (span["http_route"], span["http_status"], span["tenant"]) == ("/v1/completions", 200, "blue")
    assert span["time_to_first_byte_nanoseconds"] == 5_000_000
    assert span["http_duration_nanoseconds"] == 9_000_000
    assert span["client_disconnected"] is False
    assert span["gen_ai.request.id"] == "linked", "vLLM's id, not the client's"


def test_a_hook_that_always_fails_holds_nothing(scenarios: dict[str, Any]) -> None:
    assert spans(scenarios, "failing_hook") == []
    assert (scenarios["failing_hook"]["left"], scenarios["failing_hook"]["states"]) == (0, 0)


def test_no_record_holds_what_the_client_wrote_or_was_told(scenarios: dict[str, Any]) -> None:
    known = {
        *("name", "start", "end", "error", "engine_request_id", "finish_reason", "cached_tokens", "lora", "priority"),
        *("http_route", "http_status", "client_disconnected", "tenant"),
        *("time_to_first_token_nanoseconds", "request_duration_nanoseconds"),
        *("time_to_first_byte_nanoseconds", "http_duration_nanoseconds"),
        *(f"gen_ai.request.{name}" for name in ("id", "max_tokens", "temperature", "top_p", "n")),
        *(f"gen_ai.usage.{name}" for name in ("prompt_tokens", "completion_tokens")),
    }
    assert {key for name in scenarios for span in spans(scenarios, name) for key in span} <= known


def test_the_hooks_take_little_of_the_event_loop(found: dict[str, Any]) -> None:
    assert found["microseconds"] < 60, "about 3 on an idle machine"
