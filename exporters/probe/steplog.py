"""A line for each step, with all that the accounting goes by: to check it, and to see what a scheduler did.

Lines wait in memory until the outbox's thread writes them, once a second. For debugging: the file grows without bound.
"""

from __future__ import annotations

import json
from collections import deque
from pathlib import Path
from typing import Any

MOST_WAITING = 100_000
"""Lines; the oldest are lost beyond that."""


class StepLog:
    """Appends JSON lines to a file; times are nanoseconds of the monotonic clock.

    * ``added``: id, at_ns, prompt_tokens, arrival_ns (epoch)
    * ``schedule``: step, start_ns, tokens (id -> scheduled), admitted and resumed ids, prefilling ids, reason, head,
      waiting, deferred (id -> reason, of those that the scan looked at)
    * ``update``: step, end_ns, first (ids with the first token after prefill or recomputation)
    * ``preempted``: id, at_ns, lost_tokens
    * ``ended``: id, reason, at_ns
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: deque[dict[str, Any]] = deque(maxlen=MOST_WAITING)
        self._steps: dict[int, int] = {}
        self._count = 0

    def write(self, event: str, **values: Any) -> None:
        """Notes a line, to be written later."""
        self._lines.append({"event": event, **values})

    def step(self, output: object) -> int:
        """Number of a step that is scheduled now; `ended_step` gives it back."""
        self._count += 1
        self._steps[id(output)] = self._count
        return self._count

    def ended_step(self, output: object) -> int | None:
        """Its number, once."""
        return self._steps.pop(id(output), None)

    def flush(self) -> None:
        """Writes what waits. Raises OSError."""
        lines = self._lines
        if not lines:
            return
        with self._path.open("a", encoding="utf-8") as file:
            for _ in range(len(lines)):
                file.write(json.dumps(lines.popleft()) + "\n")
