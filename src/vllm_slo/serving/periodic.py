"""Work that is done every so often in a thread of its own, whatever becomes of one turn."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)


class Periodic:
    """Calls ``work`` every ``seconds`` after the end of the last call; a failure is logged when it is a new one."""

    def __init__(self, name: str, work: Callable[[], object], seconds: float) -> None:
        self.failures = 0
        self._work = work
        self._seconds = seconds
        self._ending = threading.Event()
        self._last = ""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; the first turn comes after one period."""
        self._thread.start()

    def stop(self, patience_seconds: float) -> None:
        """No further turn; wait at most so long for the one that runs."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(patience_seconds)

    def _run(self) -> None:
        while not self._ending.wait(self._seconds):
            try:
                self._work()
                self._last = ""
            except Exception as error:  # noqa: BLE001 - the next turn may succeed
                self.failures += 1
                kind = f"{type(error).__name__}: {error}"
                if kind != self._last:
                    _log.warning("%s failed and will be tried again: %s", self._thread.name, kind)
                self._last = kind
