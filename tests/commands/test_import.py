"""`vllm-slo import` on real files: every form gives the same rows, however often and however interrupted."""

from __future__ import annotations

import csv
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from importing import content, otlp_json, renumbered, rows, write_forms
from probe_spans import Request as ProbeRequest
from probe_spans import body as probe_body
from probe_spans import event, sample
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.drain import Drain
from vllm_slo.analytics.lake import Lake
from vllm_slo.commands import loading
from vllm_slo.commands.group import group
from vllm_slo.commands.loading import File, Loading
from vllm_slo.exporters.otlp.decoded import DecodeSettings
from vllm_slo.exporters.schema import ENGINE_SAMPLES, REQUESTS

BATCHES = (
    "rtxpro-llama8b-tp1/batch-000.pb",
    "rtxpro-qwen30b-dp2/batch-000.pb.gz",
    "rtxpro-qwen32b-tp2/batch-000.pb",
)


def slo(lake: Path, *arguments: str | Path, stdin: bytes | None = None) -> Result:
    """One command line, in this process."""
    return CliRunner().invoke(group, ["--lake", str(lake), *map(str, arguments)], input=stdin)


def imported(lake: Path, *arguments: str | Path) -> dict[str, Any]:
    """The sums of what `import --json` prints."""
    done = slo(lake, "import", "--json", *arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    outcomes = json.loads(done.stdout)
    return {
        name: sum(outcome[name] for outcome in outcomes)
        for name in ("requests", "spans", "engine_samples", "events", "duplicates", "resumed")
    } | {"refused": sum(sum(outcome["refused"].values()) for outcome in outcomes)}


@pytest.fixture(scope="module")
def bodies(public_data: Path) -> list[bytes]:
    """The 900 requests of vllm033-derived, a body a server."""
    folder = public_data / "2_otlp" / "vllm033-derived"
    read = [(folder / name).read_bytes() for name in BATCHES]
    return [gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body for body in read]


@pytest.fixture(scope="module")
def forms(bodies: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_forms(bodies, tmp_path_factory.mktemp("forms"))


@pytest.fixture(scope="module")
def reference(forms: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    lake = tmp_path_factory.mktemp("reference") / "lake"
    assert imported(lake, forms["protobuf"])["requests"] == 900
    return lake


@pytest.mark.parametrize(
    "form",
    [
        "protobuf gzip",
        "json",
        "json gzip",
        "json with a byte order mark",
        "json lines",
        "json lines gzip",
        "length-delimited",
        "length-delimited gzip",
        "length-delimited zstd",
    ],
)
def test_every_form_gives_the_same_lake(form: str, forms: dict[str, Path], reference: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    assert imported(lake, forms[form]) == {
        "requests": 900,
        "spans": 0,
        "engine_samples": 0,
        "events": 0,
        "duplicates": 0,
        "resumed": 0,
        "refused": 0,
    }
    assert content(lake) == content(reference)


def test_the_public_files_as_they_are_give_the_published_figures(public_data: Path, tmp_path: Path) -> None:
    folder = public_data / "2_otlp" / "vllm033-derived"
    lake, other = tmp_path / "lake", tmp_path / "other"
    assert imported(lake, *(folder / name for name in BATCHES))["requests"] == 900
    assert imported(other, folder / "all.collector-form.jsonl")["requests"] == 900
    with (folder / "expected.csv").open() as file:
        expected = {(row["instance"], row["request_id"]): row for row in csv.DictReader(file)}
    columns = {
        "ttft_s": "time_to_first_token_seconds",
        "e2e_s": "request_duration_seconds",
        "queue_s": "queue_seconds",
        "prefill_s": "prefill_seconds",
        "decode_s": "decode_seconds",
    }
    for each in (lake, other):
        found = rows(each, "from requests")
        assert len(found) == len(expected) == 900
        for row in found:
            known = expected[row["service_instance_id"], row["request_id"]]
            assert row["prompt_tokens"] == int(known["prompt_tokens"])
            assert row["completion_tokens"] == int(known["completion_tokens"])
            for name, column in columns.items():
                assert abs(row[column] - Decimal(known[name])) <= Decimal("5e-10"), (name, row[column], known[name])


def test_a_repeated_import_adds_nothing(forms: dict[str, Path], reference: Path, tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    imported(lake, forms["json lines"])
    again = imported(lake, forms["json lines"])
    assert (again["requests"], again["resumed"]) == (0, 1)
    same_content = tmp_path / "renamed"
    same_content.write_bytes(forms["json lines"].read_bytes())
    assert imported(lake, same_content)["resumed"] == 1
    other_form = imported(lake, forms["protobuf gzip"])
    assert (other_form["requests"], other_form["duplicates"]) == (0, 900)
    assert content(lake) == content(reference)


def test_standard_input_is_a_file_too(forms: dict[str, Path], reference: Path, tmp_path: Path) -> None:
    done = slo(tmp_path / "lake", "import", "-", stdin=forms["protobuf gzip"].read_bytes())
    assert done.exit_code == 0
    assert content(tmp_path / "lake") == content(reference)


def test_a_folder_is_every_file_below_it_without_hidden_ones(
    bodies: list[bytes], reference: Path, tmp_path: Path
) -> None:
    for number, body in enumerate(bodies):
        deep = tmp_path / "in" / f"part{number}"
        deep.mkdir(parents=True)
        (deep / "spans").write_bytes(body)
        (deep / ".hidden").write_bytes(b"nothing that is read")
    lake = tmp_path / "lake"
    assert imported(lake, tmp_path / "in")["requests"] == 900
    assert len(rows(lake, "from requests")) == len(rows(reference, "from requests"))


@pytest.mark.parametrize("source_is", ["an export", "a lake"])
def test_an_export_and_another_lake_import_to_the_same_rows(source_is: str, reference: Path, tmp_path: Path) -> None:
    lake, source = tmp_path / "lake", reference
    if source_is == "an export":
        source = tmp_path / "export"
        assert slo(reference, "export", "--parquet", source).exit_code == 0
    assert imported(lake, source)["requests"] == 900
    assert content(lake) == content(reference)
    again = imported(lake, source)
    assert (again["requests"], again["duplicates"], again["refused"]) == (0, 0, 0)


def test_rows_count_as_received_at_the_latest_end_of_their_part(reference: Path) -> None:
    (found,) = rows(reference, "select max(end_time) as latest, list(distinct received_time) as received from requests")
    assert found["received"] == [found["latest"]]


def test_prompt_text_is_dropped_and_counted(bodies: list[bytes], tmp_path: Path) -> None:
    request = ExportTraceServiceRequest.FromString(bodies[0])
    secret = "the words of a user"
    for span in request.resource_spans[0].scope_spans[0].spans:
        span.attributes.add(key="gen_ai.prompt").value.string_value = secret
    file = tmp_path / "spans"
    file.write_text(otlp_json(request.SerializeToString()))
    done = slo(tmp_path / "lake", "import", file)
    assert done.exit_code == 0
    assert "300 attributes gen_ai.prompt* dropped" in done.stderr
    assert not any(secret.encode() in path.read_bytes() for path in (tmp_path / "lake").rglob("*") if path.is_file())
    assert "words of a user" not in json.dumps(rows(tmp_path / "lake", "from requests"), default=str)


def test_prompt_text_is_dropped_from_parquet_too(reference: Path, tmp_path: Path) -> None:
    import pyarrow as pa

    assert slo(reference, "export", "--parquet", tmp_path / "export").exit_code == 0
    table = pq.read_table(tmp_path / "export" / "requests.parquet")
    text = pa.array(
        ['{"gen_ai.completion.0.content": "secret words", "kept": {"input.value": "secret", "a": 1}}'] * 900
    )
    place = table.schema.get_field_index("attributes")
    pq.write_table(table.set_column(place, "attributes", text), tmp_path / "changed")
    done = slo(tmp_path / "lake", "import", "--json", tmp_path / "changed")
    assert json.loads(done.stdout)[0]["dropped_attributes"] == {"gen_ai.completion*": 900, "input.value": 900}
    assert {row["attributes"] for row in rows(tmp_path / "lake", "from requests")} == {'{"kept":{"a":1}}'}


def test_refused_parts_are_named_and_their_neighbours_kept(bodies: list[bytes], tmp_path: Path) -> None:
    file = tmp_path / "spans"
    file.write_text("\n".join(["{broken}", otlp_json(bodies[0]), '{"resourceLogs": []}']))
    done = slo(tmp_path / "lake", "import", file)
    assert done.exit_code == 0
    assert len(rows(tmp_path / "lake", "from requests")) == 300
    assert f"1 refused as malformed_json; first: {file}: line 1" in done.stderr
    assert f"1 refused as no_resource_spans; first: {file}: line 3" in done.stderr
    strict = slo(tmp_path / "other", "import", "--strict", file)
    assert strict.exit_code == 1
    assert "2 refused, and --strict allows none" in str(strict.exception)


def test_a_damaged_body_between_good_ones_costs_only_itself(bodies: list[bytes], tmp_path: Path) -> None:
    broken = b"\x0a\xff\xff\xff\x7f"
    file = tmp_path / "spans"
    file.write_bytes(b"".join(len(body).to_bytes(4, "big") + body for body in (bodies[0], broken, bodies[2])))
    done = slo(tmp_path / "lake", "import", file)
    assert done.exit_code == 0
    assert len(rows(tmp_path / "lake", "from requests")) == 600
    assert "refused as malformed_protobuf; first" in done.stderr
    assert "record 2" in done.stderr


@pytest.mark.parametrize(
    ("content_", "reason"),
    [
        (b"\x00\x01\x02 no form at all", "unknown_form"),
        (b"PAR1 but no Parquet", "malformed_parquet"),
        (gzip.compress(b'{"resourceSpans": []}' * 999)[:-9], "malformed_gzip"),
        (b'{"resourceSpans": [', "malformed_json"),
        (b"\x00\x00\x00\x20\x0atruncated", "truncated"),
        (b'{"date": "20261130-120000", "request_throughput": 1.0}', "not_detailed"),
    ],
)
def test_a_file_of_which_nothing_can_be_read_exits_with_1(content_: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(content_)
    done = slo(tmp_path / "lake", "import", tmp_path / "file")
    assert done.exit_code == 1
    assert f"refused as {reason}" in done.stderr
    assert "nothing could be read" in str(done.exception)


def test_empty_files_and_bodies_without_spans_are_no_fault(tmp_path: Path) -> None:
    for name, data in (("empty", b""), ("blank", b" \n\n"), ("none", b'{"resourceSpans": []}')):
        (tmp_path / name).write_bytes(data)
        assert imported(tmp_path / "lake", tmp_path / name)["refused"] == 0


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    done = slo(tmp_path / "lake", "import", tmp_path / "absent")
    assert done.exit_code == 1
    assert "absent: no such file or folder" in str(done.exception)


def test_spans_of_the_future_are_marked_and_do_not_move_the_receipt_of_the_others(
    bodies: list[bytes], tmp_path: Path
) -> None:
    request = ExportTraceServiceRequest.FromString(bodies[0])
    first = request.resource_spans[0].scope_spans[0].spans[0]
    first.start_time_unix_nano = int((time.time() + 40 * 86_400) * 1e9)
    first.end_time_unix_nano = first.start_time_unix_nano + 1
    (tmp_path / "spans").write_bytes(request.SerializeToString())
    imported(tmp_path / "lake", tmp_path / "spans")
    found = rows(
        tmp_path / "lake",
        "select quality, count(*)::bigint n, max(received_time) as at, max(day) as day from requests group by 1",
    )
    by_quality = {row["quality"]: row for row in found}
    assert by_quality["clock_skew"]["n"] == 1
    assert by_quality[None]["n"] == 299
    assert by_quality["clock_skew"]["at"] == by_quality[None]["at"]
    assert by_quality["clock_skew"]["day"] == by_quality[None]["at"].date()


_IN_SMALL_CHUNKS = """
import sys
import vllm_slo.commands.loading as loading
loading.CHUNK_BYTES = 60_000
from vllm_slo.__main__ import run
sys.exit(run(sys.argv[1:]))
"""


def test_an_import_that_is_killed_and_repeated_gives_the_same_lake(bodies: list[bytes], tmp_path: Path) -> None:
    many = [renumbered(_part(body, part), number) for number in range(3) for body in bodies for part in range(5)]
    file = tmp_path / "spans"
    file.write_bytes(b"".join(len(body).to_bytes(4, "big") + body for body in many))
    command = [sys.executable, "-c", _IN_SMALL_CHUNKS]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    began = time.monotonic()
    subprocess.run([*command, "--lake", str(whole), "import", str(file)], check=True, capture_output=True)
    seconds = time.monotonic() - began
    dice = random.Random(5)
    kills = 0
    for _ in range(12):
        process = subprocess.Popen([*command, "--lake", str(killed), "import", str(file)], stdout=subprocess.DEVNULL)
        try:
            process.wait(seconds * dice.uniform(0.3, 0.9))
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            kills += 1
        process.wait()
    done = subprocess.run([*command, "--lake", str(killed), "import", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert kills >= 3
    assert len(rows(whole, "from requests")) == 2700
    assert content(killed) == content(whole)


def _part(body: bytes, part: int) -> bytes:
    """A fifth of the spans of a body."""
    request = ExportTraceServiceRequest.FromString(body)
    for group_ in request.resource_spans:
        for scope in group_.scope_spans:
            kept = list(scope.spans)[part::5]
            del scope.spans[:]
            scope.spans.extend(kept)
    return bytes(request.SerializeToString())


def _of_the_probe(folder: Path) -> Path:
    """A recording of a server with the probe: records of 60 requests, each record in a body of its own, samples."""
    start = 1_796_040_000_000_000_000
    requests = [ProbeRequest(f"cmpl-{n}-0", start + n * 10**9) for n in range(60)]
    spans = [made for one in requests for made in (one.frontend(), one.engine(), one.stock())]
    spans += [sample(start + n * 10**9, requests_running=n) for n in range(20)] + [event(start, "started")]
    file = folder / "probe"
    file.write_bytes(b"".join(len(body).to_bytes(4, "big") + body for body in (probe_body([one]) for one in spans)))
    return file


def _probe_rows(lake: Path) -> list[tuple[Any, ...]]:
    words = "replace(records, '+stock', '') records"
    found = rows(lake, f"select source, {words}, quality, count(*) n from requests group by all order by all")
    return [tuple(row.values()) for row in found]


def test_records_of_one_request_in_two_chunks_of_a_file_are_one_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "CHUNK_BYTES", 2500)
    file = _of_the_probe(tmp_path)
    lake = tmp_path / "lake"
    told = imported(lake, file)
    assert (told["requests"], told["engine_samples"], told["events"], told["duplicates"]) == (120, 20, 1, 0)
    assert _probe_rows(lake) == [
        ("probe", "engine+frontend+edge", None, 60),
        ("stock", "stock", "superseded", 60),
    ]
    assert imported(lake, file)["requests"] == 0
    for chunks in (1, 5, 20, 50):
        cut = tmp_path / f"cut{chunks}"
        _interrupted(cut, file, chunks, monkeypatch)
        imported(cut, file)
        assert _probe_rows(cut) == _probe_rows(lake), chunks


def _interrupted(lake: Path, file: Path, chunks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """An import that ends after so many chunks."""
    with monkeypatch.context() as patch:
        whole = loading.chunks
        patch.setattr(loading, "chunks", lambda items: _first(whole(items), chunks))
        opened = Lake.open(lake)
        now = datetime(2026, 12, 30, tzinfo=UTC)
        unfinished = Loading(opened, Drain(opened, Buckets()), DecodeSettings(), now, ZoneInfo("UTC"))
        with pytest.raises(KeyboardInterrupt):
            unfinished.load([File(file, "p")])


def _first(chunks: Iterator[Any], count: int) -> Iterator[Any]:
    yield from islice(chunks, count)
    raise KeyboardInterrupt


@pytest.mark.parametrize("source_is", ["an export", "a lake"])
def test_rows_of_the_probe_survive_an_export(source_is: str, tmp_path: Path) -> None:
    lake, again = tmp_path / "lake", tmp_path / "again"
    imported(lake, _of_the_probe(tmp_path))
    source = lake
    if source_is == "an export":
        source = tmp_path / "export"
        assert slo(lake, "export", "--parquet", source).exit_code == 0
    told = imported(again, source)
    assert (told["requests"], told["engine_samples"], told["events"], told["refused"]) == (120, 20, 1, 0)
    assert content(again) == content(lake)
    for table in ("requests", "engine_samples", "events"):
        sql = f"from {table} order by all"
        assert rows(again, sql) == rows(lake, sql)


def test_an_export_of_the_first_schema_version_is_imported(reference: Path, tmp_path: Path) -> None:
    assert slo(reference, "export", "--parquet", tmp_path / "export").exit_code == 0
    for table in (REQUESTS, ENGINE_SAMPLES):
        file = tmp_path / "export" / f"{table.name}.parquet"
        if file.exists():
            newer = [c.name for c in table.columns if c.since > 1]
            pq.write_table(pq.read_table(file).drop_columns(newer), file)
    assert imported(tmp_path / "lake", tmp_path / "export")["requests"] == 900
    assert rows(tmp_path / "lake", 'select count(*) "all", count(records) records, count(lora) lora from requests') == [
        {"all": 900, "records": 0, "lora": 0}
    ]
