"""OTLP protobuf -> rows with ptars (Rust, straight to Arrow): the same rows as ``plain`` for the spans vLLM writes.

Works on whole columns. Whatever a stock vLLM does not write is handed to ``plain``: other spans, other attributes or
kinds of value, events, links, a status, unusable ids, prompt text, bodies that do not parse.

One difference remains: ptars skips unknown fields unchecked, so a span whose unknown fields are malformed (a field
number over 2^29 - 1, a group that never ends) is accepted here and refused by ``plain``. Its row is right.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from google.protobuf.message import DecodeError
from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage

from vllm_slo.exporters.conventions import (
    INFERENCE,
    INTEGER_ATTRIBUTES,
    REAL_ATTRIBUTES,
    REQUEST_SPAN_NAME,
    SECONDS_ATTRIBUTES,
    SPAN_STATUSES,
    TEXT_ATTRIBUTES,
)
from vllm_slo.exporters.otlp import plain
from vllm_slo.exporters.otlp.clean import prompt_text
from vllm_slo.exporters.otlp.decoded import Decoded, DecodeSettings
from vllm_slo.exporters.otlp.groups import parted
from vllm_slo.exporters.otlp.lot import Lot
from vllm_slo.exporters.otlp.proto import slim
from vllm_slo.exporters.otlp.resources import Resource, is_vllm_scope, resource_of
from vllm_slo.exporters.otlp.rows import Common, measure, requests_table
from vllm_slo.exporters.records import SCOPE
from vllm_slo.exporters.schema import TEXT

_INSTALLED = find_spec("ptars") is not None

Index = npt.NDArray[np.int64]
LARGEST_CACHED = 65_536
"""Bytes of the largest resource or scope kept between bodies."""


class _Unusual(Exception):
    """Something that only ``plain`` reads."""


class _FromProbe(_Unusual):
    """Some of the ``resource_spans``, those at ``positions``, are the probe's; the others are what vLLM writes."""

    def __init__(self, positions: frozenset[int]) -> None:
        super().__init__()
        self.positions = positions


def available() -> bool:
    """Whether ptars is installed (extra `fast`)."""
    return _INSTALLED


def decode(body: bytes, received_ns: int, settings: DecodeSettings) -> Decoded:
    """As ``plain.decode``: the same rows, refusals and errors."""
    try:
        lot = _requests(body, received_ns, settings)
    except _FromProbe as found:
        decoded = _apart(body, found.positions, received_ns, settings)
        return decoded or plain.decode(body, received_ns, settings)
    except (_Unusual, pa.ArrowInvalid, ValueError):
        return plain.decode(body, received_ns, settings)
    return Decoded(lot=lot, clean_body=body)


def _apart(body: bytes, positions: frozenset[int], received_ns: int, settings: DecodeSettings) -> Decoded | None:
    """The probe's part by ``plain``, the other by its own right; null where something is refused, which needs its
    place in the whole."""
    parts = parted(body, positions)
    if parts is None:
        return None
    others, probe = decode(parts[1], received_ns, settings), plain.decode(parts[0], received_ns, settings)
    if others.refused or probe.refused:
        return None
    changed = others.clean_body != parts[1] or probe.clean_body != parts[0]
    dropped = dict(others.dropped_attributes)
    for pattern, count in probe.dropped_attributes.items():
        dropped[pattern] = dropped.get(pattern, 0) + count
    return Decoded(
        lot=Lot.joined([others.lot, probe.lot]),
        clean_body=others.clean_body + probe.clean_body if changed else body,
        dropped_attributes=dropped,
    )


@lru_cache(maxsize=1)
def _parser() -> Callable[[bytes], pa.RecordBatch]:
    from ptars import HandlerPool

    request = slim().message_types_by_name["Request"]
    handler = HandlerPool([request.file]).get_for_message(request)
    return lambda body: handler.list_to_record_batch([body])


def _require(condition: Any) -> None:
    if not condition:
        raise _Unusual


