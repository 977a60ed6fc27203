"""Cases on vLLM's own schedulers in virtual time, each a dictionary of what came out; run under vLLM's interpreter.

Arguments: folders for sys.path, then nothing. Prints one JSON object: scheduler -> case -> result.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

sys.path[:0] = sys.argv[1:]

from schedulers import STOP_TOKEN, Engine, Shape, VirtualTime, virtual_time  # noqa: E402

SMALL = Shape(max_num_seqs=4, max_num_batched_tokens=256, num_blocks=1000)
sent: list[Any] = []

Case = Callable[[VirtualTime, dict[str, Any]], dict[str, Any]]


def engine(clock: VirtualTime, options: dict[str, Any], **shape: Any) -> Engine:
    return Engine(replace(SMALL, **{**options, **shape}), clock)


def spans(kind: str = "vllm_slo.engine_request") -> list[dict[str, Any]]:
    found = [record.span() for record in sent]
    return [
        {name.removeprefix("vllm_slo."): value for name, value in span.attributes.items()}
        for span in found
        if span.name == kind
    ]


def by_id() -> dict[str, dict[str, Any]]:
    return {span["engine_request_id"]: span for span in spans()}


def aborts(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """Waiting, running between steps, running during a step, and twice."""
    e = engine(clock, options, max_num_seqs=2)
    running, during, waiting, rest = (e.add(50, 30) for _ in range(4))
    for _ in range(8):
        e.step()
    e.abort(running)
    e.abort(waiting)
    e.abort(waiting)
    e.abort(during, during_step=True)
    e.run()
    return {"spans": by_id(), "running": running, "during": during, "waiting": waiting, "rest": rest}


def priority(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """One that runs, three that wait; the urgent one came last."""
    e = engine(clock, options, max_num_seqs=1, policy="priority")
    first = e.add(20, 10, priority=5)
    e.step()
    low, middle, urgent = (e.add(20, 10, priority=number) for number in (9, 5, -1))
    e.run()
    return {"spans": by_id(), "first": first, "low": low, "middle": middle, "urgent": urgent}


def prefix_cache(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """The same prompt of 100 tokens twice, blocks of 16."""
    e = engine(clock, options)
    prompt = [7 + number % 500 for number in range(100)]
    first = e.add(prompt, 3)
    e.run()
    second = e.add(prompt, 3)
    e.run()
    return {"spans": by_id(), "first": first, "second": second}


def evictions(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """Prompts one after another that fill a small cache three times over, and what vLLM's own hook saw."""
    from vllm.v1.core.block_pool import BlockPool

    seen = [0]
    original = BlockPool._maybe_evict_cached_block

    def counted(self: Any, block: Any) -> bool:
        evicted = original(self, block)
        seen[0] += evicted
        return bool(evicted)

    BlockPool._maybe_evict_cached_block = counted
    try:
        e = engine(clock, options, num_blocks=21)
        for _ in range(9):
            e.add(100, 2)
            e.run()
    finally:
        BlockPool._maybe_evict_cached_block = original
    return {"evicted": e.scheduler._vllm_slo_engine.meters.evicted_blocks, "seen": seen[0]}


