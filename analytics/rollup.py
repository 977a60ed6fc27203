"""Requests -> rollups: exact counts, exact sums and log2 histograms that add up.

A rollup row is one cell: level, start of its time, shard, model, priority, bucket, metric, and a bin for the histograms.
Rows of the same cell, written by different commits, are summed (`merge`); a reader that sums them itself gets the same.
Ratios are never stored: sum both halves, then divide.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.analytics.buckets import Buckets
from vllm_slo.exporters.schema import (
    BINS_PER_OCTAVE,
    DATE,
    NON_POSITIVE_BIN,
    ROLLUP_METRICS,
    ROLLUPS,
    SECONDS_SUM,
    TIME,
)

Integers = npt.NDArray[np.int64]

LEVELS: dict[str, int] = {"minute": 60_000_000, "hour": 3_600_000_000, "day": 86_400_000_000}
"""Level -> its length in microseconds, finest first; each divides the next."""

HISTOGRAMS: dict[str, str] = {
    "time_to_first_token": "time_to_first_token_seconds",
    "request_duration": "request_duration_seconds",
    "queue": "queue_seconds",
    "prefill": "prefill_seconds",
    "decode": "decode_seconds",
}
"""Metric -> column of `requests`; `time_per_output_token` is computed beside them."""
TOTALS: tuple[str, ...] = ("prompt_tokens", "completion_tokens")

_METRICS = tuple(ROLLUP_METRICS)
_NO_BIN = -32767
_BILLION = 1_000_000_000
_EXACT_ROWS = 1 << 20
"""Sums of 32-bit halves stay exact in float64 (below 2^53) up to this many values."""


def rows(requests: pa.Table, buckets: Buckets) -> pa.Table:
    """Rollup rows of all levels for rows of `requests`, in the columns of ROLLUPS.

    Rows with a quality mark count only under metric `requests`, apart by that mark.
    Null values are in no histogram and no sum. Values <= 0 are in the bin NON_POSITIVE_BIN.
    time_per_output_token = decode / (completion tokens - 1), to the nearest nanosecond, for two tokens and more.
    No request gives no rows.
    """
    slices = [requests.slice(at, _EXACT_ROWS) for at in range(0, requests.num_rows, _EXACT_ROWS)]
    if not slices:
        return ROLLUPS.schema.empty_table()
    parts = [_rows(part, buckets) for part in slices]
    return parts[0] if len(parts) == 1 else merge(pa.concat_tables(parts))


def merge(rollups: pa.Table) -> pa.Table:
    """One row for each cell, counts and sums added; ordered by level, day, time, metric, labels and bin."""
    keys = [name for name in ROLLUPS.schema.names if name not in ("count", "value_sum")]
    summed = rollups.group_by(keys).aggregate([("count", "sum"), ("value_sum", "sum")])
    summed = summed.rename_columns([*keys, "count", "value_sum"]).select(ROLLUPS.schema.names).cast(ROLLUPS.schema)
    order = ("level", "day", "time", "metric", "shard", "model", "bucket", "priority", "quality", "bin")
    return summed.sort_by([(name, "ascending") for name in order])


def bins(nanoseconds: Integers) -> npt.NDArray[np.int16]:
    """The bin of each duration: ceil(32 * log2(seconds)), NON_POSITIVE_BIN for durations <= 0."""
    positive = nanoseconds > 0
    seconds = np.where(positive, nanoseconds, _BILLION) / _BILLION
    return np.where(positive, np.ceil(BINS_PER_OCTAVE * np.log2(seconds)), NON_POSITIVE_BIN).astype(np.int16)


@dataclass(frozen=True)
class _Cells:
    """Cells as columns: ``group`` indexes the label columns, ``high * 2^32 + low`` is the sum in billionths."""

    time: Integers
    day: Integers
    group: Integers
    metric: Integers
    quality: Integers
    bin: Integers
    count: Integers
    low: Integers
    high: Integers
    has_sum: npt.NDArray[np.bool_]


def _rows(requests: pa.Table, buckets: Buckets) -> pa.Table:
    labels = {
        "shard": requests["shard"].combine_chunks(),
        "model": requests["model"].combine_chunks(),
        "priority": requests["priority"].combine_chunks(),
        "bucket": buckets.of(requests["prompt_tokens"]),
    }
    group, groups = _combined([_codes(column) for column in labels.values()])
    quality, qualities = _codes(requests["quality"].combine_chunks())
    time = _int64(requests["start_time"]) // LEVELS["minute"]
    day = _int64(requests["day"])
    # One code a row for (minute, day, group): the place that every metric below is summed into.
    (place, places) = _compact_columns([time, day, group])
    counted = quality == 0

    pieces = [_counts(place, quality, np.ones(len(place), dtype=bool), "requests")]
    pieces.append(_counts(place, np.zeros_like(quality), counted & _failed(requests), "errors"))
    for metric in TOTALS:
        values, valid = _values(requests[metric])
        pieces.append(_sums(place, values, valid & counted, metric, scale=_BILLION))
    for metric, column in HISTOGRAMS.items():
        values, valid = _nanoseconds(requests[column])
        pieces.append(_histogram(place, values, valid & counted, metric))
    values, valid = _time_per_output_token(requests)
    pieces.append(_histogram(place, values, valid & counted, "time_per_output_token"))

    cells = _joined(pieces, places)
    tables = []
    finer = LEVELS["minute"]
    for level, length in LEVELS.items():
        cells = _coarser(cells, length // finer)
        finer = length
        tables.append(_table(cells, level, length, groups, labels, qualities))
    return pa.concat_tables(tables)


def _failed(requests: pa.Table) -> npt.NDArray[np.bool_]:
    failed = pc.or_(
        pc.fill_null(pc.equal(requests["status"], "error"), False),
        pc.is_in(requests["finish_reason"], value_set=pa.array(["error", "abort"])),
    )
    return np.asarray(failed.to_numpy(), dtype=bool)


def _time_per_output_token(requests: pa.Table) -> tuple[Integers, npt.NDArray[np.bool_]]:
    decode, has_decode = _nanoseconds(requests["decode_seconds"])
    tokens, has_tokens = _values(requests["completion_tokens"])
    valid = has_decode & has_tokens & (tokens > 1)
    gaps = np.where(valid, tokens - 1, 1)
    whole, rest = np.divmod(decode, gaps)
    return whole + (rest >= gaps - rest), valid


def _counts(place: Integers, quality: Integers, chosen: npt.NDArray[np.bool_], metric: str) -> _Cells:
    return _summed(place[chosen], quality[chosen], None, None, metric, 1)


def _sums(place: Integers, values: Integers, chosen: npt.NDArray[np.bool_], metric: str, scale: int) -> _Cells:
    return _summed(place[chosen], None, None, values[chosen], metric, scale)


def _histogram(place: Integers, values: Integers, chosen: npt.NDArray[np.bool_], metric: str) -> _Cells:
    picked = values[chosen]
    return _summed(place[chosen], None, bins(picked).astype(np.int64), picked, metric, 1)


def _summed(
    place: Integers, quality: Integers | None, bin_: Integers | None, values: Integers | None, metric: str, scale: int
) -> _Cells:
    """Cells of one metric; ``time`` holds the place until `_joined` resolves it."""
    n = len(place)
    columns = [place] + [c for c in (quality, bin_) if c is not None]
    code, keys = _compact_columns(columns)
    size = len(keys[0])
    zeros = np.zeros(size, dtype=np.int64)
    low, high = zeros, zeros
    if values is not None and n:
        low = np.bincount(code, weights=(values & 0xFFFFFFFF).astype(np.float64), minlength=size).astype(np.int64)
        high = np.bincount(code, weights=(values >> 32).astype(np.float64), minlength=size).astype(np.int64)
        if scale != 1:
            low, high = low * scale, high * scale
    rest = list(keys[1:])
    return _Cells(
        time=keys[0],
        day=zeros,
        group=zeros,
        metric=np.full(size, _METRICS.index(metric)),
        quality=rest.pop(0) if quality is not None else zeros,
        bin=rest.pop(0) if bin_ is not None else np.full(size, _NO_BIN),
        count=np.bincount(code, minlength=size),
        low=low,
        high=high,
        has_sum=np.full(size, values is not None),
    )


def _joined(pieces: list[_Cells], places: list[Integers]) -> _Cells:
    columns = {name: np.concatenate([getattr(piece, name) for piece in pieces]) for name in _Cells.__dataclass_fields__}
    place = columns["time"]
    columns["time"], columns["day"], columns["group"] = (key[place] for key in places)
    order = np.lexsort((columns["bin"], columns["quality"], columns["group"], columns["metric"], columns["time"]))
    return _Cells(**{name: column[order] for name, column in columns.items()})


def _coarser(cells: _Cells, factor: int) -> _Cells:
    """The cells with their times in units ``factor`` times as long, equal ones summed."""
    time = cells.time // factor
    if len(time) == 0 or bool(np.all(cells.time == cells.time[0])):
        return replace(cells, time=time)
    keys = (time, cells.day, cells.metric, cells.group, cells.quality, cells.bin)
    order = np.lexsort(keys[::-1])
    changed = np.zeros(len(order), dtype=bool)
    changed[0] = True
    for key in keys:
        ordered = key[order]
        changed[1:] |= ordered[1:] != ordered[:-1]
    first = np.flatnonzero(changed)
    at = order[first]
    return _Cells(
        time=time[at],
        day=cells.day[at],
        group=cells.group[at],
        metric=cells.metric[at],
        quality=cells.quality[at],
        bin=cells.bin[at],
        count=np.add.reduceat(cells.count[order], first),
        low=np.add.reduceat(cells.low[order], first),
        high=np.add.reduceat(cells.high[order], first),
        has_sum=cells.has_sum[at],
    )


def _table(
    cells: _Cells,
    level: str,
    length: int,
    groups: list[Integers],
    labels: dict[str, pa.Array],
    qualities: pa.Array,
) -> pa.Table:
    columns: dict[str, pa.Array] = {
        "day": pa.array(cells.day.astype(np.int32)).cast(DATE),
        "level": pa.repeat(pa.scalar(level), len(cells.time)),
        "time": pa.array(cells.time * length).cast(TIME),
        "metric": pa.array(_METRICS).take(pa.array(cells.metric)),
        "quality": qualities.take(pa.array(cells.quality)),
        "bin": pa.array(cells.bin.astype(np.int16), mask=cells.bin == _NO_BIN),
        "count": pa.array(cells.count),
        "value_sum": _decimals(cells.low, cells.high, ~cells.has_sum),
    }
    for (name, column), key in zip(labels.items(), groups, strict=True):
        values = pa.concat_arrays([pa.nulls(1, column.type), column.dictionary_encode().dictionary])
        columns[name] = values.take(pa.array(key[cells.group]))
    return pa.table([columns[name] for name in ROLLUPS.schema.names], schema=ROLLUPS.schema)


def _decimals(low: Integers, high: Integers, missing: npt.NDArray[np.bool_]) -> pa.Array:
    """``high * 2^32 + low`` billionths as decimal(38, 9)."""
    words = np.empty((len(low), 2), dtype=np.int64)
    carried = high + (low >> 32)
    words[:, 0] = (carried << 32) | (low & 0xFFFFFFFF)
    words[:, 1] = carried >> 32
    fits = pa.Array.from_buffers(SECONDS_SUM, len(low), [None, pa.py_buffer(words.tobytes())])
    return pc.if_else(pa.array(missing), pa.scalar(None, SECONDS_SUM), fits)


def _codes(column: pa.Array) -> tuple[Integers, pa.Array]:
    """0 for null, else 1 + the place in the dictionary; and the dictionary with null first."""
    encoded = column.dictionary_encode()
    codes = pc.fill_null(pc.add(encoded.indices, 1), 0).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, pa.concat_arrays([pa.nulls(1, column.type), encoded.dictionary])


def _combined(columns: list[tuple[Integers, pa.Array]]) -> tuple[Integers, list[Integers]]:
    return _compact_columns([codes for codes, _ in columns])


def _compact_columns(columns: list[Integers]) -> tuple[Integers, list[Integers]]:
    """Each row's place among the distinct combinations, and those combinations column by column, in order."""
    code = np.zeros(len(columns[0]), dtype=np.int64)
    spans: list[tuple[int, int]] = []
    total = 1
    for column in columns:
        low = int(column.min()) if len(column) else 0
        width = (int(column.max()) - low + 1) if len(column) else 1
        total *= width
        if total >= 1 << 62:
            return _compact_sorted(columns)
        code = code * width + (column - low)
        spans.append((low, width))
    if total <= 4 * len(code) + 65_536:
        seen = np.zeros(total, dtype=bool)
        seen[code] = True
        distinct = np.flatnonzero(seen)
        place = np.cumsum(seen) - 1
        inverse = place[code]
    else:
        distinct, inverse = np.unique(code, return_inverse=True)
    keys: list[Integers] = []
    for low, width in reversed(spans):
        distinct, remainder = np.divmod(distinct, width)
        keys.append(remainder + low)
    return inverse, keys[::-1]


