"""Results for the pages, each computed once for a state of the lake."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, ParamSpec, TypeVar

from vllm_slo.analytics.query import QueryError, Reader

P = ParamSpec("P")
T = TypeVar("T")

KEPT = 512
"""Results kept; the least recently used goes first. They are small: a few hundred numbers each."""


class Answers:
    """Shared by all sessions of the app; safe from any thread."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()

    def now(self) -> Snapshot:
        """The lake as it is now; all answers of one snapshot agree. Raises LakeError when the lake is gone."""
        return Snapshot(self, *self._reader.snapshot())

    def reopened(self) -> Snapshot:
        """As ``now``, over files that are surely there: compaction may have removed those of an older snapshot."""
        self._reader.refresh()
        return self.now()

    def find(self, key: Hashable, compute: Callable[[], T]) -> T:
        """The kept result under a key, else what ``compute`` gives."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                kept: T = self._kept[key]
                return kept
        result = compute()
        with self._lock:
            self._kept[key] = result
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
        return result


class Snapshot:
    """One state of the lake."""

    def __init__(self, answers: Answers, versions: tuple[int, ...], connection: Any) -> None:
        self._answers = answers
        self._versions = versions
        self._connection = connection

    def ask(self, question: Callable[Concatenate[Any, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """``question(connection, *args, **kwargs)``, computed once; its arguments must be hashable."""
        key = (self._versions, question, args, tuple(sorted(kwargs.items())))
        return self._answers.find(key, lambda: question(self._connection, *args, **kwargs))


def lost_a_file(error: QueryError) -> bool:
    """Whether a query failed because a file of its snapshot is gone: compaction and vacuum came in between."""
    return type(error.__cause__).__name__ == "IOException"
