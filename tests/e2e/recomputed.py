"""What the parts of a request must be, computed from a full log of the scheduler's steps in the plainest way.

There are two such logs: the `witness`'s, which knows nothing of the probe, and the probe's own step log, in which the
reasons are the probe's and the times those of its clock. In the first each rule is that of the definitions: after a
step the scan stopped for one reason, which is found from what was left: blocks were asked for in vain or a request was
preempted -> KV blocks; no budget left -> token budget; the cap reached -> sequence cap.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KV, BUDGET, CAP, STEP = "queue_kv_blocks", "queue_token_budget", "queue_sequence_cap", "queue_step"


@dataclass
class Step:
    """One step; ``begin`` is when the device began with it, ``end`` None while its update has not come."""

    start: int
    tokens: dict[str, int]
    prefill: dict[str, int]
    stopped_by: str
    preempted: dict[str, int]
    end: int | None = None
    begin: int = 0
    outputs: dict[str, int] = field(default_factory=dict)
    stalled: set[str] = field(default_factory=set)
    """`start`, `end`: the system took the processor away while clocks were read there."""


@dataclass
class Log:
    """Everything in order of time; times in nanoseconds of the monotonic clock."""

    steps: list[Step] = field(default_factory=list)
    added: dict[str, int] = field(default_factory=dict)
    ended_early: dict[str, int] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)
    """Reasons, of the probe's log alone."""
    walks: list[tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=list)

    @property
    def starts(self) -> list[int]:
        """Start of every step."""
        return [step.start for step in self.steps]

    def ids(self, external: str) -> list[str]:
        """Engine request ids of an external one."""
        return [name for name in self.added if name == external or name.startswith(f"{external}-")]


def read(path: Path) -> Log:
    """The witness's file; a last line that was cut off is left out."""
    log = Log()
    preempted: dict[str, int] = {}
    stalled: list[tuple[int, str]] = []
    last_end = 0
    for text in path.read_text().splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if "add" in line:
            log.added[line["add"]] = line["at"]
        elif "finish" in line:
            log.ended_early.update(dict.fromkeys(line["finish"], line["at"]))
        elif "preempt" in line:
            preempted[line["preempt"]] = line["lost"]
        elif "step" in line:
            log.steps.append(Step(line["at"], line["tokens"], line["prefill"], _stopped_by(line, preempted), preempted))
            preempted = {}
        elif "stalled" in line:
            stalled.append((line["stalled"] - 1, line["at"]))
        elif "update" in line:
            step = log.steps[line["update"] - 1]
            step.end, step.outputs = line["at"], line["outputs"]
            step.begin = max(step.start, last_end)
            last_end = line["at"]
        elif "walk" in line:
            log.walks.append((line["probe"], line["walk"]))
    for index, at in stalled:
        log.steps[index].stalled.add(at)
    return log


def stalled(log: Log, request_id: str) -> bool:
    """Whether a clock may have been read late at one of its milestones: scheduled, first token, last token."""
    first = next((step for step in log.steps if request_id in step.tokens), None)
    outputs = [step for step in log.steps if step.outputs.get(request_id)]
    return any(
        at in step.stalled
        for step, at in ((first, "start"), *((step, "end") for step in (outputs[:1] + outputs[-1:])))
        if step is not None
    )


def read_step_log(path: Path) -> Log:
    """The file that VLLM_SLO_STEP_LOG names."""
    log = Log()
    preempted: dict[str, int] = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        event = line["event"]
        if event == "added":
            log.added[line["id"]] = line["at_ns"]
        elif event == "preempted":
            preempted[line["id"]] = line["lost_tokens"]
        elif event == "schedule":
            reason = "" if line["reason"] == "nothing" else f"queue_{line['reason']}"
            prefill = dict.fromkeys(line["prefilling"], 0)
            log.steps.append(Step(line["start_ns"], line["tokens"], prefill, reason, preempted))
            preempted = {}
        elif event == "update":
            log.steps[line["step"] - 1].end = line["end_ns"]
        elif event == "ended":
            log.ended[line["id"]] = line["reason"]
    return log


def _stopped_by(line: dict[str, Any], preempted: dict[str, int]) -> str:
    if preempted or line["failed"]:
        return KV
    if sum(line["tokens"].values()) >= line["budget"]:
        return BUDGET
    return CAP if line["running"] >= line["cap"] else ""


