"""On PYTHONPATH of a vLLM under test: what the probe guards raises as the file POISON_MODE says.

`off`, `sometimes` (the first call for sure), `always`, or the name of the one hook that always raises. POISON_LOG gets
`made NAME` and `raised NAME`, once a process each.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from typing import Any

from vllm_slo.exporters.probe import guard

_original = guard.guarded
RARELY = 0.1
"""Before its work and after it, each; so ten times in a row, which would end a hook, never."""
_chance = random.Random(7)
_mode = ["off", 0.0]
_noted: set[str] = set()


class PoisonError(Exception):
    """Injected."""


def _note(what: str) -> None:
    if what not in _noted:
        _noted.add(what)
        with open(os.environ["POISON_LOG"], "a") as log:
            log.write(f"{what}\n")


def _current() -> str:
    now = time.monotonic()
    if now >= _mode[1]:
        with open(os.environ["POISON_MODE"]) as file:
            _mode[:] = file.read().strip(), now + 0.2
    return str(_mode[0])


def guarded(name: str, function: Callable[..., Any], *rest: Any, **named: Any) -> Any:
    """As the product's, of a function that raises before or after its work."""
    _note(f"made {name}")

    def poisoned(*arguments: Any, **keywords: Any) -> Any:
        mode = _current()
        first = f"raised {name}" not in _noted
        if mode in ("always", name) or (mode == "sometimes" and (first or _chance.random() < RARELY)):
            _note(f"raised {name}")
            raise PoisonError(name)
        result = function(*arguments, **keywords)
        if mode == "sometimes" and _chance.random() < RARELY:
            _note(f"raised {name}")
            raise PoisonError(name)
        return result

    return _original(name, poisoned, *rest, **named)


guard.guarded = guarded
