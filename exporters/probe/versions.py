"""The versions of vLLM that the probe knows: what is hooked in each, checked against the live classes. Data first.

A development version counts as its minor version: the check decides whether that holds.
"""

from __future__ import annotations

import importlib
import inspect
import re
from dataclasses import dataclass

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
BLOCK_POOL = "vllm.v1.core.block_pool:BlockPool"
OUTPUT_PROCESSOR = "vllm.v1.engine.output_processor:OutputProcessor"


@dataclass(frozen=True)
class Hooked:
    """A method that the probe wraps, with the parameters it must have, in order; more may follow."""

    owner: str
    method: str
    parameters: tuple[str, ...] = ()
    why: str = ""


_ENGINE = (
    Hooked(SCHEDULER, "__init__", ("vllm_config", "kv_cache_config"), "the engine is there"),
    Hooked(SCHEDULER, "schedule", (), "a step begins; what was scheduled"),
    Hooked(SCHEDULER, "update_from_output", ("scheduler_output", "model_runner_output"), "a step ends"),
    Hooked(SCHEDULER, "add_request", ("request",), "a request is queued, a session goes on"),
    Hooked(SCHEDULER, "_preempt_request", ("request", "timestamp"), "a request loses its blocks"),
    Hooked(SCHEDULER, "_free_request", ("request",), "a request ends, however it does"),
    Hooked(SCHEDULER, "_handle_stopped_request", ("request",), "a turn of a session ends"),
    Hooked(SCHEDULER, "set_pause_state", ("pause_state",), "the engine pauses"),
    Hooked(BLOCK_POOL, "get_new_blocks", ("num_blocks",), "cached blocks are thrown out"),
)
_FRONTEND = (
    Hooked(OUTPUT_PROCESSOR, "add_request", ("request", "prompt", "parent_req"), "a request comes"),
    Hooked(OUTPUT_PROCESSOR, "_update_stats_from_finished", ("req_state", "finish_reason", "iteration_stats"), "ends"),
    Hooked(OUTPUT_PROCESSOR, "_finish_request", ("req_state",), "is refused by a paused engine"),
    Hooked(OUTPUT_PROCESSOR, "abort_requests", ("request_ids", "internal"), "is aborted"),
    Hooked(OUTPUT_PROCESSOR, "propagate_error", ("e",), "dies with the engine"),
)
_HANDLE = Hooked(SCHEDULER, "_handle_blocked_waiting_request", ("request",), "the scan looks at a waiting request")
_SELECT = Hooked(SCHEDULER, "_select_waiting_queue_for_scheduling", (), "the scan looks at a waiting request")


@dataclass(frozen=True)
class Version:
    """What one minor version of vLLM looks like."""

    minor: str
    verified: str
    """How this row was verified."""
    look: Hooked
    """The method that a scan calls once for each waiting request that it looks at."""
    queues: tuple[str, str]
    """Attributes of the scheduler that hold waiting requests, in the order of the scan."""
    skipped: str
    """Attribute that holds those of them that a scan passed over."""
    cap: str
    """Attribute with the number of sequences that may run."""
    idle_loras: bool
    """Whether adapters of running requests that are not in the step count as well."""
    passes_unfit: bool
    """Whether the scan goes on behind a request whose encoder input, or look-ahead of drafts, does not fit."""
    engine: tuple[Hooked, ...] = _ENGINE
    frontend: tuple[Hooked, ...] = _FRONTEND


_BEFORE_31 = (_SELECT, ("skipped_waiting", "waiting"), "skipped_waiting", "max_num_running_reqs")
_SINCE_31 = (_HANDLE, ("kv_holding_waiting", "waiting"), "deferred_waiting", "max_num_active_reqs")

VERSIONS: tuple[Version, ...] = (
    Version("0.29", "source read", *_BEFORE_31, idle_loras=False, passes_unfit=False),
    Version("0.30", "source read", *_BEFORE_31, idle_loras=False, passes_unfit=False),
    Version("0.31", "source read", *_SINCE_31, idle_loras=False, passes_unfit=False),
    Version("0.32", "tests run on it", *_SINCE_31, idle_loras=False, passes_unfit=False),
    # Also new in 0.33, and read from the scheduler itself: a prefill interval without data parallelism.
    Version("0.33", "source read", *_SINCE_31, idle_loras=True, passes_unfit=True),
)


def known() -> str:
    """The minor versions of the table, for messages."""
    return ", ".join(version.minor for version in VERSIONS)


def find(version: str) -> Version | None:
    """The row of a version; None when the table has none.

    >>> find("0.32.1rc2.dev5+gabc").minor
    '0.32'
    """
    parts = re.match(r"(\d+\.\d+)(?!\d)", version)
    return next((row for row in VERSIONS if parts and row.minor == parts[1]), None)


def differences(hooks: tuple[Hooked, ...]) -> list[str]:
    """What the live classes lack of these hooks, a line each; imports the modules that they are in."""
    found = []
    for hook in hooks:
        module, _, name = hook.owner.partition(":")
        owner = getattr(importlib.import_module(module), name, None)
        method = getattr(owner, hook.method, None)
        if not callable(method):
            found.append(f"{name}.{hook.method} is not there")
            continue
        method = inspect.unwrap(method)
        parameters = tuple(inspect.signature(method).parameters)[1 : 1 + len(hook.parameters)]
        if parameters != hook.parameters:
            found.append(f"{name}.{hook.method} takes ({', '.join(parameters)}), not ({', '.join(hook.parameters)})")
    return found


ATTRIBUTES: tuple[str, ...] = (
    "requests",
    "running",
    "waiting",
    "max_num_scheduled_tokens",
    "num_waiting_for_streaming_input",
    "connector",
    "ec_connector",
    "lora_config",
    "num_spec_tokens",
    "scheduler_config",
    "kv_cache_manager",
    "vllm_config",
    "_pause_state",
)


def missing_attributes(scheduler: object, row: Version) -> list[str]:
    """Attributes that a scheduler must have and has not."""
    wanted = (*ATTRIBUTES, *row.queues, row.skipped, row.cap)
    return sorted({name for name in wanted if not hasattr(scheduler, name)})
