"""Arithmetic of rollup cells as numpy columns: distinct keys, exact sums, coarser times. Pure."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.exporters.schema import SECONDS_SUM

Integers = npt.NDArray[np.int64]

NO_BIN = -32767
"""Stands for "no bin" in the columns of cells; no bin of a positive time comes near it."""
_HALF = 1 << 32
_WIDE = 1 << 60


@dataclass(frozen=True)
class Cells:
    """Cells column by column. ``label`` numbers a combination of labels.

    The sum of a cell is ``high * 2^32 + low`` billionths with 0 <= low < 2^32; ``high`` holds Python integers where 64
    bits might not do.
    """

    time: Integers
    day: Integers
    metric: Integers
    label: Integers
    quality: Integers
    bin: Integers
    count: Integers
    low: Integers
    high: npt.NDArray[Any]
    has_sum: npt.NDArray[np.bool_]

    def at(self, places: npt.NDArray[Any]) -> Cells:
        """Some of the cells, in a given order."""
        return Cells(**{f.name: getattr(self, f.name)[places] for f in fields(self)})


def joined(pieces: list[Cells]) -> Cells:
    """All cells of several lots, one after the other."""
    return Cells(**{f.name: np.concatenate([getattr(p, f.name) for p in pieces]) for f in fields(Cells)})


def coarser(cells: Cells, factor: int) -> Cells:
    """The cells with times in units ``factor`` times as long, equal ones summed, in order of their keys.

    ``factor`` 1 only sums and orders.
    """
    cells = replace(cells, time=cells.time // factor)
    keys = (cells.time, cells.day, cells.metric, cells.label, cells.quality, cells.bin)
    code, _ = distinct(list(keys))
    if np.all(code[1:] > code[:-1]):
        return cells
    order = np.argsort(code, kind="stable")
    ordered = code[order]
    first = np.flatnonzero(np.concatenate([[True], ordered[1:] != ordered[:-1]]))
    high = cells.high.astype(object) if len(code) and _widest(cells.high) >= _WIDE // len(code) else cells.high
    low, carried = settle(np.add.reduceat(cells.low[order], first), np.add.reduceat(high[order], first))
    summed = cells.at(order[first])
    return replace(summed, count=np.add.reduceat(cells.count[order], first), low=low, high=carried)


def sums(place: Integers, values: Integers, size: int, scale: int) -> tuple[Integers, npt.NDArray[Any]]:
    """Exact sums of int64 values times a scale, at each place: (low, high) as in Cells.

    At most 2^20 values: sums of their 32-bit halves stay exact in float64.
    """
    low = np.bincount(place, weights=(values & (_HALF - 1)).astype(np.float64), minlength=size).astype(np.int64)
    high = np.bincount(place, weights=(values >> 32).astype(np.float64), minlength=size).astype(np.int64)
    low, high = settle(low, high)
    if scale == 1:
        return low, high
    wide = high.astype(object) if _widest(high) >= _WIDE // scale else high
    return settle(low * scale, wide * scale)


def settle(low: Integers, high: npt.NDArray[Any]) -> tuple[Integers, npt.NDArray[Any]]:
    """The same numbers with 0 <= low < 2^32."""
    return low & (_HALF - 1), high + (low >> 32)


def distinct(columns: list[Integers]) -> tuple[Integers, list[Integers]]:
    """Each row's place among the distinct combinations, and those combinations column by column, in order."""
    rows = len(columns[0])
    if rows == 0:
        return np.zeros(0, dtype=np.int64), [np.zeros(0, dtype=np.int64) for _ in columns]
    code = np.zeros(rows, dtype=np.int64)
    ranges: list[tuple[int, int]] = []
    total = 1
    for column in columns:
        low = int(column.min())
        width = int(column.max()) - low + 1
        total *= width
        if total >= 1 << 62:
            return _distinct_dense(columns)
        code = code * width + (column - low) if width > 1 else code
        ranges.append((low, width))
    if total <= 4 * rows + 65_536:
        seen = np.zeros(total, dtype=bool)
        seen[code] = True
        combinations = np.flatnonzero(seen)
        inverse = (np.cumsum(seen) - 1)[code]
    else:
        combinations, inverse = np.unique(code, return_inverse=True)
    keys: list[Integers] = []
    for low, width in reversed(ranges):
        combinations, remainder = np.divmod(combinations, width)
        keys.append(remainder + low)
    return inverse, keys[::-1]


def _distinct_dense(columns: list[Integers]) -> tuple[Integers, list[Integers]]:
    """The same for columns whose combined range passes 62 bits: pairs of columns are numbered first."""
    inverse, keys = np.unique(columns[0], return_inverse=True)[::-1]
    result = [keys]
    for column in columns[1:]:
        values, place = np.unique(column, return_inverse=True)
        pair = inverse.astype(np.int64) * len(values) + place
        pairs, inverse = np.unique(pair, return_inverse=True)
        outer, inner = np.divmod(pairs, len(values))
        result = [key[outer] for key in result] + [values[inner]]
    return inverse.astype(np.int64), result


def decimals(low: Integers, high: npt.NDArray[Any], has_sum: npt.NDArray[np.bool_]) -> pa.Array:
    """``high * 2^32 + low`` billionths as decimal(38, 9), null where there is no sum."""
    if high.dtype == object:
        whole = [h * _HALF + int(n) if has else None for h, n, has in zip(high, low, has_sum, strict=True)]
        return pa.array([None if w is None else Decimal(w).scaleb(-9) for w in whole], type=SECONDS_SUM)
    words = np.empty((len(low), 2), dtype=np.int64)
    words[:, 0] = (high << 32) | low
    words[:, 1] = high >> 32
    array = pa.Array.from_buffers(SECONDS_SUM, len(low), [None, pa.py_buffer(words.tobytes())])
    return array if has_sum.all() else pc.if_else(pa.array(has_sum), array, pa.scalar(None, SECONDS_SUM))


def halves(column: pa.Array) -> tuple[Integers, npt.NDArray[Any], npt.NDArray[np.bool_]]:
    """decimal(38, 9) as (low, high, has_sum); the inverse of `decimals`."""
    has_sum = np.asarray(column.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
    if not has_sum.any():
        return np.zeros(len(column), dtype=np.int64), np.zeros(len(column), dtype=np.int64), has_sum
    words = np.frombuffer(column.buffers()[1], dtype=np.int64)[2 * column.offset : 2 * (column.offset + len(column))]
    first, second = np.where(has_sum, words[0::2], 0), np.where(has_sum, words[1::2], 0)
    low, middle = first & (_HALF - 1), (first >> 32) & (_HALF - 1)
    if _widest(second) >= _WIDE >> 32:
        second = second.astype(object)
    return low, second * _HALF + middle, has_sum


def _widest(values: npt.NDArray[Any]) -> int:
    return max(abs(int(values.max())), abs(int(values.min()))) if len(values) else 0
