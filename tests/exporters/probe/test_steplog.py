"""The step log, and the blocked-by split computed again from it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from vllm_slo.exporters.probe.steplog import MOST_WAITING, StepLog


def test_lines_are_written_when_flushed_and_once(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.write("added", id="a", at_ns=1)
    assert not (tmp_path / "steps.jsonl").exists()
    log.flush()
    log.flush()
    log.write("ended", id="a", at_ns=9, reason="stop")
    log.flush()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines] == ["added", "ended"]


def test_steps_keep_their_numbers_until_they_end(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    first, second = (
        SimpleNamespace(
            num_scheduled_tokens={"a": 3},
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(resumed_req_ids={"a"}),
        )
        for _ in range(2)
    )
    for step in (first, second):
        log.scheduled(step, 1, [], "nothing", None, 0, [(SimpleNamespace(request_id="b"), "lora")])
    for step in (second, first, first):
        log.updated(step, 2, [])
    log.flush()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 2, 1, None]
    assert (lines[0]["resumed"], lines[0]["deferred"]) == (["a"], {"b": "lora"})


def test_lines_that_nobody_writes_are_bounded(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    for number in range(MOST_WAITING + 10):
        log.write("added", id=str(number))
    log.flush()
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert len(lines) == MOST_WAITING
    assert json.loads(lines[0])["id"] == "10"
