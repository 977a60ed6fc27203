"""A call that may hang, made in a thread of its own: whoever waits for it waits no longer than a limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Result = TypeVar("Result")


class Timed(Generic[Result]):
    """Calls ``function`` in a daemon thread. While one call hangs no other is begun, and nobody waits for it twice.

    Several threads may begin and wait: they share the call that is under way.
    """

    def __init__(self, function: Callable[[], Result], limit_seconds: float, name: str) -> None:
        self._function = function
        self._limit = limit_seconds
        self._name = name
        self._lock = threading.Lock()
        self._call: threading.Thread | None = None
        self._begun = 0.0
        self.last: Result | None = None
        self.fault: BaseException | None = None

    def begin(self) -> None:
        """Start a call, unless one is under way."""
        with self._lock:
            if self._call is not None and self._call.is_alive():
                return
            self._call = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._begun = time.monotonic()
            self._call.start()

    def finished(self) -> bool:
        """Wait for the call that was begun until its limit, and say whether it is over; then ``last`` is its result.

        ``fault`` is what it raised instead, and ``last`` the result of an earlier call.
        """
        call = self._call
        if call is None:
            return False
        call.join(max(0.0, self._begun + self._limit - time.monotonic()))
        return not call.is_alive()

    def _run(self) -> None:
        try:
            self.last = self._function()
            self.fault = None
        except BaseException as error:  # noqa: BLE001 - handed to whoever waits
            self.fault = error
