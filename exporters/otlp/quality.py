"""Which rows cannot be trusted, and why: the gates of ``schema.QUALITY_REASONS``, over whole columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_slo.exporters.conventions import REQUIRED_COLUMNS
from vllm_slo.exporters.schema import QUALITY_REASONS, TEXT

Nanoseconds = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

REASONS = tuple(QUALITY_REASONS)
TOLERANCE = 1_000_000_000
"""Nanoseconds by which a phase may exceed the duration, and by which the front end's part of the time to first token
(ttft - queue - prefill) may be negative.

vLLM measures ttft and duration on the wall clock of the API server, queue, prefill and decode on the monotonic clock of
the engine core, so a step of the wall clock moves one against the other. In 14,957 spans of a real vLLM 0.32 under load
the front end's part was never below +1.4 ms, and no phase exceeded the duration by a second; a milestone that was never
reached is off by the uptime of the host.
"""

PHASES = ("queue_seconds", "prefill_seconds", "decode_seconds", "time_to_first_token_seconds")
SIGNED = (*PHASES, "request_duration_seconds")


@dataclass(frozen=True)
class Measure:
    """A column of durations: nanoseconds, and where they are known (0 where they are not)."""

    nanoseconds: Nanoseconds
    known: Mask


@dataclass(frozen=True)
class TimeFlags:
    """What is wrong with start and end of each row."""

    end_before_start: Mask
    clock_skew: Mask


def request_quality(times: TimeFlags, measures: Mapping[str, Measure], known: Mapping[str, Mask]) -> pa.Array:
    """The first reason that applies to each row of ``requests``, null where none does.

    ``measures`` are the duration columns by name, ``known`` says where the other required columns have a value.
    """
    missing = ~np.logical_and.reduce([known[c] if c in known else measures[c].known for c in REQUIRED_COLUMNS])
    duration = measures["request_duration_seconds"]
    too_long = np.zeros_like(missing)
    for name in PHASES:
        phase = measures[name]
        too_long |= phase.known & duration.known & (phase.nanoseconds - duration.nanoseconds > TOLERANCE)
    negative = np.logical_or.reduce([measures[name].nanoseconds < 0 for name in SIGNED])
    first, queue, prefill = (measures[n] for n in ("time_to_first_token_seconds", "queue_seconds", "prefill_seconds"))
    front_end = first.nanoseconds - queue.nanoseconds - prefill.nanoseconds
    negative |= first.known & queue.known & prefill.known & (front_end < -TOLERANCE)
    return _first_reason(
        {
            "missing_milestone": missing,
            "uptime_sized_time": too_long,
            "negative_time": negative,
            "end_before_start": times.end_before_start,
            "clock_skew": times.clock_skew,
        }
    )


def span_quality(times: TimeFlags, startup: Mask) -> pa.Array:
    """The first mark that applies to each row of ``spans``, null where none does."""
    return _first_reason(
        {"end_before_start": times.end_before_start, "clock_skew": times.clock_skew, "startup": startup}
    )


def time_quality(times: TimeFlags) -> pa.Array:
    """What is wrong with the times of a probe's record; the lake judges the rest when its records are together."""
    return _first_reason({"end_before_start": times.end_before_start, "clock_skew": times.clock_skew})


def _first_reason(applies: Mapping[str, Mask]) -> pa.Array:
    rows = len(next(iter(applies.values())))
    if not any(mask.any() for mask in applies.values()):
        return pa.nulls(rows, TEXT)
    index = np.full(rows, -1, dtype=np.int8)
    for reason in reversed(REASONS):
        if reason in applies:
            index[applies[reason]] = REASONS.index(reason)
    return pa.array(REASONS, TEXT).take(pa.array(index, mask=index < 0))