def _requests(body: bytes, received_ns: int, settings: DecodeSettings) -> Lot:
    _require(available() and prompt_text(settings.prompt_text_attributes).harmless(plain.KEYS))
    groups = _parser()(body).column("resource_spans").flatten()
    scopes, group_of_scope = _items(groups.field("scope_spans"))
    spans, scope_of_span = _items(scopes.field("spans"))
    _require(len(spans))
    raw_scopes = _single(scopes.field("scope"))
    for scope in set(raw_scopes):
        _require(len(scope) <= LARGEST_CACHED)
        if not _is_vllm_scope(scope, settings):
            _require(_is_probe_scope(scope))
            theirs = np.unique(group_of_scope[[_is_probe_scope(one) for one in raw_scopes]])
            _require(len(theirs) < len(groups))
            raise _FromProbe(frozenset(theirs.tolist()))
    _text(groups.field("schema_url").flatten())
    _text(scopes.field("schema_url").flatten())
    resources, resource_of_group = _resources(_single(groups.field("resource")), settings)
    _check(spans)
    common = Common(
        start=_numbers(spans.field("start"), np.uint64),
        end=_numbers(spans.field("end"), np.uint64),
        trace_id=_own(spans.field("trace_id")),
        span_id=_own(spans.field("span_id")),
        parent_span_id=_parents(spans.field("parent_span_id")),
        resource=resource_of_group[group_of_scope[scope_of_span]],
        resources=resources,
        received_ns=received_ns,
    )
    found = _Attributes.of(spans.field("attributes"))
    seconds = {column: found.reals(key) for key, column in SECONDS_ATTRIBUTES.items()}
    _check_inference(found, seconds)
    measures = {column: measure(values) for column, values in seconds.items()}
    for column, values in seconds.items():
        _require((measures[column].known == ~np.isnan(values)).all())
    columns = {column: found.integers(key) for key, column in INTEGER_ATTRIBUTES.items()}
    columns |= {column: pa.array(found.reals(key), from_pandas=True) for key, column in REAL_ATTRIBUTES.items()}
    columns |= {column: found.texts(key) for key, column in TEXT_ATTRIBUTES.items()}
    columns["status"] = pa.repeat(pa.scalar(SPAN_STATUSES[0], TEXT), len(spans))
    probe = any(resource.probe for resource in resources)
    return Lot({"requests": requests_table(common, measures, columns)}, probe)


def _items(lists: pa.ListArray) -> tuple[pa.Array, Index]:
    """The items of all lists in one array, and for each the position of its list."""
    sizes = np.diff(np.asarray(lists.offsets))
    return lists.flatten(), np.repeat(np.arange(len(sizes)), sizes)


def _single(lists: pa.ListArray) -> list[bytes]:
    """The item of each list, where each has exactly one."""
    _require((np.diff(np.asarray(lists.offsets)) == 1).all())
    values: list[bytes] = lists.flatten().to_pylist()
    return values


def _own(values: pa.Array) -> pa.Array:
    """The values in memory of their own: what ptars made is freed only when no array refers to any part of it."""
    return pa.concat_arrays([values, values.slice(0, 0)])


def _text(values: pa.Array) -> pa.Array:
    """Bytes as text; ArrowInvalid when they are not UTF-8."""
    return values.cast(TEXT)


def _numbers(values: pa.Array, kind: Any) -> npt.NDArray[Any]:
    """The numbers of an array, arbitrary ones where it is null."""
    return np.frombuffer(values.buffers()[1], dtype=kind)[values.offset : values.offset + len(values)]


def _known(values: pa.Array) -> npt.NDArray[np.bool_]:
    """Where an array is not null."""
    if values.null_count in (0, len(values)):
        return np.full(len(values), values.null_count == 0)
    return values.is_valid().to_numpy(zero_copy_only=False)  # type: ignore[no-any-return]


