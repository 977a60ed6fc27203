"""Columns of decoded spans -> Arrow tables in the columns of ``schema``; shared by both decoders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vllm_slo.exporters.otlp.lot import STOCK_REQUESTS
from vllm_slo.exporters.otlp.quality import Mask, Measure, Nanoseconds, TimeFlags, request_quality, span_quality
from vllm_slo.exporters.otlp.refusals import NO_SPAN
from vllm_slo.exporters.otlp.resources import Resource
from vllm_slo.exporters.schema import BYTES, DATE, SECONDS, SPANS, TEXT, TIME

SPANS_SCHEMA = SPANS.schema

SECOND = 1_000_000_000
DAY = 86_400 * SECOND
YEAR_2015 = 1_420_070_400 * SECOND
LATEST = 2**63 - 1
"""The last time kept, in 2262: later ones are moved there and marked `clock_skew`."""
SKEW = 300 * SECOND
LONGEST = 10**18
"""Nanoseconds that no longer fit decimal(18, 9): 31.7 years."""


@dataclass(frozen=True)
class Common:
    """What rows of both tables have. Times are epoch nanoseconds; ``resource`` counts into ``resources``.

    Parent ids are null for roots.
    """

    start: npt.NDArray[np.uint64]
    end: npt.NDArray[np.uint64]
    trace_id: pa.Array
    span_id: pa.Array
    parent_span_id: pa.Array
    resource: npt.NDArray[np.int64]
    resources: Sequence[Resource]
    received_ns: int


@dataclass
class Gathered:
    """What rows share, gathered span by span."""

    start: list[int] = field(default_factory=list)
    end: list[int] = field(default_factory=list)
    trace_id: list[bytes] = field(default_factory=list)
    span_id: list[bytes] = field(default_factory=list)
    parent_span_id: list[bytes | None] = field(default_factory=list)
    resource: list[int] = field(default_factory=list)

    def add(self, span: Any, resource: int) -> None:
        """One more row."""
        self.start.append(span.start_time_unix_nano)
        self.end.append(span.end_time_unix_nano)
        self.trace_id.append(span.trace_id)
        self.span_id.append(span.span_id)
        parent = span.parent_span_id
        self.parent_span_id.append(parent if parent and parent != NO_SPAN else None)
        self.resource.append(resource)

    def common(self, resources: Sequence[Resource], received_ns: int) -> Common:
        """All rows so far."""
        return Common(
            start=np.array(self.start, dtype=np.uint64),
            end=np.array(self.end, dtype=np.uint64),
            trace_id=ids_array(self.trace_id),
            span_id=ids_array(self.span_id),
            parent_span_id=ids_array(self.parent_span_id),
            resource=np.array(self.resource, dtype=np.int64),
            resources=resources,
            received_ns=received_ns,
        )


def measure(seconds: npt.NDArray[np.float64]) -> Measure:
    """Seconds as integer nanoseconds, half to even.

    NaN, the infinities and anything of 1e9 seconds or more are not known.
    The fraction is multiplied in two parts, so that the product before rounding is off by less than 2^-48 ns;
    what lies that close to a half counts as a half.
    """
    known = np.abs(seconds) < LONGEST // SECOND
    value = np.where(known, np.abs(seconds), 0.0)
    whole = np.floor(value)
    fraction = value - whole
    high = np.floor(fraction * 2**26) / 2**26
    large, small = high * SECOND, (fraction - high) * SECOND
    base = np.floor(large)
    rest = (large - base) + small
    below = np.floor(rest)
    floor = whole.astype(np.int64) * SECOND + base.astype(np.int64) + below.astype(np.int64)
    over = rest - below
    nanoseconds = floor + ((over > 0.5) | ((over == 0.5) & (floor % 2 == 1)))
    return Measure(np.where(seconds < 0, -nanoseconds, nanoseconds), known)


def seconds_array(values: Measure) -> pa.Array:
    """Nanoseconds as decimal(18, 9) seconds, null where unknown."""
    rows = len(values.nanoseconds)
    words = np.empty((rows, 2), dtype="<i8")
    words[:, 0] = values.nanoseconds
    words[:, 1] = values.nanoseconds >> 63
    validity = None if values.known.all() else pa.array(values.known).buffers()[1]
    return pa.Array.from_buffers(SECONDS, rows, [validity, pa.py_buffer(words)])


def time_array(nanoseconds: Nanoseconds, known: Mask | None = None) -> pa.Array:
    """Epoch nanoseconds as times, null where unknown."""
    return pa.array(nanoseconds // 1000, mask=None if known is None else ~known).view(TIME)


def _clamped(nanoseconds: npt.NDArray[np.uint64]) -> tuple[Nanoseconds, Mask]:
    late = nanoseconds > LATEST
    return np.minimum(nanoseconds, np.uint64(LATEST)).astype(np.int64), late


def shared_columns(common: Common) -> tuple[dict[str, pa.Array], TimeFlags]:
    """What ids, times and resource of the spans give, and what is wrong with the times."""
    received = common.received_ns
    start, start_late = _clamped(common.start)
    end, end_late = _clamped(common.end)
    plausible = (start >= YEAR_2015) & (start <= received + DAY)
    flags = TimeFlags(
        end_before_start=common.end < common.start,
        clock_skew=(start < YEAR_2015) | (start > received + SKEW) | start_late | end_late,
    )
    index = pa.array(common.resource)
    named = {
        "service_name": [r.service_name for r in common.resources],
        "service_instance_id": [r.service_instance_id for r in common.resources],
        "shard": [r.shard for r in common.resources],
        "model": [r.model for r in common.resources],
        "resource_attributes": [r.attributes for r in common.resources],
    }
    columns = {name: pa.array(values, TEXT).take(index) for name, values in named.items()}
    columns |= {
        "day": pa.array((np.where(plausible, start, received) // DAY).astype(np.int32)).view(DATE),
        "start_time": time_array(start),
        "end_time": time_array(end),
        "trace_id": common.trace_id,
        "span_id": common.span_id,
        "parent_span_id": common.parent_span_id,
        "received_time": time_array(np.full(len(start), received, dtype=np.int64)),
    }
    return columns, flags


def requests_table(common: Common, measures: dict[str, Measure], columns: dict[str, pa.Array]) -> pa.Table:
    """Stock rows of ``requests``: ``measures`` are the duration columns, ``columns`` the others that the spans gave.

    Columns that nobody gave are null.
    """
    shared, flags = shared_columns(common)
    rows = len(common.start)
    known = {name: np.asarray(values.is_valid()) for name, values in columns.items() if name.endswith("_tokens")}
    shared |= columns
    shared |= {name: seconds_array(values) for name, values in measures.items()}
    shared["source"] = pa.repeat(pa.scalar("stock", TEXT), rows)
    shared["records"] = shared["source"]
    shared["quality"] = request_quality(flags, measures, known)
    return table_of(STOCK_REQUESTS, shared, rows)


def spans_table(common: Common, startup: Mask, columns: dict[str, pa.Array]) -> pa.Table:
    """Rows of ``spans``: ``startup`` marks those of vLLM's start, ``columns`` are what the spans gave."""
    shared, flags = shared_columns(common)
    del shared["model"]
    forward = common.end >= common.start
    span = np.where(forward, common.end - common.start, common.start - common.end)
    known = span < np.uint64(LONGEST)
    size = np.where(known, span, np.uint64(0)).astype(np.int64)
    shared |= columns
    shared["duration_seconds"] = seconds_array(Measure(np.where(forward, size, -size), known))
    shared["quality"] = span_quality(flags, startup)
    return table_of(SPANS_SCHEMA, shared, len(common.start))


def table_of(schema: pa.Schema, columns: dict[str, pa.Array], rows: int) -> pa.Table:
    """The columns in the order of the schema, null where there is none."""
    arrays = [columns[field.name] if field.name in columns else pa.nulls(rows, field.type) for field in schema]
    return pa.Table.from_arrays(arrays, schema=schema)


def ids_array(values: Sequence[bytes | None]) -> pa.Array:
    """Ids, null where there is none."""
    return pa.array(values, BYTES)
