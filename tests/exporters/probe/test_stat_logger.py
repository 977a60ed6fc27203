"""The stat logger plugin against vLLM's own base class and manager."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).resolve().parent.parent.parent.parent


@pytest.fixture(scope="module")
def found(vllm_python: str) -> dict[str, Any]:
    """What `stat_logger_in_vllm.py` printed; that it ended well says that nothing was raised into vLLM."""
    done = subprocess.run(
        [vllm_python, str(Path(__file__).with_name("stat_logger_in_vllm.py"))],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(printed, dict)
    return printed


def test_it_is_of_the_class_that_vllm_demands(found: dict[str, Any]) -> None:
    assert found["subclass"] is True


def test_while_the_probe_is_off_it_does_nothing(found: dict[str, Any]) -> None:
    assert found["while the probe is off"] == []


def test_a_refusal_without_the_middleware_is_a_record_with_its_reason(found: dict[str, Any]) -> None:
    sent = found["without the middleware"]
    assert len({record.pop("gen_ai.request.id") for record in sent}) == 2
    assert sent == 2 * [
        {
            "name": "vllm_slo.edge_request",
            "error": True,
            "vllm_slo.http_status": 503,
            "vllm_slo.finish_reason": "rejected",
            "vllm_slo.admission_rejection": "max_num_queued_tokens",
        }
    ]


def test_a_refusal_behind_the_middleware_is_one_record_when_the_answer_is_sent(found: dict[str, Any]) -> None:
    assert found["behind it, before the answer"] == []
    (record,) = found["behind it"]
    assert record["gen_ai.request.id"] == "mine"
    assert record["vllm_slo.finish_reason"] == "rejected"
    assert record["vllm_slo.admission_rejection"] == "max_num_queued_reqs"


def test_sleep_and_awakening_are_events(found: dict[str, Any]) -> None:
    asleep, awake = found["sleep"]
    assert (asleep["name"], asleep["vllm_slo.kind"]) == ("vllm_slo.event", "note")
    assert (asleep["vllm_slo.title"], awake["vllm_slo.title"]) == ("engine asleep (level 2)", "engine awake")
    assert json.loads(asleep["vllm_slo.detail"]) == {"asleep": True, "level": 2}
    assert asleep["vllm_slo.event_id"] != awake["vllm_slo.event_id"]
