"""Which requests of the probe count in statistics: the gates of ``schema.QUALITY_REASONS`` for merged rows.

As for stock rows, with what the probe knows more: a request that did not end well has no full life and is `unfinished`,
not broken, and the parts of a phase must sum to it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.exporters.conventions import REQUIRED_COLUMNS
from vllm_slo.exporters.records import DECODE_PARTS, PREFILL_PARTS, QUEUE_PARTS
from vllm_slo.exporters.schema import QUALITY_REASONS, TEXT, UNFINISHED

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

REASONS = tuple(QUALITY_REASONS)
OF_TIMES = ("end_before_start", "clock_skew")
"""Marks that a record brings from its decoding; everything else is judged when the records are together."""
TOLERANCE = 1_000_000_000
"""Nanoseconds by which a phase may exceed the duration, and the front end's part be negative: as for stock rows."""
PHASES = ("queue_seconds", "prefill_seconds", "decode_seconds", "time_to_first_token_seconds")


def undecided(rows: pa.Table) -> Mask:
    """Rows without a mark, or with one that the decoding gave."""
    quality = rows["quality"]
    found = pc.or_(pc.is_null(quality), pc.is_in(quality, value_set=pa.array(OF_TIMES, TEXT)))
    return np.asarray(found.to_numpy(), dtype=bool)


def judged(rows: pa.Table) -> pa.Table:
    """Merged rows with their mark: the first reason that applies, null for rows that count."""
    unfinished = _among(rows["finish_reason"], UNFINISHED)
    missing = np.logical_or.reduce([_absent(rows[name]) for name in REQUIRED_COLUMNS])
    phases = {name: _nanoseconds(rows[name]) for name in (*PHASES, "request_duration_seconds")}
    duration, has_duration = phases["request_duration_seconds"]
    too_long = np.zeros(rows.num_rows, dtype=bool)
    for name in PHASES:
        values, known = phases[name]
        too_long |= known & has_duration & (values - duration > TOLERANCE)
    negative = np.logical_or.reduce([values < 0 for values, _ in phases.values()])
    first, queue, prefill = (
        phases[name] for name in ("time_to_first_token_seconds", "queue_seconds", "prefill_seconds")
    )
    front_end = first[0] - queue[0] - prefill[0]
    negative |= first[1] & queue[1] & prefill[1] & (front_end < -TOLERANCE)
    applies = {
        "missing_milestone": missing & ~unfinished,
        "uptime_sized_time": too_long,
        "negative_time": negative,
        "unequal_parts": _unequal(rows),
        **{reason: _among(rows["quality"], (reason,)) for reason in OF_TIMES},
        "unfinished": unfinished,
    }
    place = np.full(rows.num_rows, -1, dtype=np.int64)
    for reason in sorted(applies, key=REASONS.index, reverse=True):
        place[applies[reason]] = REASONS.index(reason)
    quality = pa.array(REASONS, TEXT).take(pa.array(place, mask=place < 0))
    at = rows.schema.get_field_index("quality")
    return rows.set_column(at, rows.schema.field(at), quality)


def outranks(reason: str, mark: str | None) -> bool:
    """Whether a row with this mark gets the reason instead: reasons are tried in the order of QUALITY_REASONS."""
    return mark is None or mark not in QUALITY_REASONS or REASONS.index(reason) < REASONS.index(mark)


def marked(rows: pa.Table, chosen: Mask, reason: str) -> pa.Table:
    """The rows with the chosen ones marked, except where a mark is there that is tried earlier."""
    if not chosen.any():
        return rows
    earlier = REASONS[: REASONS.index(reason) + 1]
    open_ = chosen & ~_among(rows["quality"], earlier)
    at = rows.schema.get_field_index("quality")
    quality = pc.if_else(pa.array(open_), pa.scalar(reason, TEXT), rows["quality"])
    return rows.set_column(at, rows.schema.field(at), quality)


def _unequal(rows: pa.Table) -> Mask:
    """Where a phase and all of its parts are known and the sum of the parts is another."""
    unequal = np.zeros(rows.num_rows, dtype=bool)
    later = {stem: f"{stem}_before_first_token" for stem in ("preempted", "recompute")}
    for phase, parts, less in (
        ("queue", QUEUE_PARTS, ()),
        ("prefill", PREFILL_PARTS, ()),
        ("decode", (*DECODE_PARTS, *later), tuple(later.values())),
    ):
        rest, known = _nanoseconds(rows[f"{phase}_seconds"])
        for stem, sign in (*((stem, -1) for stem in parts), *((stem, 1) for stem in less)):
            values, there = _nanoseconds(rows[f"{stem}_seconds"])
            rest = rest + sign * values
            known = known & there
        unequal |= known & (rest != 0)
    return unequal


def _among(column: pa.ChunkedArray, texts: tuple[str, ...]) -> Mask:
    return np.asarray(pc.is_in(column, value_set=pa.array(texts, TEXT)).to_numpy(), dtype=bool)


def _absent(column: pa.ChunkedArray) -> Mask:
    return np.asarray(column.is_null().to_numpy(), dtype=bool)


def _nanoseconds(column: pa.ChunkedArray) -> tuple[Integers, Mask]:
    """decimal(18, 9) seconds as nanoseconds, 0 for null, and where they are known."""
    array = column.combine_chunks()
    array = pa.concat_arrays(array.chunks) if isinstance(array, pa.ChunkedArray) else array
    known = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
    data = array.buffers()[1]
    if data is None:
        return np.zeros(len(array), dtype=np.int64), known
    words = np.frombuffer(data, dtype=np.int64)[2 * array.offset : 2 * (array.offset + len(array)) : 2]
    return np.where(known, words, 0), known
