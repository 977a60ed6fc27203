"""Wraps the methods of vLLM's scheduler, once: what they return and raise stays theirs, whatever the probe does.

`AsyncScheduler` and the diffusion schedulers inherit or call the wrapped methods, so each event is seen once.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from vllm_slo.exporters.probe.engine import EVICTED, Engine
from vllm_slo.exporters.probe.guard import guarded

STATE = "_vllm_slo_engine"
WRAPPED = "_vllm_slo_wrapped"


def wrap_scheduler(scheduler_class: Any, pool_class: Any, look: str, make: Callable[[Any], Engine | None]) -> None:
    """Puts the hooks around the methods; ``make`` makes the engine of a scheduler, None: the probe is off for it.

    A second call has no effect. Once a hook is off, all are: the accounting of half the events would be wrong.
    """
    if WRAPPED in vars(scheduler_class):
        return
    setattr(scheduler_class, WRAPPED, True)
    schedulers: weakref.WeakSet[Any] = weakref.WeakSet()

    def gone() -> None:
        for scheduler in schedulers:
            engine, scheduler.__dict__[STATE] = scheduler.__dict__.get(STATE), False
            if engine:
                engine.switch_off()

    def hook(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return guarded(f"engine.{name}", function, gone)

    def remember_and_make(scheduler: Any) -> Engine | None:
        schedulers.add(scheduler)
        return make(scheduler)

    made = hook("start", remember_and_make)

    def first_call(scheduler: Any) -> Any:
        """Makes its engine; False where the probe is off."""
        engine = scheduler.__dict__[STATE] = made(scheduler) or False
        return engine

    def replace(owner: Any, name: str, make_wrapper: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, functools.wraps(original)(make_wrapper(original)))

    def init(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(self: Any, *arguments: Any, **named: Any) -> None:
            original(self, *arguments, **named)
            if STATE not in self.__dict__:
                first_call(self)

        return __init__

    def schedule(original: Callable[..., Any]) -> Callable[..., Any]:
        begins = hook("schedule_begins", Engine.schedule_begins)
        ends = hook("schedule_ends", Engine.schedule_ends)

        def schedule(self: Any, *arguments: Any, **named: Any) -> Any:
            engine = self.__dict__.get(STATE)
            if not engine and (engine is False or not (engine := first_call(self))):
                return original(self, *arguments, **named)
            begins(engine, self, arguments[0] if arguments else named.get("throttle_prefills", False))
            output = original(self, *arguments, **named)
            ends(engine, self, output)
            return output

        return schedule

    def update(original: Callable[..., Any]) -> Callable[..., Any]:
        begins = hook("update_begins", Engine.update_begins)
        ends = hook("update_ends", Engine.update_ends)

        def update_from_output(
            self: Any, scheduler_output: Any, model_runner_output: Any, *arguments: Any, **named: Any
        ) -> Any:
            engine = self.__dict__.get(STATE)
            if not engine and (engine is False or not (engine := first_call(self))):
                return original(self, scheduler_output, model_runner_output, *arguments, **named)
            begins(engine, scheduler_output, model_runner_output)
            result = original(self, scheduler_output, model_runner_output, *arguments, **named)
            ends(engine, self, scheduler_output, result)
            return result

        return update_from_output

    def before(name: str, function: Callable[[Engine, Any], None]) -> Callable[..., Any]:
        """A wrapper that tells of a request before something happens to it."""

        def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
            tell = hook(name, function)

            def hooked(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
                engine = self.__dict__.get(STATE)
                if engine or (engine is None and (engine := first_call(self))):
                    tell(engine, request)
                return original(self, request, *arguments, **named)

            return hooked

        return wrapper

    def stopped(original: Callable[..., Any]) -> Callable[..., Any]:
        tell = hook("turn_ended", Engine.turn_ended)

        def _handle_stopped_request(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
            engine = self.__dict__.get(STATE) if getattr(request, "resumable", False) else None
            if not engine:
                return original(self, request, *arguments, **named)
            tokens = getattr(request, "num_output_tokens", 0)  # the next input may take them away
            finished = original(self, request, *arguments, **named)
            tell(engine, request, tokens, finished)
            return finished

        return _handle_stopped_request

    def pause(original: Callable[..., Any]) -> Callable[..., Any]:
        tell = hook("paused", Engine.paused)

        def set_pause_state(self: Any, *arguments: Any, **named: Any) -> Any:
            result = original(self, *arguments, **named)
            if engine := self.__dict__.get(STATE):
                tell(engine, self)
            return result

        return set_pause_state

    def handled(original: Callable[..., Any]) -> Callable[..., Any]:
        tell = hook("looked", lambda engine, scheduler, request, ready: engine.scan.handled(scheduler, request, ready))

        def _handle_blocked_waiting_request(self: Any, request: Any, *arguments: Any, **named: Any) -> Any:
            ready = original(self, request, *arguments, **named)
            if engine := self.__dict__.get(STATE):
                tell(engine, self, request, ready)
            return ready

        return _handle_blocked_waiting_request

    def selected(original: Callable[..., Any]) -> Callable[..., Any]:
        tell = hook("looked", lambda engine, scheduler, queue: engine.scan.selected(scheduler, queue))

        def _select_waiting_queue_for_scheduling(self: Any, *arguments: Any, **named: Any) -> Any:
            queue = original(self, *arguments, **named)
            if engine := self.__dict__.get(STATE):
                tell(engine, self, queue)
            return queue

        return _select_waiting_queue_for_scheduling

    def new_blocks(original: Callable[..., Any]) -> Callable[..., Any]:
        # Only evictions change the map in there. Of blocks with the same content the last one counts.
        count = hook("evicted", lambda pool, cached: getattr(pool, EVICTED)(cached - _cached(pool)))

        def get_new_blocks(self: Any, *arguments: Any, **named: Any) -> Any:
            # Called several times a step, mostly to evict nothing: the guard is only entered where something changed.
            if EVICTED not in self.__dict__:
                return original(self, *arguments, **named)
            cached = _cached(self)
            blocks = original(self, *arguments, **named)
            if cached != _cached(self):
                count(self, cached)
            return blocks

        return get_new_blocks

    replace(scheduler_class, "__init__", init)
    replace(scheduler_class, "schedule", schedule)
    replace(scheduler_class, "update_from_output", update)
    replace(scheduler_class, "add_request", before("added", Engine.added))
    replace(scheduler_class, "_preempt_request", before("preempting", Engine.preempting))
    replace(scheduler_class, "_free_request", before("ending", Engine.ending))
    replace(scheduler_class, "_handle_stopped_request", stopped)
    replace(scheduler_class, "set_pause_state", pause)
    replace(scheduler_class, look, handled if look == "_handle_blocked_waiting_request" else selected)
    replace(pool_class, "get_new_blocks", new_blocks)


def _cached(pool: Any) -> int:
    """How many contents a pool has cached; -1 where it does not say."""
    try:
        return len(pool.cached_block_hash_to_block)
    except Exception:  # noqa: BLE001
        return -1
