"""The same spans in every form that is imported, and what the lake holds afterwards."""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.query import connect, run

MEASURES = (
    "request_id, trace_id, span_id, start_time, end_time, received_time, day, source, shard, service_instance_id, "
    "model, prompt_tokens, completion_tokens, time_to_first_token_seconds, request_duration_seconds, queue_seconds, "
    "prefill_seconds, decode_seconds, quality, status, attributes, bucket"
)


def rows(lake: Path, sql: str) -> list[dict[str, Any]]:
    """Rows of a query over a lake."""
    with connect(Lake.open(lake, create=False), Buckets()) as connection:
        found: list[dict[str, Any]] = run(connection, sql, 60).to_pylist()
        return found


def content(lake: Path) -> dict[str, list[dict[str, Any]]]:
    """Everything in a lake that does not depend on how it was cut into commits."""
    rollups = (
        "select level, time, shard, model, priority, bucket, metric, quality, bin, "
        "sum(count)::bigint n, sum(value_sum) v"
    )
    return {
        "requests": rows(lake, f"select {MEASURES} from requests order by all"),
        "spans": rows(lake, "from spans order by all"),
        "rollups": rows(lake, f"{rollups} from rollups group by all order by all"),
        "events": rows(lake, "from events order by all"),
        "engine_samples": rows(lake, "from engine_samples order by all"),
    }


def otlp_json(body: bytes) -> str:
    """An OTLP protobuf body as OTLP/JSON: as the Collector writes it, ids in hex."""
    from google.protobuf import json_format

    document = json_format.MessageToDict(ExportTraceServiceRequest.FromString(body))
    for group in document["resourceSpans"]:
        for scope in group["scopeSpans"]:
            for span in scope["spans"]:
                for name in ("traceId", "spanId", "parentSpanId"):
                    if name in span:
                        span[name] = base64.b64decode(span[name]).hex()
    return json.dumps(document)


def write_forms(bodies: Iterable[bytes], folder: Path) -> dict[str, Path]:
    """The bodies in every OTLP form; the name of a form -> its file, which has no telling suffix."""
    every = list(bodies)
    joined = b"".join(every)
    lines = [otlp_json(body) for body in every]
    framed = b"".join(len(body).to_bytes(4, "big") + body for body in every)
    packed = [_zstd(body) for body in every]
    forms: dict[str, bytes] = {
        "protobuf": joined,
        "protobuf gzip": gzip.compress(joined),
        "json": json.dumps(json.loads(otlp_json(joined)), indent=2).encode(),
        "json gzip": gzip.compress(otlp_json(joined).encode()),
        "json with a byte order mark": b"\xef\xbb\xbf" + otlp_json(joined).encode(),
        "json lines": "\n".join(lines).encode(),
        "json lines gzip": gzip.compress("\n\n".join(lines).encode() + b"\n"),
        "length-delimited": framed,
        "length-delimited gzip": gzip.compress(framed),
        "length-delimited zstd": b"".join(len(body).to_bytes(4, "big") + body for body in packed),
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for number, (name, data) in enumerate(forms.items()):
        files[name] = folder / f"form{number}"
        files[name].write_bytes(data)
    return files


def _zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def renumbered(body: bytes, number: int) -> bytes:
    """The body with other trace ids and request ids, made of ``number``."""
    request = ExportTraceServiceRequest.FromString(body)
    for group in request.resource_spans:
        for scope in group.scope_spans:
            for span in scope.spans:
                span.trace_id = number.to_bytes(4, "big") + span.trace_id[4:]
                for attribute in span.attributes:
                    if attribute.key == "gen_ai.request.id":
                        attribute.value.string_value += f"-{number}"
    return bytes(request.SerializeToString())
