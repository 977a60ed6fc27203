"""An engine's port: HTTP clients of every kind, and a real Prometheus."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import quote

import pytest

from vllm_slo.exporters.probe import port as serving
from vllm_slo.exporters.probe.collector import Identity, ProbeCollector
from vllm_slo.exporters.probe.meters import Buckets, Meters
from vllm_slo.exporters.probe.port import Port, serve


class Records:
    """Counters of an outbox."""

    exported = dropped = failed = 0


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def meters() -> Meters:
    return Meters(Buckets.of((("short", 4096), ("long", None))), (), {"queue": [0.123]})


@pytest.fixture
def collector(meters: Meters) -> ProbeCollector:
    return ProbeCollector(meters, Identity("llama", "general", "0", "0.1.0", "0.32.0"), {}, Records())


@pytest.fixture
def served(collector: ProbeCollector) -> Iterator[Port]:
    port = serve(collector, "127.0.0.1", free_port(), 0)
    assert port is not None
    yield port
    port.close()


def get(port: Port, path: str = "/metrics", accept: str = "") -> tuple[int, str, str]:
    """Status, content type and text."""
    request = urllib.request.Request(f"http://127.0.0.1:{port.number}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers["Content-Type"], answer.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def test_the_text_format_is_what_a_plain_client_gets(served: Port) -> None:
    status, content_type, text = get(served)
    assert status == 200
    assert content_type.startswith("text/plain; version=")
    assert 'vllm_slo_probe_info{engine="0",model="llama"' in text


def test_openmetrics_is_for_who_asks(served: Port) -> None:
    _, content_type, text = get(served, accept="application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_an_objective_is_a_bound_as_prometheus_writes_it(served: Port) -> None:
    text = get(served)[2]
    assert 'le="0.123"' in text
    assert 'le="1.0"' in text


def test_another_path_says_where_the_series_are(served: Port) -> None:
    status, _, text = get(served, "/")
    assert (status, text) == (404, "the series are at /metrics\n")


def test_a_scrape_that_fails_is_answered_and_counted(
    served: Port, collector: ProbeCollector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving.logger, "propagate", True)
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(collector, "collect", lambda: 1 / 0)
        for _ in range(3):
            assert get(served)[0] == 500
    assert len([record for record in caplog.records if "a scrape failed" in record.message]) == 1
    assert "vllm_slo_probe_scrape_errors_total" in get(served)[2]
    assert collector.scrape_errors == 3


def test_engine_n_listens_n_ports_further(collector: ProbeCollector) -> None:
    first = free_port() - 2
    port = serve(collector, "127.0.0.1", first, 2)
    assert port is not None
    try:
        assert port.number == first + 2
        assert get(port)[0] == 200
    finally:
        port.close()


def test_port_0_serves_nothing(collector: ProbeCollector) -> None:
    assert serve(collector, "127.0.0.1", 0, 3) is None


@pytest.mark.parametrize("host", ["127.0.0.1", "no such host", "203.0.113.1"])
def test_what_cannot_be_listened_on_is_one_warning(
    served: Port,
    collector: ProbeCollector,
    host: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving.logger, "propagate", True)
    with caplog.at_level(logging.WARNING):
        assert serve(collector, host, served.number, 0) is None
    (record,) = caplog.records
    assert "VLLM_SLO_METRICS_PORT" in record.message


def test_a_port_beyond_the_last_is_a_warning_too(collector: ProbeCollector) -> None:
    assert serve(collector, "127.0.0.1", 65535, 1) is None


def test_ipv6_is_served(collector: ProbeCollector) -> None:
    port = serve(collector, "::1", free_port(), 0)
    if port is None:
        pytest.skip("no IPv6 here")
    try:
        with urllib.request.urlopen(f"http://[::1]:{port.number}/metrics", timeout=10) as answer:
            assert answer.status == 200
    finally:
        port.close()


def test_clients_that_hang_take_neither_all_threads_nor_the_scrapes(served: Port) -> None:
    before = threading.active_count()
    hanging = [socket.create_connection(("127.0.0.1", served.number)) for _ in range(40)]
    try:
        time.sleep(0.3)
        assert threading.active_count() - before <= serving.CLIENTS
    finally:
        for client in hanging:
            client.close()
    for _ in range(50):
        try:
            assert get(served)[0] == 200
            break
        except OSError:
            time.sleep(0.1)
    else:
        pytest.fail("no scrape was answered after the clients had gone")


def test_a_client_that_sends_nothing_is_let_go(collector: ProbeCollector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving._Handler, "timeout", 0.2)
    port = serve(collector, "127.0.0.1", free_port(), 0)
    assert port is not None
    try:
        with socket.create_connection(("127.0.0.1", port.number)) as client:
            client.settimeout(10)
            assert client.recv(1) == b""
    finally:
        port.close()


def test_garbage_and_a_client_that_leaves_in_the_middle_disturb_nobody(served: Port) -> None:
    for sent in (
        b"\x16\x03\x01\x00\xff" * 20,
        b"GET /metrics HTTP/1.1\r\n",
        b"POST /metrics HTTP/1.1\r\n\r\n",
        b"\r\n",
    ):
        with socket.create_connection(("127.0.0.1", served.number)) as client:
            client.sendall(sent)
    assert get(served)[0] == 200


FORKING = """
import os, sys, time, urllib.request
from vllm_slo.exporters.probe.collector import Identity, ProbeCollector
from vllm_slo.exporters.probe.meters import Buckets, Meters
from vllm_slo.exporters.probe.port import serve