def queue_parts(log: Log, request_id: str) -> dict[str, int] | None:
    """Nanoseconds by column stem from its arrival in the engine core to the step that first schedules it.

    None when it was never scheduled.
    """
    added, starts = log.added[request_id], log.starts
    looked_at = bisect_left(starts, added)
    first = next((i for i in range(looked_at, len(starts)) if request_id in log.steps[i].tokens), None)
    if first is None:
        return None
    parts = dict.fromkeys((CAP, BUDGET, KV, STEP), 0)
    parts[STEP] = starts[looked_at] - added
    for index in range(looked_at, first):
        reason = log.steps[index].stopped_by
        assert reason, f"step {index} left {request_id} waiting for no reason"
        parts[reason] += starts[index + 1] - starts[index]
    return parts


def token_budget_blocker(log: Log, request_id: str) -> tuple[str, int] | None:
    """Who took most prefill tokens for the longest part of its queue time blocked by the budget, and for how long."""
    added, starts = log.added[request_id], log.starts
    blamed: dict[str, int] = {}
    for index in range(bisect_left(starts, added), len(starts) - 1):
        step = log.steps[index]
        if request_id in step.tokens:
            break
        eaters = [name for name in step.tokens if name in step.prefill]
        if step.stopped_by == BUDGET and eaters:
            most = max(eaters, key=lambda name: step.tokens[name])
            blamed[most] = blamed.get(most, 0) + starts[index + 1] - starts[index]
    return max(blamed.items(), key=lambda item: item[1]) if blamed else None


def prefill_parts(log: Log, request_id: str) -> dict[str, int] | None:
    """Nanoseconds of own work, others' prefill and the rest from first scheduled to first token.

    None when it had no token, or was preempted before it.
    """
    first = next((i for i, step in enumerate(log.steps) if request_id in step.tokens), None)
    last = next((i for i, step in enumerate(log.steps) if step.outputs.get(request_id)), None)
    if first is None or last is None:
        return None
    begin, end = log.steps[first].start, log.steps[last].end
    assert end is not None
    # With steps in flight also one that is chosen after the last of these, and before its output has come.
    if any(request_id in step.preempted for step in log.steps[first:] if step.start < end):
        return None
    own = interference = 0.0
    for step in log.steps[max(0, first - 4) : last + 1]:
        if step.end is None or not step.tokens:
            continue
        overlap = min(step.end, end) - max(step.begin, begin)
        if overlap <= 0:
            continue
        total = sum(step.tokens.values())
        others = sum(tokens for name, tokens in step.tokens.items() if name in step.prefill and name != request_id)
        own += overlap * step.tokens.get(request_id, 0) / total
        interference += overlap * others / total
    return {
        "prefill_own": round(own),
        "prefill_interference": round(interference),
        "prefill_other": end - begin - round(own) - round(interference),
    }


def preemption_parts(log: Log, request_id: str) -> dict[str, int] | None:
    """Nanoseconds until it ran again after each preemption, and from then until what was lost was computed again.

    In the middle of decoding that is when its next token came. None when it was not preempted, or ended before it had
    recovered.
    """
    preempted = recompute = 0
    had_token = recovering = False
    lost = since = 0
    for index, step in enumerate(log.steps):
        if request_id in step.preempted:
            if recovering:
                recompute += step.start - since
            lost = max(lost, step.preempted[request_id]) if recovering else step.preempted[request_id]
            had_token = any(earlier.outputs.get(request_id) for earlier in log.steps[:index] if _before(earlier, step))
            since, recovering = step.start, False
        elif lost and request_id in step.tokens:
            if not recovering:
                preempted, since, recovering = preempted + step.start - since, step.start, True
            computed = step.prefill.get(request_id, lost)
            if computed >= lost and (step.outputs.get(request_id) or not had_token):
                assert step.end is not None
                recompute += step.end - since
                lost, recovering = 0, False
    return {"preempted": preempted, "recompute": recompute} if since and not lost else None


def _before(earlier: Step, step: Step) -> bool:
    return earlier.end is not None and earlier.end <= step.start


def lost_tokens(log: Log, request_id: str) -> list[int]:
    """Computed tokens thrown away by each of its preemptions."""
    return [step.preempted[request_id] for step in log.steps if request_id in step.preempted]
