"""A real vLLM whose spans go over OTLP/HTTP with a bearer token, as the quickstart says."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from e2e.conftest import ROOT
from e2e.product import Up, free_port, query
from e2e.vllm_server import MODEL_NAME, build_model, serve


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_spans_over_http_with_a_token_arrive_and_senders_without_it_are_refused(
    vllm_python: str, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("open sesame".replace(" ", "-"))
    up = Up(tmp_path / "lake", tmp_path / "up.log", "--token-file", str(token))
    environment = {
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        "OTEL_EXPORTER_OTLP_HEADERS": f"authorization=Bearer%20{token.read_text()}",
    }
    endpoint = f"http://127.0.0.1:{up.http_port}/v1/traces"
    model = build_model(vllm_python, ROOT / ".cache" / MODEL_NAME)
    with up.running():
        assert httpx.post(endpoint, content=b"", headers={"Content-Type": "application/x-protobuf"}).status_code == 401
        with serve(
            *(vllm_python, model, tmp_path / "vllm.log"),
            port=free_port(),
            otlp_endpoint=endpoint,
            environment=environment,
        ) as server:
            for number in range(5):
                body = {"model": MODEL_NAME, "prompt": [7] * 50, "max_tokens": 3, "ignore_eos": True}
                headers = {"X-Request-Id": f"http-{number}"}
                httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=60).raise_for_status()
            deadline = time.monotonic() + 30
            while len(rows := query(tmp_path / "lake", "select request_id from requests order by 1")) < 5:
                assert time.monotonic() < deadline, f"only {rows} arrived"
                time.sleep(0.5)
    assert [row["request_id"] for row in rows] == [f"cmpl-http-{number}-0" for number in range(5)]
