"""Results of `vllm bench serve --save-result --save-detailed` (vLLM 0.32: benchmarks/serve.py) -> rows of `requests`.

The client's side: source `client`, phases unknown. The file has no wall-clock time per request: its start times are of
a monotonic clock, and `date` is when the run had ended, in local time to the second. The last request is taken to end
then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from opentelemetry.proto.resource.v1.resource_pb2 import Resource as ResourceMessage

from vllm_slo.exporters.conventions import MODEL, SERVICE_NAME
from vllm_slo.exporters.importers.items import Item, Rows, Unreadable
from vllm_slo.exporters.otlp.clean import prompt_text
from vllm_slo.exporters.otlp.decoded import DecodeSettings, Refusal
from vllm_slo.exporters.otlp.quality import Measure
from vllm_slo.exporters.otlp.resources import Resource, resource_of
from vllm_slo.exporters.otlp.rows import SECOND, measure, seconds_array
from vllm_slo.exporters.schema import BYTES, DATE, INTEGER, REQUESTS, TEXT, TIME

MARK = b'"request_throughput"'
"""A key that every result of `vllm bench serve` has."""
SERVICE = "vllm bench serve"

_LISTS = ("input_lens", "output_lens", "ttfts", "itls", "start_times", "errors")
_PER_REQUEST = frozenset({*_LISTS, "latencies", "queue_times", "generated_texts"})


def is_result(value: object) -> bool:
    """Whether a JSON document is a benchmark result, detailed or not."""
    return isinstance(value, dict) and "request_throughput" in value and "date" in value


def read(value: Mapping[str, Any], text: bytes, place: str, settings: DecodeSettings, zone: ZoneInfo) -> Item:
    """The rows of one result. ``zone`` is the time zone of the client that wrote `date`.

    Failed requests: status `error`, their measures null.
    Duration: `latencies`, else (older vLLM) time to first token plus all inter-token latencies.
    Ids: made of the document and the position, so that the same result is always the same rows.
    Shard, instance and so on: what `--metadata vllm.shard=...` wrote into the result; shard rules see its keys.
    The generated texts are dropped and counted.
    """
    absent = [name for name in _LISTS if not isinstance(value.get(name), list)]
    if absent:
        return Unreadable("not_detailed", f"no {', '.join(absent)}; run the benchmark with --save-detailed", place)
    count = len(value["input_lens"])
    if any(len(value[name]) != count for name in _LISTS):
        sizes = ", ".join(f"{name} {len(value[name])}" for name in _LISTS)
        return Unreadable("malformed_result", f"lists of different lengths: {sizes}", place)
    try:
        ended = datetime.strptime(value["date"], "%Y%m%d-%H%M%S").replace(tzinfo=zone).astimezone(UTC)
        starts, durations, first = _numbers(value, "start_times"), _durations(value), _numbers(value, "ttfts")
        prompts, outputs = pa.array(value["input_lens"], INTEGER), pa.array(value["output_lens"], INTEGER)
    except (ValueError, TypeError, pa.ArrowException) as error:
        return Unreadable("malformed_result", str(error), place)
    failed = np.array([bool(message) for message in value["errors"]], dtype=bool)
    usable = np.isfinite(starts)
    dropped: dict[str, int] = {}
    resource = _resource(value, settings, dropped)
    rows = _rows(resource, hashlib.sha256(text).digest(), ended, starts, durations, first, failed, prompts, outputs)
    refused = (Refusal("no_start_time", int((~usable).sum()), place),) if not usable.all() else ()
    if texts := sum(1 for item in value.get("generated_texts") or () if item):
        dropped["generated_texts"] = texts
    return Rows("requests", rows.filter(pa.array(usable)), place, refused, dropped)


def _rows(
    resource: Resource,
    digest: bytes,
    ended: datetime,
    starts: npt.NDArray[np.float64],
    durations: npt.NDArray[np.float64],
    first: npt.NDArray[np.float64],
    failed: npt.NDArray[np.bool_],
    prompts: pa.Array,
    outputs: pa.Array,
) -> pa.Table:
    count = len(starts)
    ends = starts + np.nan_to_num(durations)
    last = float(np.nanmax(ends)) if count and np.isfinite(ends).any() else 0.0
    offset = int(ended.timestamp()) * SECOND
    start = offset + np.round(np.nan_to_num(starts - last) * SECOND).astype(np.int64)
    end = start + np.round(np.nan_to_num(durations) * SECOND).astype(np.int64)
    ids = [hashlib.sha256(digest + position.to_bytes(8, "big")).digest() for position in range(count)]
    columns: dict[str, pa.Array] = {
        "day": pa.array((start // (86_400 * SECOND)).astype(np.int32)).view(DATE),
        "start_time": pa.array(start // 1000).view(TIME),
        "end_time": pa.array(end // 1000).view(TIME),
        "received_time": pa.array(np.full(count, offset // 1000)).view(TIME),
        "trace_id": pa.array([each[:16] for each in ids], BYTES),
        "span_id": pa.array([each[16:24] for each in ids], BYTES),
        "prompt_tokens": prompts,
        "completion_tokens": outputs,
        "status": pa.array(np.where(failed, "error", "ok"), TEXT),
        "time_to_first_token_seconds": seconds_array(_where(measure(first), ~failed & (first > 0))),
        "request_duration_seconds": seconds_array(_where(measure(durations), ~failed)),
    }
    same = {
        "source": "client",
        "service_name": resource.service_name,
        "service_instance_id": resource.service_instance_id,
        "shard": resource.shard,
        "model": resource.model,
        "resource_attributes": resource.attributes,
    }
    columns |= {name: pa.array([item] * count, TEXT) for name, item in same.items()}
    return pa.table(
        [columns.get(field.name, pa.nulls(count, field.type)) for field in REQUESTS.schema], schema=REQUESTS.schema
    )


def _resource(value: Mapping[str, Any], settings: DecodeSettings, dropped: dict[str, int]) -> Resource:
    """The keys of the result that describe the run, as a resource."""
    named = {SERVICE_NAME: SERVICE, MODEL: value.get("model_id")}
    named |= {key: item for key, item in value.items() if key not in _PER_REQUEST and isinstance(item, str)}
    message = ResourceMessage()
    for key, item in named.items():
        if isinstance(item, str):
            message.attributes.add(key=key).value.string_value = item
    prompt_text(settings.prompt_text_attributes).clean_attributes(message.attributes, dropped)
    return resource_of(message, settings)


def _durations(value: Mapping[str, Any]) -> npt.NDArray[np.float64]:
    if isinstance(value.get("latencies"), list) and len(value["latencies"]) == len(value["ttfts"]):
        return _numbers(value, "latencies")
    return np.array([first + sum(gaps) for first, gaps in zip(value["ttfts"], value["itls"], strict=True)], dtype=float)


def _numbers(value: Mapping[str, Any], name: str) -> npt.NDArray[np.float64]:
    items: Sequence[Any] = value[name]
    return np.array([np.nan if item is None else float(item) for item in items], dtype=float)


def _where(values: Measure, keep: npt.NDArray[np.bool_]) -> Measure:
    return Measure(values.nanoseconds, values.known & keep)