def _matrix(values: pa.Array, size: int) -> npt.NDArray[np.uint8]:
    """Bytes of values that all have ``size`` bytes, one row each."""
    offsets = np.frombuffer(values.buffers()[1], dtype=np.int32)[values.offset : values.offset + len(values) + 1]
    _require((np.diff(offsets) == size).all())
    data = np.frombuffer(values.buffers()[2], dtype=np.uint8)
    return data[offsets[0] : offsets[-1]].reshape(len(values), size)


def _check(spans: pa.StructArray) -> None:
    """Whether every span is a request with usable ids and without events, links or a status."""
    name = REQUEST_SPAN_NAME.encode()
    _require((_matrix(spans.field("name"), len(name)) == np.frombuffer(name, dtype=np.uint8)).all())
    _require(_matrix(spans.field("trace_id"), 16).any(axis=1).all())
    _require(_matrix(spans.field("span_id"), 8).any(axis=1).all())
    _require(not len(spans.field("events").flatten()) and not len(spans.field("links").flatten()))
    _require(not pc.sum(pc.binary_length(spans.field("status").flatten())).as_py())
    _text(spans.field("trace_state").flatten())


def _parents(values: pa.Array) -> pa.Array:
    sizes = np.diff(np.frombuffer(values.buffers()[1], dtype=np.int32)[values.offset : values.offset + len(values) + 1])
    if not sizes.any():
        return pa.nulls(len(values), values.type)
    _require(((sizes == 8) | (sizes == 0)).all())
    present = pa.array(sizes == 8)
    _require(_matrix(values.filter(present), 8).any(axis=1).all())
    return pc.if_else(present, values, None)


def _resources(raw: list[bytes], settings: DecodeSettings) -> tuple[list[Resource], Index]:
    """The distinct resources, and which one each group has."""
    distinct = {value: position for position, value in enumerate(dict.fromkeys(raw))}
    resources = [(_cached_resource if len(r) <= LARGEST_CACHED else _resource)(r, settings) for r in distinct]
    return resources, np.array([distinct[value] for value in raw], dtype=np.int64)


def _resource(raw: bytes, settings: DecodeSettings) -> Resource:
    message = _parsed(ResourceMessage, raw)
    _require(not prompt_text(settings.prompt_text_attributes).clean_attributes(message.attributes, {}))
    return resource_of(message, settings)


_cached_resource = lru_cache(maxsize=1024)(_resource)


@lru_cache(maxsize=1024)
def _is_vllm_scope(raw: bytes, settings: DecodeSettings) -> bool:
    message = _parsed(InstrumentationScope, raw)
    prompts = prompt_text(settings.prompt_text_attributes)
    return is_vllm_scope(message.name) and not prompts.clean_attributes(message.attributes, {})


@lru_cache(maxsize=1024)
def _is_probe_scope(raw: bytes) -> bool:
    return bool(_parsed(InstrumentationScope, raw).name == SCOPE)


def _parsed(kind: Any, raw: bytes) -> Any:
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise _Unusual from error


