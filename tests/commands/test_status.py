"""`vllm-slo status` and `vllm-slo demo`: what they say and that they can be repeated."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from click.testing import CliRunner, Result

import lake_rows
from fixtures.probe_lake import VERSION, Told, fill, samples, told
from importing import content, rows
from lake_rows import NOON, request
from vllm_slo.analytics import rollup
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.lake import Lake
from vllm_slo.commands.demo import default_lake
from vllm_slo.commands.group import group
from vllm_slo.exporters.receiver.segment import Record
from vllm_slo.exporters.receiver.spool import Spool
from vllm_slo.exporters.receiver.tally import SPANS_REFUSED, Tally
from vllm_slo.exporters.schema import ENGINE_SAMPLES, REQUESTS

SHARDS = {"general-0": 731, "general-1": 721, "long-0": 124, "short-0": 1328}
"""Requests that each server of the recording finished."""


def slo(*arguments: str | Path) -> Result:
    """One command line, in this process."""
    return CliRunner().invoke(group, [*map(str, arguments)])


def report(lake: Path) -> dict[str, Any]:
    """What `status --json` prints."""
    done = slo("--lake", lake, "status", "--json")
    assert done.exit_code == 0, done.exception
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def lake(tmp_path: Path) -> Path:
    """The lake of the demo."""
    done = slo("demo", "--no-app", "--lake", tmp_path / "lake")
    assert done.exit_code == 0, done.exception
    return tmp_path / "lake"


def test_the_demo_is_the_recording_and_can_be_loaded_again(lake: Path) -> None:
    before = content(lake)
    again = slo("demo", "--no-app", "--lake", lake)
    assert "loaded before" in again.stdout
    assert content(lake) == before
    counted = rows(lake, "select shard, count(*)::bigint n from requests where quality is null group by all")
    assert {row["shard"]: row["n"] for row in counted} == SHARDS
    assert {row["model"] for row in rows(lake, "select distinct model from requests")} == {"tiny-llama"}
    kinds = [row["kind"] for row in rows(lake, "select kind from events order by 1")]
    assert kinds == ["configuration"] * 4 + ["deploy"]


def test_the_demo_shows_what_its_readme_says(lake: Path) -> None:
    found = rows(
        lake,
        "select start_time < timestamptz '2026-12-01 04:40:00+00' as before, "
        "quantile_cont(request_duration_seconds, 0.99)::double as p99 "
        "from requests where bucket = 'short' and quality is null group by 1 order by 1 desc",
    )
    assert [row["before"] for row in found] == [True, False]
    assert found[0]["p99"] > 5 * found[1]["p99"]
    assert found[1]["p99"] < 3
    (most,) = rows(
        lake,
        "select sum(queue_token_budget_seconds)::double / sum(queue_seconds)::double as share from requests "
        "where shard like 'general-%' and bucket = 'short' and queue_seconds > 1",
    )
    assert most["share"] > 0.5


def test_the_demo_serves_its_pages_and_stops_when_asked(tmp_path: Path) -> None:
    pytest.importorskip("streamlit")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "vllm_slo", "demo", "--no-browser", "--port", str(port)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(2)]
            assert "3024 requests loaded" in lines[0]
            assert lines[1] == f"pages  http://127.0.0.1:{port}\n"
            with urlopen(f"http://127.0.0.1:{port}/_stcore/health", timeout=10) as answer:
                assert answer.status == 200
        finally:
            process.send_signal(2)
        assert process.wait(30) == 130
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and _answers(port):
        time.sleep(0.1)
    assert not _answers(port)
    assert (tmp_path / "vllm-slo" / "demo-2" / "requests").is_dir()


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_the_lake_of_the_demo_lies_in_the_cache_of_the_user() -> None:
    assert default_lake({"HOME": "/h"}) == Path("/h/.cache/vllm-slo/demo-2")
    assert default_lake({"HOME": "/h", "XDG_CACHE_HOME": "/c"}) == Path("/c/vllm-slo/demo-2")


def test_status_counts_tables_quality_and_coverage(lake: Path) -> None:
    found = report(lake)
    assert {name: table["rows"] for name, table in found["tables"].items() if name != "rollups"} == {
        "requests": 3024,
        "spans": 0,
        "engine_samples": 178,
        "events": 5,
    }
    assert found["tables"]["requests"]["last_commit"].startswith("20")
    assert found["quality"][0]["reason"] == "counts"
    assert [each["all_time"] for each in found["quality"]] == [sum(SHARDS.values()), 3024 - sum(SHARDS.values())]
    assert found["last_request_end"].startswith("2026-12-01T04:43:")
    assert {each["instance"]: each["received"] for each in found["coverage"]} == SHARDS
    assert {each["finished"] for each in found["coverage"]} == {None}, "nobody scraped /metrics: unknown, not complete"
    everything = ["engine", "frontend", "edge"]
    assert {each["name"]: each["running"] for each in found["servers"]} == dict.fromkeys(SHARDS, everything)
    assert found["spool"]["owner"] is None
    shown = slo("--lake", lake, "status").stdout
    assert "no receiver runs; 0 segments, 0 B wait" in shown
    assert "general-0" in shown


def test_status_reads_the_spool_of_a_running_receiver_without_touching_it(lake: Path) -> None:
    spool = Spool.open(lake / "spool")
    try:
        spool.append([Record(1, b"\n\x00" * 500)])
        tally = Tally()
        tally.add(SPANS_REFUSED, "grpc/invalid_trace_id", 7)
        tally.save(lake / "spool" / "counters.json")
        found = report(lake)["spool"]
        assert (found["waiting_segments"], found["owner"]) == (1, os.getpid())
        assert found["waiting_bytes"] > 1000
        assert found["counts"] == {SPANS_REFUSED: {"grpc/invalid_trace_id": 7}}
        shown = slo("--lake", lake, "status").stdout
        assert f"receiver runs (process {os.getpid()}); 1 segments, 1.0 kB wait" in shown
        assert "spans refused grpc/invalid_trace_id" in shown
        number = spool.seal()
        assert number is not None
        spool.quarantine(number, "it cannot be decoded")
        (reason,) = report(lake)["spool"]["quarantined"].values()
        assert reason == "it cannot be decoded"
        assert "quarantined" in slo("--lake", lake, "status").stdout
    finally:
        spool.close()


def test_status_of_an_empty_lake_has_no_row_and_no_fault(tmp_path: Path) -> None:
    (tmp_path / "none").write_bytes(b"")
    assert slo("--lake", tmp_path / "lake", "import", tmp_path / "none").exit_code == 0
    done = subprocess.run(
        [sys.executable, "-m", "vllm_slo", "--lake", str(tmp_path / "lake"), "status"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "newest request ended never" in done.stdout
    assert "none yet" in done.stdout


def test_an_instance_whose_coverage_is_unknown_says_why(tmp_path: Path) -> None:
    made = Lake.open(tmp_path / "lake")
    unnamed = lake_rows.rows(REQUESTS, [request(0, service_instance_id=None)])
    made.append("requests", unnamed)
    made.append("rollups", rollup.rows(unnamed, Buckets()))
    counter = [{"time": NOON + timedelta(seconds=at), "requests_finished_total": at} for at in (0.0, 5.0)]
    scraped = [{**sample, "source": "scrape", "service_instance_id": "host:8000"} for sample in counter]
    made.append("engine_samples", lake_rows.rows(ENGINE_SAMPLES, scraped))
    shown = slo("--lake", tmp_path / "lake", "status").stdout
    assert re.search(r"host:8000 +0 +unknown +none seen *\n", shown)
    assert "host:8000 is unknown: no span names this instance" in shown


def test_requests_that_only_vllm_knows_of_are_told(tmp_path: Path) -> None:
    made = Lake.open(tmp_path / "lake")
    counter = [{"time": NOON + timedelta(seconds=at), "requests_finished_total": at / 10} for at in (0.0, 50.0, 130.0)]
    scraped = [{**sample, "source": "scrape", "service_instance_id": "vllm-0"} for sample in counter]
    made.append("engine_samples", lake_rows.rows(ENGINE_SAMPLES, scraped))
    assert report(tmp_path / "lake")["missing_since"][0]["missing"] == 5
    assert "spans are missing: vllm-0 finished 5 requests since" in slo("--lake", tmp_path / "lake", "status").stdout


@pytest.fixture
def probed(tmp_path: Path) -> Path:
    """A lake of two servers with the probe and a stock one."""
    made = fill(tmp_path / "probed", told(400, seed=9), Buckets())
    made.append("engine_samples", samples("a", 30, probe_dropped_total=7.0, probe_errors_total=1.0))
    made.append("engine_samples", samples("idle", 30))
    return tmp_path / "probed"


def test_status_tells_what_each_server_runs_and_how_its_records_came_together(probed: Path) -> None:
    found = {each["name"]: each for each in report(probed)["servers"]}
    assert {name: each["level"] for name, each in found.items()} == {
        "a": "probe", "b": "probe", "idle": "probe", "stock": "stock",
    }  # fmt: skip
    rows = [each for each in told(400, seed=9) if each.shard == "a"]
    merged = sum("+" in (each.records or "") for each in rows)
    assert (found["a"]["rows"], found["a"]["merged"], found["a"]["alone"]) == (len(rows), merged, len(rows) - merged)
    assert found["a"]["running"] == ["engine", "frontend", "edge"]
    assert found["a"]["parts"]["edge"] == sum("edge" in (each.records or "") for each in rows)
    assert (found["a"]["dropped"], found["a"]["errors"], found["a"]["version"]) == (7.0, 1.0, VERSION)
    assert found["b"]["dropped"] is None, "an engine that sent no sample does not say that it dropped nothing"
    superseded = sum(each.quality == "superseded" for each in told(400, seed=9))
    assert superseded > 0
    assert found["stock"]["superseded"] == superseded
    assert found["idle"]["running"] == ["engine"]
    shown = slo("--lake", probed, "status").stdout
    assert re.search(r"^a +probe 0\.2\.0: engine frontend edge +", shown, re.MULTILINE)
    assert re.search(r"^idle +probe \(version unknown\): engine -frontend -edge +", shown, re.MULTILINE)
    assert re.search(r"^stock +stock +", shown, re.MULTILINE)
    lake = fill(probed.parent / "off", [Told(), Told(at=Told().at + timedelta(minutes=5), records="stock")])
    assert lake is not None
    shown_off = slo("--lake", probed.parent / "off", "status").stdout
    assert re.search(
        r"^a +probe 0\.2\.0: engine frontend edge; silent since \d\d:\d\d:\d\d UTC +", shown_off, re.MULTILINE
    )
    assert re.search(r"^b( +\d+){4} +unknown +unknown *$", shown, re.MULTILINE)


def test_requests_that_vllm_does_not_count_are_explained_beside_the_coverage(tmp_path: Path) -> None:
    lost = Told(quality="unfinished", finish_reason="abort", client_disconnected=True)
    made = fill(tmp_path / "lake", [Told(), Told(), lost, replace(lost, finish_reason="rejected", records="edge")])
    counter = [
        {"time": Told().at + timedelta(seconds=at), "requests_finished_total": n} for at, n in ((-5, 0), (30, 2))
    ]
    scraped = [{**sample, "source": "scrape", "service_instance_id": "a"} for sample in counter]
    made.append("engine_samples", lake_rows.rows(ENGINE_SAMPLES, scraped))
    (found,) = report(tmp_path / "lake")["coverage"]
    assert (found["received"], found["uncounted"]) == (2, {"abort": 1, "rejected": 1})
    assert "1 abort, 1 rejected" in slo("--lake", tmp_path / "lake", "status").stdout