def grammar(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """One waits 60 ms for its grammar at the head of the queue; the one behind passes it."""
    from vllm.v1.request import RequestStatus

    e = engine(clock, options)
    held = e.requests.make(40, 4)
    held.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    held.structured_output_request = _Grammar()
    e.scheduler.add_request(held)
    behind = e.add(40, 30)
    began = clock.now_ns()
    while clock.now_ns() - began < 60_000_000:
        e.step()
    held.structured_output_request = None
    held.status = RequestStatus.WAITING
    e.run()
    return {"spans": by_id(), "held": held.request_id, "behind": behind}


class _Grammar:
    """Compiling."""

    grammar = None


def lora(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """Adapter 2 waits while adapter 1 has the only place; one without an adapter passes."""
    from types import SimpleNamespace

    e = engine(clock, options)
    e.scheduler.lora_config = SimpleNamespace(max_loras=1)
    names = []
    for number in (1, 2, None):
        request = e.requests.make(40, 12)
        if number:
            request.lora_request = SimpleNamespace(
                lora_int_id=number, lora_name=f"adapter-{number}", lora_path=f"adapters/{number}"
            )
        e.scheduler.add_request(request)
        names.append(request.request_id)
    e.run()
    return {"spans": by_id(), "first": names[0], "second": names[1], "plain": names[2]}


def session(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """Two turns with half a second between, then the client closes it."""
    e = engine(clock, options)
    name = "cmpl-session-0-0badcafe"

    def part(more: bool) -> Any:
        request = e.requests.make(30, 6, request_id=name)
        request.resumable = more
        return request

    e.keep_outputs = True
    e.scheduler.add_request(part(True))
    e.run(60)
    clock.pass_ns(500_000_000)
    e.scheduler.add_request(part(True))
    e.run(60)
    clock.pass_ns(100_000_000)
    e.scheduler.add_request(part(False))
    e.run(10)
    return {
        "spans": spans(),
        "in_flight": len(e.scheduler._vllm_slo_engine.accounting.in_flight),
        "made": sum(tokens for _, _, tokens in e.outputs),
    }


def short_turns(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """A session of three turns of one token, the next input there before the last turn ends; how many vLLM made."""
    e = engine(clock, options)
    e.keep_outputs = True
    name = "cmpl-turns-0-0badcafe"
    for more in (True, True, True, False):
        request = e.requests.make(30, 1, request_id=name)
        request.resumable = more
        e.scheduler.add_request(request)
    e.run(60)
    return {"spans": spans(), "made": sum(tokens for _, _, tokens in e.outputs)}


def frozen(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """All stands still for half a second in which nothing is scheduled; one waits for a place, one comes meanwhile."""
    e = engine(clock, options, max_num_seqs=1)
    state = type(e.scheduler.pause_state)
    running, waiting = e.add(20, 40), e.add(20, 5)
    for _ in range(10):
        e.step()
    while e._queue:
        e._record(e.scheduler.update_from_output((step := e._queue.popleft()).output, step.result))
    e.scheduler.set_pause_state(state.PAUSED_ALL)
    clock.pass_ns(250_000_000)
    late = e.add(20, 5)
    clock.pass_ns(250_000_000)
    e.scheduler.set_pause_state(state.UNPAUSED)
    e.run()
    accounting = e.scheduler._vllm_slo_engine.accounting
    return {
        "spans": by_id(),
        "running": running,
        "waiting": waiting,
        "late": late,
        "longest_step": accounting.step_longest_ns,
    }


def foreign(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """A scheduler whose own `schedule`, then whose own `update_from_output`, never calls vLLM's."""
    from functools import partial

    from vllm_slo.exporters.probe import guard

    seen = {}
    for name in ("schedule", "update_from_output"):
        with _Reloaded():
            e = engine(clock, options)
            setattr(e.scheduler, name, partial(getattr(type(e.scheduler), name).__wrapped__, e.scheduler))
            for _ in range(30):
                e.add(20, 40)
            finished = e.run()
            seen[name] = {"state": e.scheduler._vllm_slo_engine, "finished": len(e.finished), "steps": finished}
    errors = dict(guard.errors)
    guard.errors.clear()
    guard.off.clear()
    return {**seen, "errors": errors}


def reset(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """The prefix cache is reset under two that run: both lose everything, and nobody waits for blocks."""
    e = engine(clock, options)
    for _ in range(2):
        e.add(60, 20)
    for _ in range(6):
        e.step()
    while e._queue:
        e._record(e.scheduler.update_from_output((step := e._queue.popleft()).output, step.result))
    lost = {request.request_id: request.num_computed_tokens for request in e.scheduler.running}
    e.scheduler.reset_prefix_cache(reset_running_requests=True)
    e.run()
    meters = e.scheduler._vllm_slo_engine.meters
    return {"spans": by_id(), "lost": lost, "causes": sorted({cause for _, _, cause in meters.preemptions})}


def stops(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """One meets its stop token, one its limit of one token."""
    e = engine(clock, options)
    stopping = e.add(20, 50, ignore_eos=False)
    limited = e.add(20, 1)
    count = [0]

    def token(name: str) -> int:
        count[0] += name == stopping
        return STOP_TOKEN if count[0] >= 5 else 5

    e.next_token = token
    e.run()
    return {"spans": by_id(), "stopping": stopping, "limited": limited}


def drafts(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """Three drafted tokens a step, one of them accepted; what vLLM counted itself."""
    e = engine(clock, options, draft_tokens=3)
    own = {"drafted": 0, "accepted": 0}
    update = e.scheduler.make_spec_decoding_stats

    def counted(stats: Any, num_draft_tokens: int, num_accepted_tokens: int, **more: Any) -> Any:
        own["drafted"] += num_draft_tokens
        own["accepted"] += num_accepted_tokens
        return update(stats, num_draft_tokens=num_draft_tokens, num_accepted_tokens=num_accepted_tokens, **more)

    e.scheduler.make_spec_decoding_stats = counted
    e.add(30, 40)
    e.add(30, 40)
    e.run()
    return {"spans": spans(), **own}


def without_stats(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """`--disable-log-stats`."""
    e = engine(clock, options, log_stats=False)
    e.add(20, 5)
    e.run()
    return {"spans": spans()}


def paused(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """No new requests for 80 ms while one decodes; the one that comes then waits for that alone."""
    e = engine(clock, options)
    state = type(e.scheduler.pause_state)
    running = e.add(20, 60)
    for _ in range(4):
        e.step()
    e.scheduler.set_pause_state(state.PAUSED_NEW)
    late = e.add(20, 5)
    began = clock.now_ns()
    while clock.now_ns() - began < 80_000_000:
        e.step()
    e.scheduler.set_pause_state(state.UNPAUSED)
    e.run()
    return {"spans": by_id(), "running": running, "late": late}


def twice(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """Registered again, the hooks are the same, and a request counts once."""
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_slo.exporters.probe import plugin

    before = Scheduler.schedule
    plugin._registered = False
    plugin.register()
    e = engine(clock, options)
    e.add(20, 5)
    e.run()
    return {"same": Scheduler.schedule is before, "spans": spans()}


def sample(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """A second of work with two that run and three that wait, then the sample; and the same state counted directly."""
    e = engine(clock, options, max_num_seqs=2)
    for _ in range(5):
        e.add(100, 400)
    began = clock.now_ns()
    while clock.now_ns() - began < 1_200_000_000:
        e.step()
    found = spans("vllm_slo.engine_sample")
    pool = e.scheduler.kv_cache_manager.block_pool
    return {"samples": found, "free": pool.get_num_free_blocks(), "total": pool.num_gpu_blocks - 1}


def broken(clock: VirtualTime, options: dict[str, Any]) -> dict[str, Any]:
    """Each of the probe's hooks raises, before its work or after, from the third call on: the same tokens come out."""
    from vllm_slo.exporters.probe import guard, hooks

    outcomes: dict[str, Any] = {}
    for after in (False, True):
        original = guard.guarded

        def poisoned(name: str, function: Any, gone: Any = None, after: bool = after, original: Any = original) -> Any:
            calls = [0]

            def raising(*arguments: Any) -> Any:
                calls[0] += 1
                if after or calls[0] < 3:
                    result = function(*arguments)
                    if calls[0] < 3:
                        return result
                raise ZeroDivisionError(name)

            return original(name, raising, gone)

        hooks.guarded = poisoned
        try:
            with _Reloaded():
                e = engine(clock, options, num_blocks=30, prefix_caching=True)
                names = [e.add(60, 40) for _ in range(6)]
                for _ in range(20):
                    e.step()
                e.abort(names[4])
                e.run()
                outcomes["after" if after else "before"] = sorted(e.finished) == sorted({*names} - {names[4]})
        finally:
            hooks.guarded = original
    outcomes["errors"] = sorted(guard.errors)
    outcomes["off"] = sorted(guard.off)
    guard.errors.clear()
    guard.off.clear()
    return outcomes


class _Reloaded:
    """vLLM's own methods again, then hooked anew; afterwards as before."""

    def __enter__(self) -> None:
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.sched.scheduler import Scheduler

        from vllm_slo.exporters.probe import hooks, plugin

        self._before = {kind: dict(vars(kind)) for kind in (Scheduler, BlockPool)}
        for kind in self._before:
            for name, value in list(vars(kind).items()):
                if hasattr(value, "__wrapped__") and not isinstance(value, staticmethod | classmethod | property):
                    setattr(kind, name, value.__wrapped__)
        delattr(Scheduler, hooks.WRAPPED)
        plugin._registered = False
        plugin.register()

    def __exit__(self, *_: object) -> None:
        for kind, names in self._before.items():
            for name, value in names.items():
                if callable(value) and vars(kind).get(name) is not value:
                    setattr(kind, name, value)


CASES: tuple[Case, ...] = (
    aborts,
    priority,
    prefix_cache,
    evictions,
    grammar,
    lora,
    session,
    short_turns,
    frozen,
    foreign,
    reset,
    stops,
    drafts,
    without_stats,
    paused,
    twice,
    sample,
    broken,
)


def main() -> None:
    import vllm  # noqa: F401

    from vllm_slo.exporters.probe import guard, outbox, plugin

    outbox.Outbox.put = lambda _self, record: sent.append(record)  # type: ignore[method-assign]
    outbox.Outbox.start = lambda _self: None  # type: ignore[method-assign]
    plugin.register()
    results: dict[str, dict[str, Any]] = {}
    with virtual_time() as clock:
        from vllm_slo.exporters.probe import engine as module

        module.monotonic_ns = clock.now_ns
        from vllm_slo.exporters.probe import start, watch

        start.monotonic_ns = watch.monotonic_ns = clock.now_ns
        for name, options in (("Scheduler", {"asynchronous": False}), ("AsyncScheduler", {"asynchronous": True})):
            results[name] = {}
            for case in CASES:
                sent.clear()
                results[name][case.__name__] = case(clock, options)
    print(json.dumps({"results": results, "errors": guard.errors}))


if __name__ == "__main__":
    main()
