"""Requests -> rollups: exact counts, exact sums and log2 histograms that add up.

A rollup row is one cell: level, start of its time, shard, model, priority, source, bucket, metric, a bin for the
histograms.
Rows of the same cell, written by different commits, are summed (`merge`); a reader that sums them itself gets the same.
Ratios are never stored: sum both halves, then divide.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.cells import (
    NO_BIN,
    Cells,
    Integers,
    coarser,
    decimals,
    distinct,
    halves,
    joined,
    sums,
)
from vllm_slo.exporters.schema import BINS_PER_OCTAVE, DATE, NON_POSITIVE_BIN, ROLLUP_METRICS, ROLLUPS, TIME, UNFINISHED

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
PARTS: dict[str, str] = {
    metric: f"{metric.removeprefix('part_')}_seconds" for metric in ROLLUP_METRICS if metric.startswith("part_")
}
"""Metric -> column of `requests` that only the probe fills; its sums alone are kept."""
TOTALS: tuple[str, ...] = ("prompt_tokens", "completion_tokens")
LABELS: tuple[str, ...] = ("shard", "model", "priority", "source", "bucket")

_METRICS = tuple(ROLLUP_METRICS)
_BILLION = 1_000_000_000
_SLICE_ROWS = 1 << 20
"""Most rows that `cells.sums` adds exactly at once."""


def rows(requests: pa.Table, buckets: Buckets) -> pa.Table:
    """Rollup rows of all levels for rows of `requests`, in the columns of ROLLUPS.

    Rows with a quality mark count only under metric `requests`, apart by that mark, and unfinished ones as errors.
    Null values are in no histogram and no sum. Values <= 0 are in the bin NON_POSITIVE_BIN.
    time_per_output_token = decode / (completion tokens - 1), to the nearest nanosecond, for two tokens and more.
    No request gives no rows.
    """
    slices = [requests.slice(at, _SLICE_ROWS) for at in range(0, requests.num_rows, _SLICE_ROWS)]
    parts = [_rows(part, buckets) for part in slices]
    if not parts:
        return ROLLUPS.schema.empty_table()
    return parts[0] if len(parts) == 1 else merge(pa.concat_tables(parts))


def merge(rollups: pa.Table) -> pa.Table:
    """One row for each cell, counts and sums added; in order of level, time, metric and labels."""
    rollups = rollups.combine_chunks()
    encoded = [_codes(_column(rollups, name)) for name in LABELS]
    label, labels = distinct([codes for codes, _ in encoded])
    quality, qualities = _codes(_column(rollups, "quality"))
    metric, metrics = _codes(_column(rollups, "metric"))
    low, high, has_sum = halves(_column(rollups, "value_sum"))
    bin_ = pc.fill_null(_column(rollups, "bin"), NO_BIN).to_numpy(zero_copy_only=False).astype(np.int64)
    cells = Cells(
        time=_int64(rollups["time"]),
        day=_int64(rollups["day"]),
        metric=metric,
        label=label,
        quality=quality,
        bin=bin_,
        count=_int64(rollups["count"]),
        low=low,
        high=high,
        has_sum=has_sum,
    )
    columns = _label_columns(encoded, labels)
    level, levels = _codes(_column(rollups, "level"))
    tables = []
    for code in sorted(range(1, len(levels)), key=lambda code: LEVELS[levels[code].as_py()]):
        chosen = cells if len(levels) == 2 else cells.at(np.flatnonzero(level == code))
        tables.append(_table(coarser(chosen, 1), levels[code].as_py(), 1, columns, qualities, metrics))
    return pa.concat_tables(tables) if tables else ROLLUPS.schema.empty_table()


def bins(nanoseconds: Integers) -> Integers:
    """The bin of each duration: ceil(32 * log2(seconds)), NON_POSITIVE_BIN for durations <= 0."""
    positive = nanoseconds > 0
    seconds = np.where(positive, nanoseconds, _BILLION) / _BILLION
    return np.where(positive, np.ceil(BINS_PER_OCTAVE * np.log2(seconds)), NON_POSITIVE_BIN).astype(np.int64)


def _rows(requests: pa.Table, buckets: Buckets) -> pa.Table:
    bucket = buckets.of(requests["prompt_tokens"])
    encoded = [_codes(bucket if name == "bucket" else _column(requests, name)) for name in LABELS]
    label, labels = distinct([codes for codes, _ in encoded])
    quality, qualities = _codes(_column(requests, "quality"))
    minute = _int64(requests["start_time"]) // LEVELS["minute"]
    place, places = distinct([minute, _int64(requests["day"]), label])
    counted = quality == 0

    pieces = [_summed("requests", places, place, quality=quality)]
    unfinished = pc.fill_null(pc.index_in(pa.array(["unfinished"]), value_set=qualities), -1)[0].as_py()
    failed = (counted | (quality == unfinished)) & _failed(requests)
    pieces.append(_summed("errors", places, place[failed]))
    for metric in TOTALS:
        values, valid = _values(_column(requests, metric))
        valid &= counted
        pieces.append(_summed(metric, places, place[valid], values=values[valid], scale=_BILLION))
    for metric, (values, valid) in _durations(requests):
        valid &= counted
        pieces.append(_summed(metric, places, place[valid], bin_=bins(values[valid]), values=values[valid]))

    for metric, column in PARTS.items():
        if column not in requests.column_names or requests[column].null_count == requests.num_rows:
            continue
        values, valid = _nanoseconds(_column(requests, column))
        valid &= counted
        pieces.append(_summed(metric, places, place[valid], values=values[valid]))

    columns = _label_columns(encoded, labels)
    metrics = pa.array(_METRICS)
    cells, finer, tables = joined(pieces), LEVELS["minute"], []
    for level, length in LEVELS.items():
        cells = coarser(cells, length // finer)
        finer = length
        tables.append(_table(cells, level, length, columns, qualities, metrics))
    return pa.concat_tables(tables)


def _durations(requests: pa.Table) -> Iterable[tuple[str, tuple[Integers, npt.NDArray[np.bool_]]]]:
    for metric, column in HISTOGRAMS.items():
        yield metric, _nanoseconds(_column(requests, column))
    decode, has_decode = _nanoseconds(_column(requests, "decode_seconds"))
    tokens, has_tokens = _values(_column(requests, "completion_tokens"))
    valid = has_decode & has_tokens & (tokens > 1)
    gaps = np.where(valid, tokens - 1, 1)
    whole, rest = np.divmod(decode, gaps)
    yield "time_per_output_token", (whole + (rest >= gaps - rest), valid)


def _failed(requests: pa.Table) -> npt.NDArray[np.bool_]:
    failed = pc.or_(
        pc.fill_null(pc.equal(requests["status"], "error"), False),
        pc.is_in(requests["finish_reason"], value_set=pa.array(UNFINISHED)),
    )
    return np.asarray(failed.to_numpy(), dtype=bool)


def _summed(
    metric: str,
    places: list[Integers],
    place: Integers,
    *,
    quality: Integers | None = None,
    bin_: Integers | None = None,
    values: Integers | None = None,
    scale: int = 1,
) -> Cells:
    """The cells of one metric over rows at ``place``; ``places`` gives each place's minute, day and label."""
    code, keys = distinct([place, *(c for c in (quality, bin_) if c is not None)])
    at, size = keys[0], len(keys[0])
    zeros = np.zeros(size, dtype=np.int64)
    low, high = sums(code, values, size, scale) if values is not None else (zeros, zeros)
    time, day, label = (key[at] for key in places)
    return Cells(
        time=time,
        day=day,
        metric=np.full(size, _METRICS.index(metric), dtype=np.int64),
        label=label,
        quality=keys[1] if quality is not None else zeros,
        bin=keys[-1] if bin_ is not None else np.full(size, NO_BIN, dtype=np.int64),
        count=np.bincount(code, minlength=size),
        low=low,
        high=high,
        has_sum=np.full(size, values is not None),
    )


