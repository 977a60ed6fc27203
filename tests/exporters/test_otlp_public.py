"""OTLP that nobody here wrote, in every form it comes in, against readers nobody here wrote."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from vllm_slo.exporters.otlp import fast, plain
from vllm_slo.exporters.otlp import json as otlp_json
from vllm_slo.exporters.otlp.decoded import BodyError, Decoded, DecodeSettings, Refusal

RECEIVED = 1_796_080_000_000_000_000
SETTINGS = DecodeSettings()

LENIENT = {
    "resourceSpans_missing": "an empty object is a valid body without spans in protobuf's JSON",
    "scopeSpans_missing": "absent lists are empty lists",
    "spans_missing": "absent lists are empty lists",
    "event_missing_name": "absent text is empty text; the event keeps its time and attributes",
}
"""fluent-bit's error cases that are its policy and not the format's, each with why they pass here."""


@pytest.fixture
def otlp(public_data: Path) -> Path:
    return public_data / "2_otlp"


def decode(body: bytes) -> Decoded:
    """Rows of a protobuf body, the same from both decoders."""
    decoded = plain.decode(body, RECEIVED, SETTINGS)
    if fast.available():
        other = fast.decode(body, RECEIVED, SETTINGS)
        assert other.requests.equals(decoded.requests)
        assert other.spans.equals(decoded.spans)
        assert other.refused == decoded.refused
        assert other.clean_body == decoded.clean_body
    return decoded


def decode_json(body: bytes) -> Decoded:
    """Rows of a JSON body, nothing refused."""
    converted, refused = otlp_json.to_protobuf(body)
    decoded = decode(converted)
    assert refused == decoded.refused == []
    return decoded


def json_refusals(body: bytes) -> list[Refusal]:
    converted, refused = otlp_json.to_protobuf(body)
    return [*refused, *decode(converted).refused]


def body_reason(body: bytes) -> str | list[Refusal]:
    """Why the whole body is refused, else the refusals of its spans."""
    try:
        return json_refusals(body)
    except BodyError as error:
        return error.reason


def source_spans(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The spans of a document; some senders write snake_case."""
    for group in document.get("resourceSpans") or document.get("resource_spans") or []:
        for scope in group.get("scopeSpans") or group.get("scope_spans") or []:
            yield from scope.get("spans", [])


def source_ids(document: dict[str, Any]) -> Counter[tuple[str, str]]:
    return Counter(
        ((span.get("traceId") or span["trace_id"]).lower(), (span.get("spanId") or span["span_id"]).lower())
        for span in source_spans(document)
    )


def ids(*decoded: Decoded) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for one in decoded:
        for table in (one.requests, one.spans):
            pairs = zip(table.column("trace_id").to_pylist(), table.column("span_id").to_pylist(), strict=True)
            for trace_id, span_id in pairs:
                assert (len(trace_id), len(span_id)) == (16, 8)
                found[trace_id.hex(), span_id.hex()] += 1
    return found


def expected_rows(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / "expected.csv").open(newline="") as stream:
        return {(row["instance"], row["request_id"]): row for row in csv.DictReader(stream)}


def assert_expected(tables: list[pa.Table], expected: dict[tuple[str, str], dict[str, str]]) -> None:
    """Every figure of every request to the nanosecond."""
    rows = [row for table in tables for row in table.to_pylist()]
    assert {(row["service_instance_id"], row["request_id"]) for row in rows} == set(expected)
    assert len(rows) == len(expected)
    half = Decimal("5e-10")
    for row in rows:
        source = expected[row["service_instance_id"], row["request_id"]]
        assert row["prompt_tokens"] == int(source["prompt_tokens"])
        assert row["completion_tokens"] == int(source["completion_tokens"])
        for column, name in (
            ("time_to_first_token_seconds", "ttft_s"),
            ("request_duration_seconds", "e2e_s"),
            ("queue_seconds", "queue_s"),
            ("prefill_seconds", "prefill_s"),
            ("decode_seconds", "decode_s"),
        ):
            assert abs(row[column] - Decimal(float(source[name]))) <= half
        assert row["quality"] is None
        assert row["attributes"] is None
        assert row["shard"] == source["instance"]


