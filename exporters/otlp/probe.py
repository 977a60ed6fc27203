"""Spans of the probe -> rows of ``requests``, ``engine_samples`` and ``events``, by the tables of ``records`` and
``schema`` alone: a new column needs nothing here.

An attribute of the wrong type costs itself alone: its column is null; a request keeps it in ``attributes``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.exporters import records
from vllm_slo.exporters.conventions import INTEGER_ATTRIBUTES, REAL_ATTRIBUTES, SPAN_STATUSES, TEXT_ATTRIBUTES
from vllm_slo.exporters.otlp import numbers
from vllm_slo.exporters.otlp.lot import Tables
from vllm_slo.exporters.otlp.quality import Measure, time_quality
from vllm_slo.exporters.otlp.resources import Resource
from vllm_slo.exporters.otlp.rows import LATEST, LONGEST, Gathered, seconds_array, shared_columns, table_of, time_array
from vllm_slo.exporters.otlp.values import json_text, plain_value
from vllm_slo.exporters.schema import (
    ENGINE_SAMPLES,
    EVENT_KINDS,
    EVENTS,
    FLAG,
    INTEGER,
    REAL,
    REQUESTS,
    SECONDS,
    TEXT,
    TIME,
    Table,
)

SOURCE = "probe"

Reader = Callable[[Any], Any]
Values = list[Any]

_FROM_THE_SPAN = frozenset(
    {
        "day",
        "time",
        "start_time",
        "end_time",
        "trace_id",
        "span_id",
        "parent_span_id",
        "source",
        "service_name",
        "service_instance_id",
        "shard",
        "model",
        "status",
        "attributes",
        "resource_attributes",
        "received_time",
        "quality",
        "records",
    }
)
"""Columns that no attribute fills; the end of an event is one."""
_HTTP_SIDE = ("http_route", "http_status", "http_duration_seconds", "time_to_first_byte_seconds", "client_disconnected")

ZERO_PARTS: dict[str, tuple[str, ...]] = {
    "queued_time": ("queue_behind", *records.QUEUE_PARTS),
    "scheduled_time": ("queue", "preempted", "recompute", *records.PREFILL_PARTS),
    "first_token_time": ("prefill", "decode", *records.DECODE_PARTS),
}
"""Milestone -> stems of the durations that are 0 where it was reached and they are absent (see ``records``)."""


def _nanoseconds(value: Any) -> int | None:
    number = numbers.integer(value)
    return number if number is not None and -LONGEST < number < LONGEST else None


def _moment(value: Any) -> int | None:
    number = numbers.integer(value)
    return number if number is not None and 0 <= number <= LATEST else None


def _flag(value: Any) -> bool | None:
    return bool(value.bool_value) if value.WhichOneof("value") == "bool_value" else None


def _text(value: Any) -> str | None:
    return value.string_value or numbers.text(value)


_READERS: dict[pa.DataType, Reader] = {
    SECONDS: _nanoseconds,
    TIME: _moment,
    INTEGER: numbers.integer,
    REAL: numbers.real,
    FLAG: _flag,
    TEXT: _text,
}


def attribute_key(column: str, kind: pa.DataType) -> str:
    """The probe's attribute of a column of this type."""
    if kind == SECONDS:
        return records.duration_key(column.removesuffix("_seconds"))
    return records.time_key(column) if kind == TIME else records.key(column)


class Columns:
    """Which attribute fills which column of a table."""

    def __init__(self, table: Table, standard: dict[str, str] | None = None) -> None:
        """``standard``: keys of vLLM's own spans for some of the columns."""
        span_gives = _FROM_THE_SPAN - {"end_time"} if table is EVENTS else _FROM_THE_SPAN
        self.given = [c for c in table.columns if c.name not in span_gives]
        self.place = {column.name: at for at, column in enumerate(self.given)}
        readers = [_READERS[column.type] for column in self.given]
        keys = {attribute_key(column.name, column.type): at for at, column in enumerate(self.given)}
        keys |= {key: self.place[name] for key, name in (standard or {}).items()}
        self._slots = {key: (at, readers[at]) for key, at in keys.items()}
        self.keys = tuple(keys)
        self._empty: Values = [None] * len(self.given)

    def read(self, span: Any) -> tuple[Values, list[Any]]:
        """Values by column, null where absent or of another type, and the attributes that no column holds."""
        values = self._empty.copy()
        left: list[Any] = []
        slots = self._slots
        for attribute in span.attributes:
            slot = slots.get(attribute.key)
            value = slot[1](attribute.value) if slot else None
            if value is None:
                left.append(attribute)
            else:
                values[slot[0]] = value  # type: ignore[index]
        return values, left

    def forget(self, key: str, values: Values) -> None:
        """Null where an attribute with this key could not be read."""
        slot = self._slots.get(key)
        if slot:
            values[slot[0]] = None

    def arrays(self, rows: Sequence[Values]) -> dict[str, pa.Array]:
        """The columns."""
        found: dict[str, pa.Array] = {}
        for column, values in zip(self.given, zip(*rows, strict=True), strict=True):
            if column.type not in (SECONDS, TIME):
                found[column.name] = pa.array(values, column.type)
                continue
            array = pa.array(values, INTEGER)
            valid = np.asarray(array.is_valid().to_numpy(zero_copy_only=False), dtype=bool)
            whole = np.asarray(pc.fill_null(array, 0).to_numpy(zero_copy_only=False))
            if column.type == TIME:
                found[column.name] = time_array(whole, valid)
            else:
                found[column.name] = seconds_array(Measure(whole, valid))
        return found


