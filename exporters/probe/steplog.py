"""A line for each step, with all that the accounting goes by: to check it, and to see what a scheduler did.

Lines wait in memory until the outbox's thread writes them, once a second. For debugging: the file grows without bound.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_slo.exporters.probe.life import Life
from vllm_slo.exporters.probe.steps import Chunk

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

    def scheduled(
        self,
        output: Any,
        start_ns: int,
        chunks: Sequence[Chunk],
        reason: str,
        head: Life | None,
        waiting: int,
        passed: Sequence[tuple[Any, str | None]],
    ) -> None:
        """Notes a step; ``passed`` are the requests that the scan looked at and did not schedule."""
        self._count += 1
        self._steps[id(output)] = self._count
        self.write(
            "schedule",
            step=self._count,
            start_ns=start_ns,
            tokens=dict(output.num_scheduled_tokens),
            admitted=[new.req_id for new in output.scheduled_new_reqs],
            resumed=sorted(output.scheduled_cached_reqs.resumed_req_ids),
            prefilling=[chunk.life.engine_request_id for chunk in chunks],
            reason=reason,
            head=head.engine_request_id if head is not None else None,
            waiting=waiting,
            deferred={request.request_id: why for request, why in passed if why is not None},
        )

    def updated(self, output: object, end_ns: int, arrived: Sequence[Life]) -> None:
        """Notes that the output of a step was taken in; the step is null where it was not noted."""
        first = [life.engine_request_id for life in arrived]
        self.write("update", step=self._steps.pop(id(output), None), end_ns=end_ns, first=first)

    def flush(self) -> None:
        """Writes what waits. Raises OSError."""
        lines = self._lines
        if not lines:
            return
        with self._path.open("a", encoding="utf-8") as file:
            for _ in range(len(lines)):
                file.write(json.dumps(lines.popleft()) + "\n")
