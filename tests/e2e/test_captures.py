"""Recordings of a real vLLM under overload, imported, against what the clients of those very requests saw.

The client's time is never shorter than the server's. The rest is time no span covers: the way to the front end (it is
in the span's start time against the client's clock, since both ran on one machine) and the way back, on a machine
whose two servers left the client next to no processor: a busy client reads its first byte late.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from e2e.product import import_files, query

RECORDINGS = ("baseline", "light", "lightshard", "prio", "seqs4", "sharded", "smallkv")
WARM_UP_PROMPTS = (76, 82, 86, 118, 180, 558)
"""Prompt tokens of the six requests sent to each server before the load; the clients' record leaves them out."""
GOLDEN = Path(__file__).resolve().parent.parent / "golden" / "client_agreement.txt"


@dataclass(frozen=True)
class Recording:
    """``rows`` of the lake by request id; ``answered`` and ``failed`` requests of the clients' own record."""

    name: str
    rows: dict[str, dict[str, Any]]
    answered: list[dict[str, Any]]
    failed: list[dict[str, Any]]
    ports: dict[str, str]


@pytest.fixture(scope="module")
def recordings(captures: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    return {name: _load(captures / name, tmp_path_factory.mktemp("lake") / name) for name in RECORDINGS}


def _load(folder: Path, lake: Path) -> Recording:
    import_files(lake, sorted((folder / "otlp").glob("*.pb.gz")))
    rows = query(
        lake,
        "select request_id, shard, bucket, service_instance_id, quality, prompt_tokens, completion_tokens,"
        " epoch_us(start_time) / 1e6 as start, time_to_first_token_seconds::double as ttft,"
        " request_duration_seconds::double as duration, (frontend_seconds + queue_seconds + prefill_seconds"
        " + decode_seconds + residual_seconds = request_duration_seconds) as exact,"
        " (frontend_seconds + residual_seconds)::double as outside from requests",
    )
    by_id = {row["request_id"]: row for row in rows}
    assert len(by_id) == len(rows), "a request is in the lake twice"
    seen = [json.loads(line) for line in gzip.decompress((folder / "client.jsonl.gz").read_bytes()).splitlines()]
    servers = [line.split("|") for line in (folder / "args.txt").read_text().splitlines() if "|" in line]
    return Recording(
        folder.name,
        by_id,
        [request for request in seen if not request["err"]],
        [request for request in seen if request["err"]],
        {port: name for name, _, port, *_ in servers},
    )


def _row(recording: Recording, request: dict[str, Any]) -> dict[str, Any]:
    return recording.rows[f"{request['id']}-0"]


@pytest.mark.parametrize("name", RECORDINGS)
def test_every_request_is_in_the_lake_and_only_warm_ups_are_beyond(recordings: dict[str, Recording], name: str) -> None:
    recording = recordings[name]
    expected = {f"{request['id']}-0" for request in recording.answered}
    assert expected <= recording.rows.keys()
    beyond = [recording.rows[request_id] for request_id in recording.rows.keys() - expected]
    assert {row["service_instance_id"] for row in beyond} == set(recording.ports.values())
    for server in recording.ports.values():
        prompts = sorted(row["prompt_tokens"] for row in beyond if row["service_instance_id"] == server)
        assert prompts == list(WARM_UP_PROMPTS)
    assert all(request["id"] is None for request in recording.failed), "a failed request reached the server after all"


@pytest.mark.parametrize("name", RECORDINGS)
def test_tokens_bucket_and_shard_are_what_the_client_asked_for(recordings: dict[str, Recording], name: str) -> None:
    recording = recordings[name]
    for request in recording.answered:
        row = _row(recording, request)
        assert (row["prompt_tokens"], row["completion_tokens"]) == (request["prompt"], request["out"])
        assert row["bucket"] == request["bucket"]
        assert row["shard"] == row["service_instance_id"] == recording.ports[request["url"].rsplit(":", 1)[1]]
        assert row["quality"] is None
        assert row["exact"] is True
        assert row["outside"] > 0, "the engine core was busy with a request for longer than the request lasted"


@pytest.mark.parametrize("name", RECORDINGS)
def test_times_agree_with_the_client_within_the_part_no_span_covers(
    recordings: dict[str, Recording], name: str
) -> None:
    gaps = _gaps(recordings[name])
    limits = (0.040, 0.450, 3.6)
    for key in ("ttft", "duration"):
        gap = gaps[key]
        assert gap.min() > 0, f"a client saw its {key} before the server did"
        assert np.less(np.percentile(gap, [50, 95, 100]), limits).all(), (
            f"{key}: median, 95 % or longest gap over {limits} s"
        )
    # The way there is in the span's own start time, so only the way back is unexplained.
    assert gaps["way there"].min() > 0
    assert gaps["ttft, way back"].min() > 0
    assert gaps["duration, way back"].min() > 0
    assert np.median(gaps["ttft, way back"]) < 0.010
    assert np.median(gaps["duration, way back"]) < 0.012


def test_the_report_of_the_differences_is_up_to_date(
    recordings: dict[str, Recording], request: pytest.FixtureRequest
) -> None:
    lines = [
        "Client minus lake, milliseconds.",
        f"{'recording':<11}{'what':<20}{'requests':>9}{'min':>8}{'median':>8}{'p95':>8}{'p99':>8}{'max':>8}",
    ]
    for name, recording in recordings.items():
        for what, gap in _gaps(recording).items():
            figures = "".join(f"{value * 1e3:8.1f}" for value in np.percentile(gap, [0, 50, 95, 99, 100]))
            lines.append(f"{name:<11}{what:<20}{len(gap):>9}{figures}")
    report = "\n".join(lines) + "\n"
    if request.config.getoption("--rewrite-golden"):
        GOLDEN.write_text(report)
    assert report == GOLDEN.read_text()


def _gaps(recording: Recording) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Seconds by which the client's times exceed the lake's, and their two parts."""
    pairs = [(request, _row(recording, request)) for request in recording.answered]
    ttft = np.array([request["ttft"] - row["ttft"] for request, row in pairs])
    duration = np.array([request["e2e"] - row["duration"] for request, row in pairs])
    there = np.array([row["start"] - request["wall"] for request, row in pairs])
    return {
        "ttft": ttft,
        "duration": duration,
        "way there": there,
        "ttft, way back": ttft - there,
        "duration, way back": duration - there,
    }