def test_every_figure_vllm_wrote_is_kept_to_half_a_nanosecond(otlp: Path) -> None:
    folder = otlp / "vllm033-derived"
    bodies = [path.read_bytes() for path in sorted(folder.glob("*/batch-*.pb"))]
    bodies += [gzip.decompress(path.read_bytes()) for path in sorted(folder.glob("*/batch-*.pb.gz"))]
    assert len(bodies) == 3
    assert_expected([decode(body).requests for body in bodies], expected_rows(folder))
    assert_expected([decode(b"".join(bodies)).requests], expected_rows(folder))


def test_the_collectors_json_lines_give_the_same_requests(otlp: Path) -> None:
    folder = otlp / "vllm033-derived"
    with (folder / "all.collector-form.jsonl").open("rb") as stream:
        bodies = [line for _, line in otlp_json.lines(stream)]
    decoded = [decode_json(body) for body in bodies]
    assert_expected([one.requests for one in decoded], expected_rows(folder))
    assert ids(*decoded) == sum((source_ids(json.loads(body)) for body in bodies), Counter())


def fluent_bit_cases(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "fluent-bit/tests/internal/data/opentelemetry/traces.json").read_bytes()))


def test_fluent_bits_valid_cases_decode(otlp: Path) -> None:
    valid = {name: case for name, case in fluent_bit_cases(otlp).items() if "expected_error" not in case}
    assert len(valid) == 4
    for case in valid.values():
        assert ids(decode_json(json.dumps(case["input"]).encode())) == source_ids(case["input"])


def test_fluent_bits_error_cases_are_refused(otlp: Path) -> None:
    accepted = set()
    broken = {name: case for name, case in fluent_bit_cases(otlp).items() if "expected_error" in case}
    assert len(broken) == 34
    for name, case in broken.items():
        outcome = body_reason(json.dumps(case["input"]).encode())
        if isinstance(outcome, str):
            assert outcome == "wrong_type", name
            continue
        if not outcome:
            accepted.add(name)
            continue
        (refusal,) = outcome
        assert refusal.count == 1
        expected = case["expected_error"]["code"].removeprefix("FLB_OTEL_TRACES_ERR_").lower()
        if "_id" in expected:
            assert refusal.reason == expected, name
    assert accepted == set(LENIENT)


def test_the_specifications_example_decodes(otlp: Path) -> None:
    body = (otlp / "opentelemetry-proto/examples/trace.json").read_bytes()
    decoded = decode_json(body)
    assert ids(decoded) == source_ids(json.loads(body))
    (row,) = decoded.spans.to_pylist()
    assert (row["name"], row["kind"], row["status"]) == ("I'm a server span", "server", "unset")
    assert row["parent_span_id"].hex() == "eee19b7ec3c1b173"
    assert row["duration_seconds"] == Decimal(1)
    assert json.loads(row["attributes"]) == {"my.span.attr": "some value"}
    assert json.loads(row["resource_attributes"]) == {"service.name": "my.service"}


@pytest.mark.parametrize("signal", ["metrics", "logs", "events"])
def test_other_signals_are_refused_by_name(otlp: Path, signal: str) -> None:
    with pytest.raises(BodyError, match="no resourceSpans") as raised:
        otlp_json.to_protobuf((otlp / "opentelemetry-proto/examples" / f"{signal}.json").read_bytes())
    assert raised.value.reason == "no_resource_spans"


