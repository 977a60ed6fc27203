"""Broken bodies: real ones, damaged in 20,000 ways. Nothing but BodyError comes out, and what is accepted is valid."""

from __future__ import annotations

import random
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from vllm_slo.exporters.otlp import fast, plain
from vllm_slo.exporters.otlp import json as otlp_json
from vllm_slo.exporters.otlp.decoded import BODY_REASONS, REFUSAL_REASONS, BodyError, Decoded, Decoder, DecodeSettings
from vllm_slo.exporters.otlp.lot import STOCK_REQUESTS
from vllm_slo.exporters.schema import REQUESTS, SPANS

RECEIVED = 1_796_080_000_000_000_000
SETTINGS = DecodeSettings()
PROTOBUF_MUTATIONS = 12_000
JSON_MUTATIONS = 8_000


def few_spans(body: bytes, spans: int) -> bytes:
    """The first spans of a body: small enough that each damage hits something."""
    request = ExportTraceServiceRequest.FromString(body)
    del request.resource_spans[1:]
    del request.resource_spans[0].scope_spans[1:]
    del request.resource_spans[0].scope_spans[0].spans[spans:]
    return request.SerializeToString()


@pytest.fixture(scope="module")
def protobuf_bodies(public_data: Path) -> list[bytes]:
    otlp = public_data / "2_otlp"
    vllm = (otlp / "vllm033-derived" / "rtxpro-llama8b-tp1" / "batch-000.pb").read_bytes()
    demo = (otlp / "otlp2parquet" / "testdata" / "traces.pb").read_bytes()
    return [
        few_spans(vllm, 1),
        few_spans(vllm, 3),
        few_spans(vllm, 2) + few_spans(demo, 1),
        few_spans(demo, 2),
        (otlp / "duckdb-otlp" / "test" / "data" / "otlp_traces.pb").read_bytes(),
    ]


@pytest.fixture(scope="module")
def json_bodies(public_data: Path) -> list[bytes]:
    otlp = public_data / "2_otlp"
    duckdb = otlp / "duckdb-otlp" / "test" / "data"
    return [
        *(line for _, line in otlp_json.lines((duckdb / "traces_simple.jsonl").read_bytes().splitlines())),
        *(line for _, line in otlp_json.lines((duckdb / "traces_nulls.jsonl").read_bytes().splitlines())),
        (otlp / "opentelemetry-proto" / "examples" / "trace.json").read_bytes(),
        (otlp / "otlp2records" / "tests" / "fixtures" / "sample_otlp_traces.json").read_bytes(),
        (otlp / "otlp2parquet" / "testdata" / "traces.jsonl").read_bytes().splitlines()[0],
    ]


def damaged(body: bytes, others: list[bytes], chance: random.Random) -> bytes:
    """One to three damages: flipped bits, a cut end, a repeated or foreign piece, an edited length, a lost piece."""
    data = bytearray(body)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        if not data:
            break
        at = chance.randrange(len(data))
        to = min(len(data), at + chance.randrange(1, 24))
        match chance.randrange(6):
            case 0:
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                del data[at:]
            case 2:
                data[at:at] = data[at:to]
            case 3:
                other = chance.choice(others)
                start = chance.randrange(len(other))
                data[at:to] = other[start : start + chance.randrange(1, 48)]
            case 4:
                data[at] = (data[at] + chance.choice((-2, -1, 1, 2, 127))) % 256
            case _:
                del data[at:to]
    return bytes(data)


def assert_valid(decoded: Decoded) -> None:
    assert {refusal.reason for refusal in decoded.refused} <= set(REFUSAL_REASONS)
    for table, contract in ((decoded.requests, REQUESTS), (decoded.spans, SPANS)):
        names = STOCK_REQUESTS.names if table is decoded.requests else contract.schema.names
        assert table.schema == pa.schema([contract.schema.field(name) for name in names])
        table.validate(full=True)
        for column in contract.columns:
            if column.required:
                assert table.column(column.name).null_count == 0
        for name, size in (("trace_id", 16), ("span_id", 8), ("parent_span_id", 8)):
            lengths = pc.drop_null(pc.binary_length(table.column(name)))
            assert pc.all(pc.equal(lengths, size)).as_py() in (True, None)


def outcome(decode: Decoder, body: bytes) -> Decoded | str:
    """What a decoder gives, or the reason for which it refuses the whole body."""
    try:
        return decode(body, RECEIVED, SETTINGS)
    except BodyError as error:
        return error.reason


def both(body: bytes) -> Decoded | None:
    """What both decoders give, which must be the same; None where both refuse the whole body."""
    expected, actual = outcome(plain.decode, body), outcome(fast.decode, body)
    if isinstance(expected, str) or isinstance(actual, str):
        assert actual == expected
        assert expected in BODY_REASONS
        return None
    assert actual.requests.equals(expected.requests)
    assert actual.spans.equals(expected.spans)
    assert (actual.refused, actual.dropped_attributes) == (expected.refused, expected.dropped_attributes)
    assert actual.clean_body == expected.clean_body
    return expected


def test_damaged_protobuf_gives_valid_rows_or_a_body_error_from_both_decoders(protobuf_bodies: list[bytes]) -> None:
    chance = random.Random(20261130)
    outcomes = {"accepted": 0, "refused": 0, "body": 0}
    for _ in range(PROTOBUF_MUTATIONS):
        body = damaged(chance.choice(protobuf_bodies), protobuf_bodies, chance)
        decoded = both(body)
        if decoded is None:
            outcomes["body"] += 1
            continue
        assert_valid(decoded)
        outcomes["refused" if decoded.refused else "accepted"] += 1
        again = plain.decode(decoded.clean_body, RECEIVED, SETTINGS)
        assert not again.refused
        assert again.requests.equals(decoded.requests)
        assert again.spans.equals(decoded.spans)
    assert min(outcomes.values()) > PROTOBUF_MUTATIONS // 20, outcomes


def test_damaged_json_gives_valid_rows_or_a_body_error(json_bodies: list[bytes]) -> None:
    chance = random.Random(20261201)
    outcomes = {"accepted": 0, "refused": 0, "body": 0}
    for _ in range(JSON_MUTATIONS):
        body = damaged(chance.choice(json_bodies), json_bodies, chance)
        try:
            converted, refused = otlp_json.to_protobuf(body)
        except BodyError as error:
            outcomes["body"] += error.reason in BODY_REASONS
            continue
        assert {refusal.reason for refusal in refused} <= set(REFUSAL_REASONS)
        decoded = plain.decode(converted, RECEIVED, SETTINGS)
        assert_valid(decoded)
        outcomes["refused" if refused or decoded.refused else "accepted"] += 1
    assert sum(outcomes.values()) == JSON_MUTATIONS
    assert min(outcomes.values()) > JSON_MUTATIONS // 40, outcomes