def _table(
    cells: Cells, level: str, length: int, labels: dict[str, pa.Array], qualities: pa.Array, metrics: pa.Array
) -> pa.Table:
    columns: dict[str, pa.Array] = {
        "day": pa.array(cells.day.astype(np.int32)).cast(DATE),
        "level": pa.repeat(pa.scalar(level), len(cells.time)),
        "time": pa.array(cells.time * length).cast(TIME),
        "metric": metrics.take(pa.array(cells.metric)),
        "quality": qualities.take(pa.array(cells.quality)),
        "bin": pa.array(cells.bin.astype(np.int16), mask=cells.bin == NO_BIN),
        "count": pa.array(cells.count),
        "value_sum": decimals(cells.low, cells.high, cells.has_sum),
    }
    label = pa.array(cells.label)
    columns |= {name: values.take(label) for name, values in labels.items()}
    return pa.table([columns[name] for name in ROLLUPS.schema.names], schema=ROLLUPS.schema)


def _label_columns(encoded: list[tuple[Integers, pa.Array]], labels: list[Integers]) -> dict[str, pa.Array]:
    """For each label column, its value in every combination."""
    return {
        name: dictionary.take(pa.array(codes))
        for name, (_, dictionary), codes in zip(LABELS, encoded, labels, strict=True)
    }


def _codes(column: pa.Array) -> tuple[Integers, pa.Array]:
    """0 for null, else 1 + the rank among the values; and the values in order with null first."""
    encoded = column if pa.types.is_dictionary(column.type) else column.dictionary_encode()
    values = encoded.dictionary.unique()
    values = values.take(pc.sort_indices(values))
    rank = pc.index_in(encoded.dictionary, value_set=values).to_numpy(zero_copy_only=False).astype(np.int64) + 1
    indices = pc.fill_null(encoded.indices, len(rank)).to_numpy(zero_copy_only=False)
    return np.append(rank, 0)[indices], pa.concat_arrays([pa.nulls(1, values.type), values])


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], type=column.type)
    return column


def _int64(column: pa.ChunkedArray) -> Integers:
    array = column.combine_chunks()
    width = pa.int32() if array.type == DATE else pa.int64()
    return np.asarray(array.view(width).to_numpy(zero_copy_only=False), dtype=np.int64)


def _values(array: pa.Array) -> tuple[Integers, npt.NDArray[np.bool_]]:
    valid = np.array(array.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
    return pc.fill_null(array, 0).to_numpy(zero_copy_only=False).astype(np.int64), valid


def _nanoseconds(array: pa.Array) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """decimal(18, 9) seconds as integer nanoseconds (the low word of each value), 0 for null."""
    valid = np.array(array.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
    data = array.buffers()[1]
    if data is None:
        return np.zeros(len(array), dtype=np.int64), valid
    words = np.frombuffer(data, dtype=np.int64, count=2 * (array.offset + len(array)))[2 * array.offset :: 2]
    return np.where(valid, words, 0), valid
