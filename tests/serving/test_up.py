"""`vllm-slo up` as its users start it."""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import httpx
import pytest

from vllm_slo.analytics.lake import Lake
from vllm_slo.commands.invocation import Invocation
from vllm_slo.commands.up import _flag, _scrape
from vllm_slo.config import parse
from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.receiver.settings import ReceiverSettings, Tls
from vllm_slo.serving.process import Addresses, default_spool


def start(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "vllm_slo", "--lake", str(folder / "lake"), "up"]
    return subprocess.Popen(
        [*command, "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **(environment or {})},
    )


def told(process: subprocess.Popen[str]) -> str:
    """What it prints once it is ready."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("start vLLM"):
            return "".join(lines)
    process.wait()
    raise AssertionError(f"it ended: {process.stderr.read() if process.stderr else ''}")


def end(process: subprocess.Popen[str], number: signal.Signals = signal.SIGTERM) -> str:
    """Its standard error, after a clean end within seconds."""
    process.send_signal(number)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 0, errors
    return errors


def test_it_says_where_it_listens_and_what_to_give_vllm(tmp_path: Path) -> None:
    process = start(tmp_path, "--no-app")
    text = told(process)
    port = re.search(r"OTLP/gRPC +127\.0\.0\.1:(\d+)", text)
    assert port
    assert f"--otlp-traces-endpoint grpc://127.0.0.1:{port[1]}" in text
    url = re.search(r"http://127\.0\.0\.1:\d+", text)
    assert url
    assert httpx.get(f"{url[0]}/healthz").json() == {"status": "ok"}
    assert end(process) == ""
    assert Lake.open(tmp_path / "lake", create=False).table_stats()


def test_ctrl_c_ends_it_cleanly_too(tmp_path: Path) -> None:
    process = start(tmp_path, "--no-app")
    told(process)
    assert end(process, signal.SIGINT) == ""


def test_beyond_loopback_without_a_token_it_does_not_start(tmp_path: Path) -> None:
    process = start(tmp_path, "--no-app", "--http", "0.0.0.0:0")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "--token-file" in errors
    assert not (tmp_path / "lake").exists()


@pytest.mark.parametrize("how", ["file", "environment"])
def test_the_token_comes_from_a_file_or_from_the_environment(tmp_path: Path, how: str) -> None:
    (tmp_path / "token").write_text("s3cret\n")
    arguments = ["--token-file", str(tmp_path / "token")] if how == "file" else []
    environment = {"VLLM_SLO_TOKEN": "s3cret\n"} if how == "environment" else {}
    process = start(tmp_path, "--no-app", *arguments, environment=environment)
    url = re.search(r"http://127\.0\.0\.1:\d+", told(process))
    assert url
    assert httpx.get(f"{url[0]}/metrics").status_code == 401
    assert httpx.get(f"{url[0]}/metrics", headers={"authorization": "Bearer s3cret"}).status_code == 200
    end(process)


def test_a_token_in_the_clear_is_warned_of_and_is_in_what_vllm_must_be_given(tmp_path: Path) -> None:
    process = start(tmp_path, "--no-app", "--grpc", "0.0.0.0:0", environment={"VLLM_SLO_TOKEN": "s3cret"})
    text = told(process)
    assert "the token travels unencrypted" in text
    assert "OTEL_EXPORTER_OTLP_HEADERS='authorization=Bearer%20TOKEN'" in text
    assert "s3cret" not in text
    end(process)


def test_with_tls_vllm_is_sent_to_http_because_its_grpc_cannot_encrypt(tmp_path: Path) -> None:
    settings = ReceiverSettings(tls=Tls(tmp_path / "certificate.pem", tmp_path / "key.pem"))
    [line] = _flag(settings, Addresses(4317, 4318, None))
    assert "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf" in line
    assert line.endswith("--otlp-traces-endpoint https://127.0.0.1:4318/v1/traces")


def test_a_token_that_no_header_can_carry_is_refused(tmp_path: Path) -> None:
    process = start(tmp_path, "--no-app", environment={"VLLM_SLO_TOKEN": "two words"})
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "VLLM_SLO_TOKEN: no usable token" in errors


def test_an_address_in_use_ends_it_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = start(tmp_path, "--no-app")
    port = re.search(r"OTLP/gRPC +(127\.0\.0\.1:\d+)", told(first))
    assert port
    second = start(tmp_path / "other", "--no-app", "--grpc", port[1])
    _, errors = second.communicate(timeout=20)
    assert second.returncode == 1
    refused = f"--grpc {port[1]}: Failed to bind to address {port[1]}; free the port or choose another"
    assert errors == f"vllm-slo: {refused}\n"
    end(first)


def test_a_lake_that_is_a_file_is_called_that(tmp_path: Path) -> None:
    (tmp_path / "lake").write_text("")
    _, errors = start(tmp_path, "--no-app").communicate(timeout=20)
    assert errors == f"vllm-slo: {tmp_path}/lake: is a file; a lake is a folder: name another place with --lake\n"


def test_half_a_tls_pair_is_refused(tmp_path: Path) -> None:
    process = start(tmp_path, "--no-app", "--tls-cert", "x.pem")
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "belong together" in errors


def test_a_lake_at_a_url_needs_a_spool_of_its_own() -> None:
    with pytest.raises(SloError, match="--spool"):
        default_spool("s3://bucket/lake", None)
    assert default_spool("/data/lake", None) == Path("/data/lake/spool")
    assert default_spool("s3://bucket/lake", "/var/spool/x") == Path("/var/spool/x")


def test_scraped_pages_reach_the_lake(tmp_path: Path, captures: Path) -> None:
    page = sorted((captures / "lightshard" / "metrics-short-0").glob("*.txt.gz"))[-1]
    content = gzip.decompress(page.read_bytes())

    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *arguments: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Page)
    Thread(target=server.serve_forever, daemon=True).start()
    process = start(tmp_path, "--no-app", "--scrape", f"http://127.0.0.1:{server.server_port}=general-0@general")
    assert "as general-0, shard general" in told(process)
    time.sleep(1.5)
    end(process)
    server.shutdown()
    server.server_close()
    lake = Lake.open(tmp_path / "lake", create=False)
    rows = lake.read("engine_samples", lake.data_files("engine_samples")).to_pylist()
    assert rows
    assert {row["service_instance_id"] for row in rows} == {"general-0"}
    assert {row["shard"] for row in rows} == {"general"}


def test_a_server_that_does_not_answer_is_shown_by_status(tmp_path: Path) -> None:
    process = start(tmp_path, "--no-app", "--scrape", "http://127.0.0.1:9=general-0")
    told(process)
    time.sleep(0.5)
    assert "scraping http://127.0.0.1:9/metrics" in end(process)
    command = [sys.executable, "-m", "vllm_slo", "--lake", str(tmp_path / "lake"), "status"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert "http://127.0.0.1:9/metrics cannot be read: ConnectError" in shown
    again = start(tmp_path, "--no-app")
    told(again)
    end(again)
    shown = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path).stdout
    assert "cannot be read" not in shown


def test_the_pages_run_beside_it_and_end_with_it(tmp_path: Path) -> None:
    pytest.importorskip("streamlit")
    process = start(tmp_path, "--app-port", "0")
    url = re.search(r"pages +(http://127\.0\.0\.1:\d+)", told(process))
    assert url
    wait_for_pages(url[1])
    end(process)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url[1]}/_stcore/health")


def test_the_pages_end_with_it_even_when_it_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("streamlit")
    process = start(tmp_path, "--app-port", "0")
    url = re.search(r"pages +(http://127\.0\.0\.1:\d+)", told(process))
    assert url
    wait_for_pages(url[1])
    process.kill()
    process.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while True:
        try:
            httpx.get(f"{url[1]}/_stcore/health")
        except httpx.TransportError:
            break
        assert time.monotonic() < deadline, "the pages outlive the process that started them"
        time.sleep(0.1)


def wait_for_pages(url: str) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            assert httpx.get(f"{url}/_stcore/health").status_code == 200
            break
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_a_configured_target_keeps_its_shard_without_a_name() -> None:
    config = parse("scrape: [{url: 'http://h:1/metrics', shard: long}, {url: 'http://h:2'}]", Path("c.yaml"))
    invocation = Invocation()
    invocation.__dict__["config"] = config
    (group,) = _scrape(invocation, ())
    assert [(target.instance, target.shard) for target in group.targets] == [("h:1", "long"), ("h:2", None)]
