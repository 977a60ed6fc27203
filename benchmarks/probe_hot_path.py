"""What the probe's hooks cost, measured on real vLLM schedulers without a model; prints one JSON object.

Runs under an interpreter that has vLLM, with `src` (or an installed vllm-slo) and this folder on the path; started by
`probe.py`. Two engines get the same requests; one was made and only ever steps with the probe's hooks in place, the
other never does. They run in blocks of steps by turns, and the cost is the difference of a pair of blocks, so it holds
everything that the hooks change, not only the time inside them. Times are CPU time of the engine's thread: what the
probe's own thread takes is given apart.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from schedulers import Engine, RealTime, Shape, VirtualTime, virtual_time

_MISSING = object()
PROMPT_TOKENS = 64
STEPS = 32
"""Steps in a block: twice the tokens of a KV block, so that each block of steps has as many new KV blocks."""


class Hooks:
    """Everything that ``install`` changed in the classes of vLLM's engine; off after it was made."""

    def __init__(self, install: Callable[[], None]) -> None:
        import vllm.v1.core.sched.async_scheduler
        import vllm.v1.engine.core  # noqa: F401

        before = {kind: dict(vars(kind)) for kind in _engine_classes()}
        install()
        self._changes = [
            (kind, name, old.get(name, _MISSING), new)
            for kind, old in before.items()
            for name, new in dict(vars(kind)).items()
            if callable(getattr(kind, name, None)) and old.get(name, _MISSING) is not new
        ]
        if not self._changes:
            raise SystemExit("the probe has hooked nothing; what it logged above says why")
        self._set(on=False)

    def _set(self, on: bool) -> None:
        for kind, name, old, new in self._changes:
            if on:
                setattr(kind, name, new)
            elif old is _MISSING:
                delattr(kind, name)
            else:
                setattr(kind, name, old)

    @property
    def names(self) -> list[str]:
        """What is hooked."""
        return sorted(f"{kind.__name__}.{name}" for kind, name, _, _ in self._changes)

    @contextmanager
    def on(self) -> Iterator[None]:
        """The hooks are in place inside."""
        self._set(on=True)
        try:
            yield
        finally:
            self._set(on=False)


def _engine_classes() -> list[type]:
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("vllm.v1.") and module]
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__.startswith("vllm.v1.")
    }
    return sorted(found, key=lambda kind: (kind.__module__, kind.__qualname__))


def install() -> None:
    """The probe as a server gets it: by its entry point."""
    from vllm_slo.exporters.probe import plugin

    plugin.register()


class Pair:
    """Two engines with the same requests: one with the hooks, one without."""

    def __init__(self, hooks: Hooks, shape: Shape, clock: RealTime | VirtualTime) -> None:
        self._hooks = hooks
        with hooks.on():
            self.hooked = Engine(shape, clock)
        self.plain = Engine(shape, clock)
        self._first_is_hooked = False

    def both(self, what: Callable[[Engine], None]) -> None:
        """Does it to each, with hooks to the one and without to the other."""
        with self._hooks.on():
            what(self.hooked)
        what(self.plain)

    def difference_ns(self, what: Callable[[Engine], Any]) -> tuple[int, int]:
        """(with hooks, without) in nanoseconds of CPU time of this thread; who is first alternates."""
        self._first_is_hooked = not self._first_is_hooked
        if self._first_is_hooked:
            hooked, plain = self._hooked_ns(what), _thread_ns(what, self.plain)
        else:
            plain, hooked = _thread_ns(what, self.plain), self._hooked_ns(what)
        return hooked, plain

    def _hooked_ns(self, what: Callable[[Engine], Any]) -> int:
        with self._hooks.on():
            return _thread_ns(what, self.hooked)


def _thread_ns(what: Callable[[Engine], Any], engine: Engine) -> int:
    start = time.thread_time_ns()
    what(engine)
    return time.thread_time_ns() - start


def _figures(samples: list[tuple[int, int]], per: int) -> dict[str, float]:
    """Microseconds for one of ``per``: median of the differences and its quartiles; what it costs without the probe.

    ``least`` is the difference of the fastest of each: what is left of it on a busy machine.
    """
    extra = sorted((hooked - plain) / per / 1_000 for hooked, plain in samples)
    low, median, high = statistics.quantiles(extra, n=4)
    plain = statistics.median(without / per / 1_000 for _, without in samples)
    least = (min(hooked for hooked, _ in samples) - min(plain for _, plain in samples)) / per / 1_000
    figures = {"us": median, "low": low, "high": high, "least": least, "without_us": plain}
    return {name: round(value, 3) for name, value in figures.items()}