class Records:
    exported = dropped = failed = 0

collector = ProbeCollector(Meters(Buckets.of((("all", None),))), Identity("m", "s", "0", "1", "1"), {}, Records())
port = serve(collector, "127.0.0.1", int(sys.argv[1]), 0)
child = os.fork()
if child == 0:
    # A child that lives on must not keep the port from its parent's successor.
    time.sleep(float(sys.argv[2]))
    os._exit(0)
with urllib.request.urlopen(f"http://127.0.0.1:{port.number}/metrics", timeout=10) as answer:
    assert answer.status == 200
print(child, flush=True)
"""


def test_a_forked_child_keeps_no_port(collector: ProbeCollector) -> None:
    number = free_port()
    parent = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKING, str(number), "30"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    try:
        assert parent.wait(timeout=30) == 0
        port = serve(collector, "127.0.0.1", number, 0)
        assert port is not None
        assert get(port)[0] == 200
        port.close()
    finally:
        os.kill(child, signal.SIGKILL)
        parent.stdout.close()


CONFIGURATION = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: vllm-probe
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus; apt-get install prometheus")
def test_prometheus_scrapes_it_and_computes_quantiles(served: Port, meters: Meters, tmp_path: Path) -> None:
    (tmp_path / "prometheus.yml").write_text(CONFIGURATION.format(port=served.number))
    own, cell = free_port(), meters.cell(10, 0)
    command = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address=127.0.0.1:{own}",
        "--log.level=warn",
    ]

    def ask(query: str) -> dict[str, float]:
        with urllib.request.urlopen(f"http://127.0.0.1:{own}/api/v1/query?query={quote(query)}", timeout=10) as answer:
            result = json.load(answer)["data"]["result"]
        return {json.dumps(one["metric"], sort_keys=True): float(one["value"][1]) for one in result}

    with open(tmp_path / "log", "wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as prometheus:
        try:
            deadline = time.monotonic() + 60
            scraped: dict[str, float] = {}
            while time.monotonic() < deadline and not scraped:
                time.sleep(0.5)
                try:
                    scraped = ask("count_over_time(vllm_slo_probe_info[1m]) >= 2")
                except OSError:
                    continue
            assert scraped, (tmp_path / "log").read_text()[-2000:]
            # 90 within the objective of 0.123 s, 10 beyond it, between two default bounds.
            for _ in range(90):
                meters.scheduled(cell, 122_999_999)
            for _ in range(10):
                meters.scheduled(cell, 123_000_001)
            good = 'vllm_slo_queue_seconds_bucket{bucket="short",priority="any",le="0.123"}'
            while time.monotonic() < deadline and not any(
                value >= 100 for value in ask('vllm_slo_queue_seconds_count{bucket="short"}').values()
            ):
                time.sleep(0.5)
            assert list(ask(good).values()) == [90]
            assert list(ask('increase(vllm_slo_queue_seconds_count{bucket="short"}[1m]) > 0').values())
            (median,) = ask(
                "histogram_quantile(0.5, sum by (le) (increase(vllm_slo_queue_seconds_bucket[1m])))"
            ).values()
            assert 0.1 <= median <= 0.123
            (late,) = ask(
                "histogram_quantile(0.95, sum by (le) (increase(vllm_slo_queue_seconds_bucket[1m])))"
            ).values()
            assert 0.123 < late <= 0.15
            assert set(ask('up{job="vllm-probe"}').values()) == {1}
        finally:
            prometheus.terminate()