@dataclass(frozen=True)
class _Attributes:
    """Every attribute of every span in one column each; ``places`` gives (span, position in the columns) by key."""

    rows: int
    places: dict[str, tuple[Index | slice, Index | slice]]
    text: pa.Array
    integer: npt.NDArray[np.int64]
    integer_known: npt.NDArray[np.bool_]
    double: npt.NDArray[np.float64]
    double_known: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, lists: pa.ListArray) -> _Attributes:
        flat = lists.flatten()
        values = flat.field("value")
        text, integer, double = (values.field(name) for name in ("string", "integer", "double"))
        kinds = sum(len(kind) - kind.null_count for kind in (text, integer, double))
        _require(values.null_count == 0 and kinds == len(flat))
        return cls(
            rows=len(lists),
            places=dict(_places(flat.field("key"), np.asarray(lists.offsets))),
            text=text,
            integer=_numbers(integer, np.int64),
            integer_known=_known(integer),
            double=_numbers(double, np.float64),
            double_known=_known(double),
        )

    def reals(self, key: str) -> npt.NDArray[np.float64]:
        """Finite numbers, NaN where the span lacks the key."""
        result = np.full(self.rows, np.nan)
        if key in self.places:
            rows, at = self.places[key]
            numbers = self.double[at]
            doubles = self.double_known[at]
            if not doubles.all():
                _require((doubles | self.integer_known[at]).all())
                numbers = np.where(doubles, numbers, self.integer[at].astype(np.float64))
            _require(np.isfinite(numbers).all())
            result[rows] = numbers
        return result

    def integers(self, key: str) -> pa.Array:
        """Integers, null where the span lacks the key."""
        result = np.zeros(self.rows, dtype=np.int64)
        absent = np.ones(self.rows, dtype=np.bool_)
        if key in self.places:
            rows, at = self.places[key]
            _require(self.integer_known[at].all())
            result[rows] = self.integer[at]
            absent[rows] = False
        return pa.array(result, mask=absent)

    def texts(self, key: str) -> pa.Array:
        """Text, null where the span lacks the key."""
        if key not in self.places:
            return pa.nulls(self.rows, TEXT)
        rows, at = self.places[key]
        index = np.zeros(self.rows, dtype=np.int64)
        absent = np.ones(self.rows, dtype=np.bool_)
        index[rows] = np.arange(len(self.text))[at]
        absent[rows] = False
        taken = self.text.take(pa.array(index, mask=absent))
        _require(taken.null_count == int(absent.sum()))
        return _text(taken)


def _places(keys: pa.Array, offsets: Index) -> Iterator[tuple[str, tuple[Index | slice, Index | slice]]]:
    """For each key the spans that have it and where; every key must be known and at most once in a span.

    Spans that all have the same keys in the same order are seen by comparing bytes; others through a dictionary.
    """
    sizes = np.diff(offsets)
    count = int(sizes[0])
    if count and (sizes == count).all() and _repeats(keys, count):
        names = [_known_key(key) for key in keys[:count].to_pylist()]
        _require(len(set(names)) == count)
        for position, name in enumerate(names):
            yield name, (slice(None), slice(position, None, count))
        return
    encoded = keys.dictionary_encode()
    codes = np.asarray(encoded.indices)
    spans = np.repeat(np.arange(len(sizes)), sizes)
    for code, key in enumerate(encoded.dictionary.to_pylist()):
        at = np.flatnonzero(codes == code)
        rows = spans[at]
        _require((rows[1:] != rows[:-1]).all())
        yield _known_key(key), (rows, at)


def _repeats(keys: pa.Array, count: int) -> bool:
    """Whether the first ``count`` keys come again and again, to the end."""
    offsets = np.frombuffer(keys.buffers()[1], dtype=np.int32)[keys.offset : keys.offset + len(keys) + 1]
    lengths = np.diff(offsets).reshape(-1, count)
    if not (lengths == lengths[0]).all():
        return False
    data = np.frombuffer(keys.buffers()[2], dtype=np.uint8)[offsets[0] : offsets[-1]]
    rows = data.reshape(len(lengths), -1)
    return bool((rows == rows[0]).all())


def _known_key(key: bytes) -> str:
    name = _KEYS.get(key)
    if name is None:
        raise _Unusual
    return name


_KEYS = {key.encode(): key for key in plain.KEYS}


def _check_inference(found: _Attributes, seconds: dict[str, npt.NDArray[np.float64]]) -> None:
    """Whether prefill and decode give the inference time wherever there is one, so that nothing is lost without it."""
    if INFERENCE in found.places:
        inference = found.reals(INFERENCE)
        prefill, decoding = seconds["prefill_seconds"], seconds["decode_seconds"]
        has = ~np.isnan(inference)
        _require((np.abs(inference - (prefill + decoding))[has] <= plain.SAME).all())