def test_json_and_json_lines_and_protobuf_of_one_source_give_the_same_spans(otlp: Path) -> None:
    folder = otlp / "otlp2parquet/testdata"
    from_json = decode_json((folder / "trace.json").read_bytes()).spans
    assert from_json.equals(decode((folder / "trace.pb").read_bytes()).spans)
    lines = [line for _, line in otlp_json.lines((folder / "traces.jsonl").read_bytes().splitlines())]
    from_lines = pa.concat_tables([decode_json(line).spans for line in lines])
    from_protobuf = decode((folder / "traces.pb").read_bytes()).spans
    assert from_lines.num_rows == 19
    order = [("trace_id", "ascending"), ("span_id", "ascending")]
    assert from_lines.sort_by(order).equals(from_protobuf.sort_by(order))
    reference = pq.read_table(folder / "parquet" / "traces.parquet").to_pylist()
    ours = {(row["trace_id"].hex(), row["span_id"].hex()): row for row in from_lines.to_pylist()}
    assert set(ours) == {(row["TraceId"], row["SpanId"]) for row in reference}
    for row in reference:
        mine = ours[row["TraceId"], row["SpanId"]]
        assert (mine["name"], mine["service_name"], mine["scope_name"]) == (
            row["SpanName"],
            row["ServiceName"],
            row["ScopeName"],
        )
        assert mine["start_time"] == row["Timestamp"]
        assert (mine["parent_span_id"] or b"").hex() == (row["ParentSpanId"] or "")


def test_base64_ids_read_as_protobufs_own_json_reader_reads_them(otlp: Path) -> None:
    body = (otlp / "otlp2parquet/testdata/trace.json").read_bytes()
    reference = json_format.Parse(body, ExportTraceServiceRequest()).SerializeToString()
    assert decode(reference).spans.equals(decode_json(body).spans)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("trace_invalid_base64", "invalid_trace_id"),
        ("trace_mixed_encoding", "invalid_trace_id"),
        ("trace_invalid_kind", "unknown_enum"),
    ],
)
def test_invalid_spans_are_refused_with_a_reason(otlp: Path, name: str, reason: str) -> None:
    (refusal,) = json_refusals((otlp / "otlp2parquet/testdata/invalid" / f"{name}.json").read_bytes())
    assert (refusal.reason, refusal.count) == (reason, 1)
    assert "resourceSpans[0].scopeSpans[0].spans[0] ('test-span')" in refusal.detail


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("malformed", "malformed_json"),
        ("log_invalid_severity", "no_resource_spans"),
        ("metrics_invalid_temporality", "no_resource_spans"),
    ],
)
def test_invalid_bodies_are_refused_with_a_reason(otlp: Path, name: str, reason: str) -> None:
    with pytest.raises(BodyError) as raised:
        otlp_json.to_protobuf((otlp / "otlp2parquet/testdata/invalid" / f"{name}.json").read_bytes())
    assert raised.value.reason == reason


def test_one_resource_a_span_is_read_2621_times(otlp: Path) -> None:
    body = (otlp / "otlp2records/testdata/traces_large.pb").read_bytes()
    request = ExportTraceServiceRequest.FromString(body)
    source = Counter(
        (span.trace_id.hex(), span.span_id.hex())
        for group in request.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    )
    decoded = decode(body)
    assert decoded.rows == 2621
    assert ids(decoded) == source
    services = [
        next(a.value.string_value for a in group.resource.attributes if a.key == "service.name")
        for group in request.resource_spans
    ]
    assert decoded.spans.column("service_name").to_pylist() == services


@pytest.mark.parametrize(
    "name",
    [
        "otlp2records/tests/fixtures/sample_otlp_traces.json",
        "opentelemetry-rust/opentelemetry-otlp/tests/integration_test/expected/traces.json",
        "opentelemetry-rust/opentelemetry-otlp/tests/integration_test/expected/failed_traces.json",
        "opentelemetry-rust/opentelemetry-otlp/tests/integration_test/expected/serialized_traces.json",
        "fluent-bit/tests/integration/scenarios/in_opentelemetry/tests/data_files/test_traces_001.in.json",
        "fluent-bit/tests/integration/scenarios/in_opentelemetry/tests/data_files/test_traces_002.in.json",
    ],
)
def test_json_of_several_sdks_keeps_every_id(otlp: Path, name: str) -> None:
    body = (otlp / name).read_bytes()
    source = source_ids(json.loads(body))
    assert source
    assert ids(decode_json(body)) == source