def _compact_sorted(columns: list[Integers]) -> tuple[Integers, list[Integers]]:
    """The same for columns whose combined range does not fit 62 bits: each is first made dense."""
    pairs = [np.unique(column, return_inverse=True) for column in columns]
    inverse, keys = _compact_columns([place for _, place in pairs])
    return inverse, [values[key] for (values, _), key in zip(pairs, keys, strict=True)]


def _int64(column: pa.ChunkedArray) -> Integers:
    array = column.combine_chunks()
    width = pa.int32() if array.type == DATE else pa.int64()
    return np.asarray(array.view(width).to_numpy(zero_copy_only=False), dtype=np.int64)


def _values(column: pa.ChunkedArray) -> tuple[Integers, npt.NDArray[np.bool_]]:
    array = column.combine_chunks()
    valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
    return pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.int64), valid


def _nanoseconds(column: pa.ChunkedArray) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """decimal(18, 9) seconds as integer nanoseconds (the low word of each value), 0 for null."""
    array = column.combine_chunks()
    valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
    data = array.buffers()[1]
    if data is None:
        return np.zeros(len(array), dtype=np.int64), valid
    words = np.frombuffer(data, dtype=np.int64, count=2 * (array.offset + len(array)))[2 * array.offset :: 2]
    return np.where(valid, words, 0), valid
