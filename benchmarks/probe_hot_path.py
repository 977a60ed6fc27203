"""What the probe's hooks cost, measured on real vLLM schedulers without a model; prints one JSON object.

Runs under an interpreter that has vLLM, with `src` (or an installed vllm-slo) and this folder on the path; started by
`probe.py`. vLLM's scheduler and KV cache are imported twice, the probe hooks one of the two, and two engines get the
same requests: one of the hooked classes, one of those that were left alone. (To switch hooks on and off on one class
would throw away what CPython has learnt of it, and make both slower.) They run in blocks of steps by turns, and the
cost is the difference of a pair of blocks, so it holds everything that the hooks change, not only the time inside them.
Times are CPU time of the engine's thread: what the probe's own thread takes is given apart.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from schedulers import Engine, RealTime, Shape, VirtualTime, virtual_time

PROMPT_TOKENS = 64
STEPS = 32
"""Steps in a block: twice the tokens of a KV block, so that each block of steps has as many new KV blocks."""

PAIRS = 4


class Cores:
    """vLLM's `vllm.v1.core` twice: as the probe hooks it, which is what a plain import finds, and left alone."""

    def __init__(self, install: Callable[[], None]) -> None:
        _import_core()
        self._left_alone = {name: module for name, module in sys.modules.items() if _of_core(name)}
        for name in self._left_alone:
            del sys.modules[name]
        _import_core()
        before = _methods()
        install()
        self.names = sorted(name for name, function in _methods().items() if before.get(name) is not function)
        """What is hooked."""
        if not self.names:
            raise SystemExit("the probe has hooked nothing; what it logged above says why")

    @contextmanager
    def left_alone(self) -> Iterator[None]:
        """What is imported inside is what the probe has not hooked."""
        hooked = {name: module for name, module in sys.modules.items() if _of_core(name)}
        sys.modules.update(self._left_alone)
        try:
            yield
        finally:
            sys.modules.update(hooked)


def _of_core(name: str) -> bool:
    return name == "vllm.v1.core" or name.startswith("vllm.v1.core.")


def _import_core() -> None:
    for name in ("kv_cache_manager", "sched.scheduler", "sched.async_scheduler"):
        importlib.import_module(f"vllm.v1.core.{name}")


def _methods() -> dict[str, Any]:
    """Every function of a class of the core, by class and name."""
    modules = [module for name, module in sys.modules.items() if _of_core(name)]
    kinds = {kind for module in modules for kind in vars(module).values() if isinstance(kind, type)}
    return {
        f"{kind.__name__}.{name}": function
        for kind in kinds
        if _of_core(kind.__module__)
        for name, function in vars(kind).items()
        if callable(function)
    }


def install() -> None:
    """The probe as a server gets it: by its entry point."""
    from vllm_slo.exporters.probe import plugin

    plugin.register()


class Pair:
    """Two engines with the same requests: one with the hooks, one without."""

    def __init__(self, cores: Cores, shape: Shape, clock: RealTime | VirtualTime) -> None:
        self.hooked = Engine(shape, clock)
        with cores.left_alone():
            self.plain = Engine(shape, clock)
        self._first_is_hooked = False

    def both(self, what: Callable[[Engine], Any]) -> None:
        """Does it to each."""
        what(self.hooked)
        what(self.plain)

    def difference_ns(self, what: Callable[[Engine], Any]) -> tuple[int, int]:
        """(with hooks, without) in nanoseconds of CPU time of this thread; who is first alternates."""
        self._first_is_hooked = not self._first_is_hooked
        if self._first_is_hooked:
            hooked, plain = _thread_ns(what, self.hooked), _thread_ns(what, self.plain)
        else:
            plain, hooked = _thread_ns(what, self.plain), _thread_ns(what, self.hooked)
        return hooked, plain


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


def steps(cores: Cores, running: int, waiting: int, asynchronous: bool, blocks: int) -> dict[str, float]:
    """Cost of a step in which ``running`` requests decode and ``waiting`` wait behind the sequence cap.

    Over PAIRS pairs of engines: where the objects of an engine lie in memory makes a few microseconds.
    """
    total = PROMPT_TOKENS + blocks * STEPS + 300
    shape = Shape(
        asynchronous=asynchronous,
        max_num_seqs=running,
        max_num_batched_tokens=max(2048, running * PROMPT_TOKENS),
        num_blocks=running * (total // 16 + 2) + 64,
        prefix_caching=False,
    )

    def fill(engine: Engine) -> None:
        for _ in range(running + waiting):
            engine.add(PROMPT_TOKENS, total - PROMPT_TOKENS)
        engine.run(100)

    samples = []
    for _ in range(PAIRS):
        pair = Pair(cores, shape, RealTime(sleep=False))
        pair.both(fill)
        _settle()
        samples += [pair.difference_ns(lambda engine: engine.run(STEPS)) for _ in range(blocks)]
        for engine in (pair.hooked, pair.plain):
            counts = tuple(engine.scheduler.get_request_counts())
            assert counts == (running, waiting), f"{counts} instead of {(running, waiting)} running and waiting"
        gc.unfreeze()
    return _figures(samples, STEPS)


def requests(cores: Cores, asynchronous: bool, blocks: int, count: int = 256) -> dict[str, float]:
    """Cost of a request's whole life beside 63 others: queued, two steps, finished, handed to the probe's thread."""
    shape = Shape(asynchronous=asynchronous, max_num_seqs=64, max_num_batched_tokens=8192, num_blocks=8192)
    pair = Pair(cores, shape, RealTime(sleep=False))

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


def sample(clock: VirtualTime, running: int, blocks: int) -> dict[str, float]:
    """Cost of the one-second sample: steps a second apart against steps a millisecond apart, both with hooks."""
    shape = Shape(max_num_seqs=running, max_num_batched_tokens=running * PROMPT_TOKENS, num_blocks=running * 64)
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


def memory(count: int) -> dict[str, float]:
    """Resident memory, in MiB, while nobody takes the records: after a first tenth of the requests and at the end."""
    shape = Shape(max_num_seqs=64, max_num_batched_tokens=8192, num_blocks=8192)
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
            cores = Cores(install)
            result = {str(n): sample(clock, n, options.blocks) for n in options.running}
    else:
        cores = Cores(install)
        if options.what == "steps":
            for running in options.running:
                for waiting in options.waiting:
                    key = f"{running} running, {waiting} waiting"
                    result[key] = steps(cores, running, waiting, options.asynchronous, options.blocks)
        elif options.what == "requests":
            result = requests(cores, options.asynchronous, options.blocks)
        else:
            result = memory(options.count)
    result["hooks"] = cores.names
    sys.stdout.flush()
    print(json.dumps(result))
    sys.stdout.flush()
    # The probe's thread may be waiting for a receiver that is not there.
    os._exit(0)


if __name__ == "__main__":
    main()
