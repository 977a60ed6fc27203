"""`vllm-slo doctor` as a program: output, JSON and exit codes."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

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
