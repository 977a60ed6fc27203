"""`vllm-slo doctor` as a program: output, JSON and exit codes."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fixtures.probe_lake import Told, fill, samples
from vllm_slo.__main__ import run

PAGES = Path(__file__).resolve().parents[1] / "fixtures" / "vllm_metrics"
GOOD = "OTEL_RESOURCE_ATTRIBUTES=service.instance.id=a vllm serve m --otlp-traces-endpoint http://localhost:4317"


@pytest.fixture
def server() -> Iterator[str]:
    """A server that answers as a vLLM 0.32 whose client gave up one request."""
    body = {
        "/metrics": gzip.decompress((PAGES / "aborted.txt.gz").read_bytes()),
        "/version": b'{"version": "0.32.0"}',
        "/health": b"",
    }

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in body else 404)
            self.end_headers()
            self.wfile.write(body.get(self.path, b""))

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()
        thread.join()


def test_a_running_server_is_looked_at(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", server, "--all"]) == 0
    shown = capsys.readouterr().out
    assert "warning client-aborts" in shown
    assert "1 of 13 requests answered over HTTP" in shown
    assert "vLLM 0.32.0." in shown
    assert "cure  Add --command" in shown


def test_json_holds_every_finding_once(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", server, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["source"] == server
    by_id = {finding["id"]: finding for finding in told["findings"]}
    assert set(by_id["kv-cache-metrics"]) == {"id", "severity", "found", "why", "cure"}
    assert by_id["kv-cache-metrics"]["severity"] == "warning"
    assert by_id["health"]["severity"] == "ok"
    assert by_id["sampling"]["severity"] == "unknown"


def test_a_command_without_error_exits_0_and_one_with_exits_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--command", GOOD]) == 0
    assert run(["doctor", "--command", f"{GOOD} --disable-log-stats"]) == 1
    shown = capsys.readouterr().out
    assert "error   log-stats-with-tracing" in shown
    assert "cure  Remove --disable-log-stats." in shown


def test_what_one_source_would_tell_is_said_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--command", "vllm serve m --otlp-traces-endpoint http://h:4317"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("The server's environment was not given. ") <= 1
    assert "sampling, sdk-disabled, span-limits" in shown


def test_an_environment_given_is_the_whole_one(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["doctor", "--command", "vllm serve m --otlp-traces-endpoint http://h:4317", "--json"]
    run([*arguments, "--env", "none"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {f["severity"] for f in findings if f["id"] == "resource-attributes"} == {"warning", "note"}
    assert {f["severity"] for f in findings if f["id"] == "tracing-protocol"} == {"ok"}


def test_objectives_given_make_missing_bounds_a_warning(server: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(["doctor", server, "--objective", "queue=0.2", "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [f["severity"] for f in findings if f["id"] == "objective-bounds"] == ["warning"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Give a server's address"),
        (["--command", "nginx"], "starts no vLLM server"),
        (["--command", GOOD, "--objective", "p99=1"], "not one of ttft"),
        (["--command", GOOD, "--env", "A"], "write NAME=VALUE"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_is_allowed(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["doctor", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_is_away_exits_1_with_the_cure(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "http://127.0.0.1:1"]) == 1
    assert "check that vLLM is up" in capsys.readouterr().err


def test_a_folder_of_saved_pages_is_looked_at(captures: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", str(captures / "smallkv" / "metrics-general-0"), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert "13 requests lie beyond" in next(f["found"] for f in findings if f["id"] == "token-bounds")


@pytest.fixture
def probed(tmp_path: Path) -> str:
    """A lake that has two servers, one of them stock."""
    made = fill(tmp_path / "lake", [Told(), Told(records="engine+frontend"), Told(shard="bare", records="stock")])
    made.append("engine_samples", samples("a", 5, probe_dropped_total=4.0))
    return str(tmp_path / "lake")


NAMED_B = "OTEL_RESOURCE_ATTRIBUTES=service.instance.id=b"


def findings_of(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    run([*arguments, "--json"])
    return {finding["id"]: finding["severity"] for finding in json.loads(capsys.readouterr().out)["findings"]}


def test_a_server_is_looked_up_in_the_lake(probed: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = findings_of(["--lake", probed, "doctor", "--instance", "a"], capsys)
    seen = {check: found[f"probe-{check}"] for check in ("installed", "dropped", "errors", "middleware", "gpu")}
    assert seen == {"installed": "ok", "dropped": "warning", "errors": "ok", "middleware": "ok", "gpu": "note"}
    assert findings_of(["--lake", probed, "doctor", "--instance", "bare"], capsys)["probe-installed"] == "warning"
    assert findings_of(["--lake", probed, "doctor", "--instance", "?"], capsys)["probe-installed"] == "unknown"


def test_the_instance_of_the_environment_is_looked_up_where_there_is_a_lake(
    probed: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert findings_of(["--lake", probed, "doctor", "--command", GOOD], capsys)["probe-installed"] == "ok"
    nowhere = str(tmp_path / "nowhere")
    assert findings_of(["--lake", nowhere, "doctor", "--command", GOOD], capsys)["probe-installed"] == "unknown"
    assert run(["--lake", nowhere, "doctor", "--instance", "a"]) == 1
    assert "nowhere" in capsys.readouterr().err


def test_the_probe_is_found_at_the_port_of_the_servers_environment(
    server: str, capsys: pytest.CaptureFixture[str]
) -> None:
    page = b'vllm_slo_probe_info{service_instance_id="a",version="0.0.1"} 1\n'

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        port = f"VLLM_SLO_METRICS_PORT={http.server_port}"
        found = findings_of(["doctor", server, "--env", port], capsys)
        given = findings_of(["doctor", "--probe", f"http://127.0.0.1:{http.server_port}"], capsys)
        other = findings_of(["doctor", server, "--env", port, "--env", NAMED_B], capsys)
        http.shutdown()
        thread.join()
    assert found["probe-installed"] == given["probe-installed"] == "ok"
    assert found["probe-version"] == "note"
    assert other["probe-installed"] == "unknown", "the port is that of another server of the machine"