_REQUEST = Columns(REQUESTS, {**INTEGER_ATTRIBUTES, **REAL_ATTRIBUTES, **TEXT_ATTRIBUTES})
_SAMPLE = Columns(ENGINE_SAMPLES)
_EVENT = Columns(EVENTS)
KEYS = tuple(sorted({key for columns in (_REQUEST, _SAMPLE, _EVENT) for key in columns.keys}))
"""Every attribute that the probe writes."""
_HTTP_PLACES = tuple(_REQUEST.place[name] for name in _HTTP_SIDE)
_INTERVAL = _SAMPLE.place["interval_seconds"]
_EVENT_ID, _KIND, _TITLE = (_EVENT.place[name] for name in ("event_id", "kind", "title"))
_ZERO = tuple(
    (_REQUEST.place[milestone], tuple(_REQUEST.place[f"{stem}_seconds"] for stem in stems))
    for milestone, stems in ZERO_PARTS.items()
)


@dataclass
class _Record(Gathered):
    """Rows of one table, span by span."""

    values: list[Values] = field(default_factory=list)

    def add_record(self, span: Any, resource: int, values: Values) -> None:
        self.add(span, resource)
        self.values.append(values)


@dataclass
class ProbeRows:
    """Rows of the probe's spans in one body; ``resources`` are those of the body."""

    resources: list[Resource]
    _requests: _Record = field(default_factory=_Record)
    _words: list[str] = field(default_factory=list)
    _statuses: list[str] = field(default_factory=list)
    _left: list[str | None] = field(default_factory=list)
    _samples: _Record = field(default_factory=_Record)
    _events: _Record = field(default_factory=_Record)

    def add(self, span: Any, resource: int, clean: Callable[[Any], None]) -> bool:
        """Whether the span became a row; others are ordinary spans.

        ``clean`` takes prompt text out of a span and is called for those that have more than the probe writes.
        """
        word = records.REQUEST_RECORDS.get(span.name)
        if word is not None:
            self._add_request(span, resource, word, clean)
            return True
        if span.name == records.ENGINE_SAMPLE:
            values, left = _SAMPLE.read(span)
            if left or span.events or span.links:
                clean(span)
            if values[_INTERVAL] is None:
                values[_INTERVAL] = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
            self._samples.add_record(span, resource, values)
            return True
        if span.name == records.EVENT:
            return self._add_event(span, resource, clean)
        return False

    def _add_request(self, span: Any, resource: int, word: str, clean: Callable[[Any], None]) -> None:
        values, left = _REQUEST.read(span)
        if left or span.events or span.links:
            clean(span)
            values, left = _REQUEST.read(span)
        if word == "frontend" and any(values[place] is not None for place in _HTTP_PLACES):
            word = "frontend+edge"
        if word == "engine":
            for milestone, parts in _ZERO:
                if values[milestone] is not None:
                    for place in parts:
                        if values[place] is None:
                            values[place] = 0
            for attribute in left:
                _REQUEST.forget(attribute.key, values)
        self._requests.add_record(span, resource, values)
        self._words.append(word)
        self._statuses.append(
            SPAN_STATUSES[span.status.code] if 0 <= span.status.code < len(SPAN_STATUSES) else "unset"
        )
        self._left.append(json_text({a.key: plain_value(a.value) for a in left}) if left else None)

    def _add_event(self, span: Any, resource: int, clean: Callable[[Any], None]) -> bool:
        """False for an event without a title or of a kind that nobody knows."""
        values, left = _EVENT.read(span)
        if values[_KIND] not in EVENT_KINDS or not values[_TITLE]:
            return False
        if left or span.events or span.links:
            clean(span)
        if values[_EVENT_ID] is None:
            values[_EVENT_ID] = sha256(span.trace_id + span.span_id).hexdigest()[:32]
        self._events.add_record(span, resource, values)
        return True

    def tables(self, received_ns: int) -> Tables:
        """The rows by table; tables without rows are left out."""
        found: dict[str, pa.Table] = {}
        if self._requests.values:
            shared, flags = shared_columns(self._requests.common(self.resources, received_ns))
            columns = _REQUEST.arrays(self._requests.values) | shared
            columns["records"] = pa.array(self._words, TEXT)
            columns["status"] = pa.array(self._statuses, TEXT)
            columns["attributes"] = pa.array(self._left, TEXT)
            columns["quality"] = time_quality(flags)
            found["requests"] = _table(REQUESTS, columns)
        if self._samples.values:
            common = self._samples.common(self.resources, received_ns)
            shared, _ = shared_columns(common)
            columns = shared | _SAMPLE.arrays(self._samples.values) | {"time": shared["end_time"]}
            columns["service_instance_id"] = self._named_instances(shared)
            found["engine_samples"] = _table(ENGINE_SAMPLES, columns)
        if self._events.values:
            shared, _ = shared_columns(self._events.common(self.resources, received_ns))
            del shared["end_time"]
            columns = shared | _EVENT.arrays(self._events.values) | {"time": shared["start_time"]}
            found["events"] = _table(EVENTS, columns)
        return found

    @staticmethod
    def _named_instances(shared: dict[str, pa.Array]) -> pa.Array:
        """An engine needs a name: that of the instance, else of the service, else vLLM's."""
        return pc.coalesce(shared["service_instance_id"], shared["service_name"], pa.scalar("vllm", TEXT))


def _table(table: Table, columns: dict[str, pa.Array]) -> pa.Table:
    rows = len(columns["trace_id"])
    return table_of(table.schema, columns | {"source": pa.repeat(pa.scalar(SOURCE, TEXT), rows)}, rows)
