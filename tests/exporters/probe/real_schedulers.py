"""Scenarios on vLLM's own schedulers with the probe in place, without a model and in virtual time.

Runs under an interpreter that has vLLM, with `src`, `benchmarks` and `tests/e2e` on the path. For each scenario and
each scheduler it writes the witness's log and, as JSON lines, every span that the probe would have sent.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from schedulers import Engine, Shape, VirtualTime, virtual_time

SMALL = Shape(max_num_seqs=16, max_num_batched_tokens=2048, num_blocks=4096)


def sequence_cap(engine: Engine) -> None:
    """Twelve at once where two may run."""
    for _ in range(12):
        engine.add(100, 20)
    engine.run()


def token_budget(engine: Engine) -> None:
    """Short ones behind a prompt that takes the budget of many steps."""
    engine.add(4_000, 4, request_id="long-0-0badcafe")
    engine.step()
    for _ in range(8):
        engine.add(20, 4)
    engine.run()


def kv_blocks(engine: Engine) -> None:
    """Four that grow beyond the blocks there are, three that wait for any."""
    for _ in range(7):
        engine.add(200, 200)
    engine.run()


def long_among_short(engine: Engine) -> None:
    """Four decode when a prompt of 35,000 tokens comes; short ones come while it is being computed."""
    for _ in range(4):
        engine.add(64, 300, request_id=f"decoding-{engine.requests.made}-0-0badcafe")
    for _ in range(60):
        engine.step()
    engine.add(35_000, 4, request_id="long-0-0badcafe")
    for step in range(30):
        engine.step()
        if step in (3, 6, 9):
            engine.add(50, 10, request_id=f"short-{step}-0-0badcafe")
    engine.run()


def nothing_wrong(engine: Engine) -> None:
    """One at a time, and never two at once."""
    for _ in range(20):
        engine.add(120, 16)
        engine.run()
        engine.clock.pass_ns(50_000_000)


def anything(engine: Engine) -> None:
    """Arrivals, sizes and aborts at random, with too few blocks: everything happens to somebody."""
    draw = random.Random(3)
    ids: list[str] = []
    for _ in range(600):
        if draw.random() < 0.25 and len(ids) < 120:
            prompt = draw.choice((5, 60, 300, 900))
            shared = [9] * min(prompt, 64) + [draw.randrange(3, 900) for _ in range(max(0, prompt - 64))]
            ids.append(engine.add(shared if draw.random() < 0.3 else prompt, draw.randint(1, 120)))
            engine.clock.pass_ns(draw.randrange(3_000_000))
        if ids and draw.random() < 0.04:
            engine.abort(draw.choice(ids), during_step=draw.random() < 0.5)
        engine.step()
        if draw.random() < 0.05:
            engine.clock.pass_ns(draw.randrange(80_000_000))
    engine.run()


def priorities(engine: Engine) -> None:
    """Requests of three priorities with too few blocks: who is preempted is not who came last."""
    draw = random.Random(5)
    for _ in range(40):
        engine.add(draw.choice((60, 300, 700)), draw.randint(10, 150), priority=draw.randrange(3))
        for _ in range(draw.randrange(8)):
            engine.step()
    engine.run()


def drafts(engine: Engine) -> None:
    """Three tokens drafted in each step, of which one is accepted."""
    for number in range(8):
        engine.add(50 + 400 * number, 40)
        engine.step()
    engine.run()


SCENARIOS: dict[str, tuple[Shape, Callable[[Engine], None]]] = {
    "sequence_cap": (replace(SMALL, max_num_seqs=2), sequence_cap),
    "token_budget": (replace(SMALL, max_num_batched_tokens=64), token_budget),
    "kv_blocks": (replace(SMALL, num_blocks=65, prefix_caching=False), kv_blocks),
    "long_among_short": (SMALL, long_among_short),
    "nothing_wrong": (SMALL, nothing_wrong),
    "priorities": (replace(SMALL, num_blocks=120, max_num_seqs=8, policy="priority"), priorities),
    "drafts": (replace(SMALL, draft_tokens=3, max_num_seqs=4, max_num_batched_tokens=512), drafts),
    "anything": (replace(SMALL, num_blocks=140, max_num_batched_tokens=512, max_num_seqs=6), anything),
}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "Scheduler": {"asynchronous": False},
    "AsyncScheduler": {"asynchronous": True, "in_flight": 2},
    "AsyncScheduler, three in flight": {"asynchronous": True, "in_flight": 3},
}


def play(clock: VirtualTime, folder: Path) -> None:
    """Every scenario on every scheduler."""
    import witness

    from vllm_slo.exporters.probe import outbox, plugin

    sent: list[Any] = []
    outbox.Outbox.put = lambda _self, record: sent.append(record)  # type: ignore[method-assign]
    plugin.register()
    log = witness.Witness(folder / "none")
    log.watch()
    for scheduler, options in SCHEDULERS.items():
        for name, (shape, scenario) in SCENARIOS.items():
            log.start(folder / f"{name}.{scheduler}.witness")
            sent.clear()
            engine = Engine(replace(shape, **options), clock)
            scenario(engine)
            clock.pass_ns(2_000_000_000)
            with (folder / f"{name}.{scheduler}.spans").open("w") as file:
                for span in (record.span() for record in sent):
                    line = {"name": span.name, "start": span.start_ns, "end": span.end_ns, **span.attributes}
                    file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    with virtual_time() as time_of_all:
        play(time_of_all, Path(sys.argv[1]))