def steps(hooks: Hooks, running: int, waiting: int, asynchronous: bool, blocks: int) -> dict[str, float]:
    """Cost of a step in which ``running`` requests decode and ``waiting`` wait behind the sequence cap."""
    total = PROMPT_TOKENS + blocks * STEPS + 300
    shape = Shape(
        asynchronous=asynchronous,
        max_num_seqs=running,
        max_num_batched_tokens=max(2048, running * PROMPT_TOKENS),
        num_blocks=running * (total // 16 + 2) + 64,
        prefix_caching=False,
    )
    pair = Pair(hooks, shape, RealTime(sleep=False))

    def fill(engine: Engine) -> None:
        for _ in range(running + waiting):
            engine.add(PROMPT_TOKENS, total - PROMPT_TOKENS)
        engine.run(100)

    pair.both(fill)
    _settle()
    samples = [pair.difference_ns(lambda engine: engine.run(STEPS)) for _ in range(blocks)]
    for engine in (pair.hooked, pair.plain):
        counts = engine.scheduler.get_request_counts()
        assert tuple(counts) == (running, waiting), f"{counts} instead of {(running, waiting)} running and waiting"
    return _figures(samples, STEPS)


def requests(hooks: Hooks, asynchronous: bool, blocks: int, count: int = 256) -> dict[str, float]:
    """Cost of a request's whole life beside 63 others: queued, two steps, finished, handed to the probe's thread."""
    shape = Shape(asynchronous=asynchronous, max_num_seqs=64, max_num_batched_tokens=8192, num_blocks=8192)
    pair = Pair(hooks, shape, RealTime(sleep=False))

    def lives(engine: Engine) -> None:
        for _ in range(count):
            engine.add(PROMPT_TOKENS, 2)
        engine.run()

    pair.both(lives)
    _settle()
    process, thread = time.process_time_ns(), time.thread_time_ns()
    samples = [pair.difference_ns(lives) for _ in range(blocks)]
    _drain()
    background = (time.process_time_ns() - process) - (time.thread_time_ns() - thread)
    return {**_figures(samples, count), "background_us": round(background / blocks / count / 1_000, 3)}


def sample(hooks: Hooks, clock: VirtualTime, running: int, blocks: int) -> dict[str, float]:
    """Cost of the one-second sample: steps a second apart against steps a millisecond apart, both with hooks."""
    shape = Shape(max_num_seqs=running, max_num_batched_tokens=running * PROMPT_TOKENS, num_blocks=running * 64)
    with hooks.on():
        engine = Engine(shape, clock)
        for _ in range(running):
            engine.add(PROMPT_TOKENS, blocks * 2 + 100)
        for _ in range(40):
            clock.pass_ns(300_000_000)
            engine.step()
        _settle()
        samples = []
        for _ in range(blocks):
            clock.pass_ns(1_100_000_000)
            with_sample = _thread_ns(Engine.step, engine)
            clock.pass_ns(1_000_000)
            samples.append((with_sample, _thread_ns(Engine.step, engine)))
    figures = _figures(samples, 1_000)
    return {"ms": figures["us"], "low": figures["low"], "high": figures["high"]}


def memory(hooks: Hooks, count: int) -> dict[str, float]:
    """Resident memory, in MiB, while nobody takes the records: after a first tenth of the requests and at the end."""
    shape = Shape(max_num_seqs=64, max_num_batched_tokens=8192, num_blocks=8192)
    with hooks.on():
        engine = Engine(shape, RealTime(sleep=False))
        resident = []
        for tenth in range(10):
            for _ in range(count // 10 // 64):
                for _ in range(64):
                    engine.add(PROMPT_TOKENS, 2)
                engine.run()
            engine.finished.clear()
            gc.collect()
            resident.append(_resident_mib())
            if tenth == 0:
                time.sleep(2)
    return {"requests": count, "first_mib": resident[0], "half_mib": resident[4], "last_mib": resident[-1]}


def _settle() -> None:
    """What is there is left out of later collections, as the engine core does with what it starts with."""
    gc.collect()
    gc.freeze()


def _drain(seconds: float = 3.0) -> None:
    time.sleep(seconds)


def _resident_mib() -> float:
    with open("/proc/self/statm") as statm:
        return round(int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)


def main() -> None:
    """Print the costs of one kind as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("what", choices=("steps", "requests", "sample", "memory"))
    parser.add_argument("--asynchronous", action="store_true", help="AsyncScheduler, two steps in flight")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 1_000, 10_000])
    parser.add_argument("--blocks", type=int, default=40)
    parser.add_argument("--count", type=int, default=100_000, help="requests, for `memory`")
    options = parser.parse_args()
    result: dict[str, Any] = {}
    if options.what == "sample":
        with virtual_time() as clock:
            hooks = Hooks(install)
            result = {str(n): sample(hooks, clock, n, options.blocks) for n in options.running}
    else:
        hooks = Hooks(install)
        if options.what == "steps":
            for running in options.running:
                for waiting in options.waiting:
                    key = f"{running} running, {waiting} waiting"
                    result[key] = steps(hooks, running, waiting, options.asynchronous, options.blocks)
        elif options.what == "requests":
            result = requests(hooks, options.asynchronous, options.blocks)
        else:
            result = memory(hooks, options.count)
    result["hooks"] = hooks.names
    sys.stdout.flush()
    print(json.dumps(result))
    sys.stdout.flush()
    # The probe's thread may be waiting for a receiver that is not there.
    os._exit(0)


if __name__ == "__main__":
    main()
