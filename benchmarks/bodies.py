"""Serialised OTLP bodies of vLLM-like `llm_request` spans, made fast enough to outrun a receiver.

One body is serialised with the OTLP messages and the byte positions of everything that differs between requests (ids,
times, latencies, the request id) are found in it once; further bodies overwrite those bytes with new random values.
Token counts are variable-length on the wire, so they differ between templates and not within one. Synthetic: latencies
are lognormal and add up as vLLM's do; nothing here claims to be a measurement.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

LATENCIES = (
    "gen_ai.latency.time_to_first_token",
    "gen_ai.latency.e2e",
    "gen_ai.latency.time_in_queue",
    "gen_ai.latency.time_in_model_prefill",
    "gen_ai.latency.time_in_model_decode",
    "gen_ai.latency.time_in_model_inference",
)
_REQUEST_ID_LENGTH = len("cmpl-") + 32 + len("-0")


@dataclass(frozen=True)
class Template:
    """One serialised body and where its changing bytes are: arrays of shape (spans, width)."""

    body: np.ndarray
    spans: int
    trace_ids: np.ndarray
    span_ids: np.ndarray
    request_ids: np.ndarray
    times: np.ndarray
    latencies: np.ndarray


def template(spans: int, rng: np.random.Generator, instance: str = "general-0") -> Template:
    """A body of ``spans`` requests with the attributes and the resource of vLLM 0.32."""
    request = ExportTraceServiceRequest()
    resource = request.resource_spans.add()
    for key, text in {
        "telemetry.sdk.language": "python",
        "telemetry.sdk.name": "opentelemetry",
        "telemetry.sdk.version": "1.45.2",
        "service.name": "vllm",
        "service.instance.id": instance,
        "vllm.shard": "general",
        "vllm.instrumenting_module_name": "vllm.llm_engine",
        "vllm.process_id": "4711",
    }.items():
        resource.resource.attributes.add(key=key).value.string_value = text
    scope = resource.scope_spans.add()
    scope.scope.name = "vllm.tracing.otel"
    markers = rng.integers(0, 256, (spans, 2 + len(LATENCIES), 8), dtype=np.uint8)
    markers[:, 2:, 7] = 0x3F  # finite doubles
    markers[:, :2, 7] &= 0x7F
    ids = rng.integers(0, 256, (spans, 24), dtype=np.uint8)
    names = [f"cmpl-{rng.bytes(16).hex()}-0" for _ in range(spans)]
    for row in range(spans):
        span = scope.spans.add(
            trace_id=ids[row, :16].tobytes(),
            span_id=ids[row, 16:].tobytes(),
            name="llm_request",
            kind=Span.SPAN_KIND_SERVER,
            start_time_unix_nano=int(markers[row, 0].view(np.uint64)[0]),
            end_time_unix_nano=int(markers[row, 1].view(np.uint64)[0]),
            flags=256,
        )
        for index, key in enumerate(LATENCIES):
            span.attributes.add(key=key).value.double_value = float(markers[row, 2 + index].view(np.float64)[0])
        prompt = int(min(rng.lognormal(6.5, 1.4) + 1, 120_000))
        completion = int(min(rng.lognormal(4.8, 0.8) + 1, 4096))
        span.attributes.add(key="gen_ai.usage.prompt_tokens").value.int_value = prompt
        span.attributes.add(key="gen_ai.usage.completion_tokens").value.int_value = completion
        span.attributes.add(key="gen_ai.request.id").value.string_value = names[row]
        span.attributes.add(key="gen_ai.request.top_p").value.double_value = 1.0
        span.attributes.add(key="gen_ai.request.max_tokens").value.int_value = 512
        span.attributes.add(key="gen_ai.request.temperature").value.double_value = 0.7
        span.attributes.add(key="gen_ai.request.n").value.int_value = 1
    raw = request.SerializeToString()

    def positions(needles: list[bytes], width: int) -> np.ndarray:
        starts, at = [], 0
        for needle in needles:  # fields come in the order of the spans
            at = raw.index(needle, at)
            starts.append(at)
        return np.asarray(starts)[:, None] + np.arange(width)

    def fixed(index: int) -> np.ndarray:
        return positions([markers[row, index].tobytes() for row in range(spans)], 8)

    return Template(
        body=np.frombuffer(raw, np.uint8),
        spans=spans,
        trace_ids=positions([ids[row, :16].tobytes() for row in range(spans)], 16),
        span_ids=positions([ids[row, 16:].tobytes() for row in range(spans)], 8),
        request_ids=positions([name.encode() for name in names], _REQUEST_ID_LENGTH),
        times=np.stack([fixed(0), fixed(1)], axis=1),
        latencies=np.stack([fixed(2 + index) for index in range(len(LATENCIES))], axis=1),
    )


def fill(shape: Template, rng: np.random.Generator, now_ns: int) -> bytes:
    """A new body in the shape of ``shape``: fresh random ids, requests that ended in the second before ``now_ns``."""
    count = shape.spans
    body = shape.body.copy()
    body[shape.trace_ids] = rng.integers(0, 256, (count, 16), dtype=np.uint8)
    body[shape.span_ids] = rng.integers(0, 256, (count, 8), dtype=np.uint8)
    digits = np.frombuffer(rng.bytes(16 * count).hex().encode(), np.uint8).reshape(count, 32)
    body[shape.request_ids[:, 5:37]] = digits
    queue = rng.lognormal(-4, 1.5, count)
    prefill = rng.lognormal(-2.5, 1, count)
    decode = rng.lognormal(0.5, 0.8, count)
    first = queue + prefill + rng.lognormal(-6, 0.5, count)
    total = first + decode + rng.lognormal(-8, 0.5, count)
    seconds = np.stack([first, total, queue, prefill, decode, prefill + decode], axis=1)
    body[shape.latencies] = seconds.astype("<f8").view(np.uint8).reshape(count, len(LATENCIES), 8)
    end = now_ns - rng.integers(0, 1_000_000_000, count)
    start = end - (total * 1e9).astype(np.int64) - 50_000
    body[shape.times] = np.stack([start, end], axis=1).astype("<u8").view(np.uint8).reshape(count, 2, 8)
    return body.tobytes()


def stream(spans: int, seed: int, clock: Callable[[], int], templates: int = 16) -> Iterator[bytes]:
    """Endless distinct bodies of ``spans`` requests each, deterministic by seed."""
    rng = np.random.default_rng(seed)
    shapes = [template(spans, rng) for _ in range(templates)]
    while True:
        for shape in shapes:
            yield fill(shape, rng, clock())


def main() -> None:
    """Says how fast bodies are made: a sender that is no faster than a receiver measures itself."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--spans", type=int, default=1000, help="spans in a body")
    parser.add_argument("--bodies", type=int, default=500)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args()
    bodies = stream(options.spans, 1, time.time_ns)
    next(bodies)
    began = time.process_time()
    size = sum(len(next(bodies)) for _ in range(options.bodies))
    made = options.bodies * options.spans
    figures = {"spans_made_per_cpu_second": made / (time.process_time() - began), "bytes_per_span": size / made}
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(
        f"bodies: {figures['spans_made_per_cpu_second']:,.0f} spans/CPU-s, {figures['bytes_per_span']:.0f} bytes/span"
    )


if __name__ == "__main__":
    main()
