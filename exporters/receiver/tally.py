"""Counts of what came in and what became of it; they outlive the process.

Saved every few seconds and at a clean stop as JSON (``{count name: {label: number}}``): after kill -9 the last few
seconds of counting are missing. Spans are never lost by that, only numbers about them.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

SPANS_ACCEPTED = "spans_accepted"
SPANS_REFUSED = "spans_refused"
SPANS_DUPLICATE = "spans_duplicate"
ATTRIBUTES_DROPPED = "attributes_dropped"
BODIES = "bodies"
BACK_PRESSURE = "back_pressure"
TORN_TAILS = "torn_tails"
TORN_BYTES = "torn_bytes"
DAMAGED_RECORDS = "damaged_records"
SEGMENTS_QUARANTINED = "segments_quarantined"
SEGMENTS_COMMITTED = "segments_committed"
LAKE_ERRORS = "lake_errors"


class Tally:
    """Named counts by label; safe from any thread. A label of two parts is written ``first/second``."""

    def __init__(self, counts: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self._guard = threading.Lock()
        self._counts: dict[str, dict[str, int]] = {name: dict(labels) for name, labels in (counts or {}).items()}

    def add(self, name: str, label: str = "", count: int = 1) -> None:
        """Count ``count`` more; nothing happens for 0."""
        if not count:
            return
        with self._guard:
            labels = self._counts.setdefault(name, {})
            labels[label] = labels.get(label, 0) + count

    def counts(self) -> dict[str, dict[str, int]]:
        """A copy of everything counted."""
        with self._guard:
            return {name: dict(labels) for name, labels in self._counts.items()}

    def get(self, name: str, label: str = "") -> int:
        """One count, 0 when never counted."""
        with self._guard:
            return self._counts.get(name, {}).get(label, 0)

    def save(self, path: Path) -> None:
        """Write everything counted, atomically. Raises OSError."""
        draft = path.with_suffix(".draft")
        draft.write_text(json.dumps(self.counts(), indent=1, sort_keys=True) + "\n", encoding="utf-8")
        os.replace(draft, path)

    @classmethod
    def load(cls, path: Path) -> Tally:
        """What was saved; nothing when there is no such file or it cannot be read as counts."""
        try:
            found = json.loads(path.read_bytes())
            return cls({str(n): {str(k): int(v) for k, v in labels.items()} for n, labels in found.items()})
        except (OSError, ValueError, AttributeError, TypeError):
            return cls()
