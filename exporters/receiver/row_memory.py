"""Decoded rows of spooled segments that the lake has not taken yet, so that they need not be decoded twice."""

from __future__ import annotations

import threading

from vllm_slo.exporters.otlp.lot import Lot

_TABLE_BYTES = 16 * 1024
"""What the objects of one decoded body take, whatever its rows."""


class RowMemory:
    """Rows by segment, up to ``limit`` bytes; a segment of which any rows did not fit is not kept at all.

    Filled by the intake's thread, emptied by the drain's.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._guard = threading.Lock()
        self._size = 0
        self._kept: dict[int, list[Lot] | None] = {}
        self._sizes: dict[int, int] = {}

    @property
    def filled(self) -> float:
        """Share of the limit in use."""
        return self._size / self._limit if self._limit else 0.0

    def add(self, number: int, lot: Lot, body_bytes: int) -> None:
        """Keep the rows of one decode of ``body_bytes`` for segment ``number``."""
        # Rows take about the memory of their body (607,000 of 621,000 bytes measured), and each column has its own.
        size = body_bytes + _TABLE_BYTES
        with self._guard:
            rows = self._kept.setdefault(number, [])
            if rows is None:
                return
            if self._size + size > self._limit:
                self._kept[number] = None
                self._size -= self._sizes.pop(number, 0)
                return
            rows.append(lot)
            self._size += size
            self._sizes[number] = self._sizes.get(number, 0) + size

    def pop(self, number: int) -> Lot | None:
        """All rows of a segment, once; None when they are not all here."""
        with self._guard:
            rows = self._kept.pop(number, None)
            self._size -= self._sizes.pop(number, 0)
        return Lot.joined(rows) if rows else None