@pytest.mark.parametrize(
    ("name", "spans"),
    [
        ("processor/snapshotprocessor/testdata/traces/bindplane-traces.yaml", 178),
        ("receiver/telemetrygeneratorreceiver/testdata/expected_otlp/traces/bpop_traces.yaml", None),
        ("receiver/telemetrygeneratorreceiver/testdata/expected_otlp/traces/bpop_traces2.yaml", None),
    ],
)
def test_the_collectors_yaml_is_otlp_json_in_other_clothes(otlp: Path, name: str, spans: int | None) -> None:
    document = yaml.safe_load((otlp / "bindplane-otel-collector" / name).read_text())
    decoded = decode_json(json.dumps(document).encode())
    assert ids(decoded) == source_ids(document)
    if spans is not None:
        assert decoded.rows == spans


def test_the_snapshot_report_holds_the_same_spans_as_the_yaml(otlp: Path) -> None:
    folder = otlp / "bindplane-otel-collector/processor/snapshotprocessor/testdata"
    report = json.loads((folder / "snapshot/traces-report.json").read_bytes())["telemetry_payload"]
    document = yaml.safe_load((folder / "traces/bindplane-traces.yaml").read_text())
    assert ids(decode_json(json.dumps(report).encode())) == source_ids(document)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("traces_simple", 3),
        ("traces_nulls", 3),
        ("traces_deep_nesting", 1),
        ("traces_large_attrs", 1),
        ("single_trace", 1),
        ("multifile_valid_traces", 1),
        ("empty", 0),
        ("whitespace", 0),
    ],
)
def test_json_lines_of_duckdb_otlp_decode(otlp: Path, name: str, rows: int) -> None:
    with (otlp / "duckdb-otlp/test/data" / f"{name}.jsonl").open("rb") as stream:
        lines = [line for _, line in otlp_json.lines(stream)]
    decoded = [decode_json(line) for line in lines]
    assert sum(one.rows for one in decoded) == rows
    assert ids(*decoded) == sum((source_ids(json.loads(line)) for line in lines), Counter())


def test_deep_nesting_keeps_twenty_events_and_ten_links(otlp: Path) -> None:
    body = (otlp / "duckdb-otlp/test/data/traces_deep_nesting.jsonl").read_bytes()
    (span,) = source_spans(json.loads(body))
    (row,) = decode_json(body).spans.to_pylist()
    events, links = json.loads(row["events"]), json.loads(row["links"])
    assert [event["name"] for event in events] == [event["name"] for event in span["events"]]
    assert [len(event["attributes"]) for event in events] == [len(event["attributes"]) for event in span["events"]]
    assert [link["trace_id"] for link in links] == [link["traceId"].lower() for link in span["links"]]
    assert (len(events), len(links)) == (20, 10)


def test_each_bad_line_is_refused_alone(otlp: Path) -> None:
    with (otlp / "duckdb-otlp/test/data/malformed.jsonl").open("rb") as stream:
        numbered = list(otlp_json.lines(stream))
    reasons = {}
    for number, line in numbered:
        outcome = body_reason(line)
        reasons[number] = outcome if isinstance(outcome, str) else outcome[0].reason
    assert reasons == {1: "no_resource_spans", 2: "malformed_json", 3: "invalid_trace_id", 4: "malformed_json"}


def test_protobuf_of_other_signals_gives_refusals_and_no_rows(otlp: Path) -> None:
    for signal in ("logs", "metrics"):
        decoded = decode((otlp / "duckdb-otlp/test/data" / f"otlp_{signal}.pb").read_bytes())
        assert decoded.rows == 0
        assert sum(refusal.count for refusal in decoded.refused) == 1
    assert decode((otlp / "duckdb-otlp/test/data/otlp_traces.pb").read_bytes()).rows == 1
