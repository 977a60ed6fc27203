"""An engine's ``/metrics``: HTTP on a port of its own, one for each engine core.

Why not vLLM's own ``/metrics``: that is in the API server, another process. Prometheus's client can join processes only
through PROMETHEUS_MULTIPROC_DIR, which has to be set for all of vLLM: it takes the ``process_*`` series away, changes
how vLLM's own gauges add up, and leaves files behind. And a wedged API server would hide the engine's queue.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import weakref
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import CollectorRegistry

from vllm_slo.exporters.probe.collector import ProbeCollector
from vllm_slo.exporters.probe.settings import LOGGER_NAME

PATH = "/metrics"
CLIENT_SECONDS = 10.0
"""A client that sends or takes nothing for so long is let go."""
CLIENTS = 8
"""Clients served at once; a further one is refused, so that no number of them takes the engine's time."""

logger = logging.getLogger(LOGGER_NAME)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 16

    def __init__(self, address: tuple[str, int], collector: ProbeCollector) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.registry = CollectorRegistry()
        self.registry.register(collector)
        self.collector = collector
        self._free = threading.BoundedSemaphore(CLIENTS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # Not HTTPServer's: that one looks up the host's name, which can take long.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_name, self.server_port = self.socket.getsockname()[:2]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # no thread can be started
            self._free.release()
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is nobody's business."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = CLIENT_SECONDS
    server_version, sys_version = "vllm-slo", ""

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != PATH:
            self._answer(404, "text/plain; charset=utf-8", f"the series are at {PATH}\n".encode())
            return
        try:
            encode, content_type = choose_encoder(self.headers.get("Accept", ""))
            body = encode(self.server.registry)
        except Exception as error:
            collector = self.server.collector
            collector.scrape_errors += 1
            if collector.scrape_errors == 1:
                logger.warning("vllm-slo: a scrape failed, vLLM is not affected: %r", error, exc_info=error)
            self._answer(500, "text/plain; charset=utf-8", b"the probe could not read its state; see vLLM's log\n")
            return
        self._answer(200, content_type, body)

    def do_HEAD(self) -> None:
        self.do_GET()

    def _answer(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """No line a scrape."""


class Port:
    """A port that is served, until ``close`` or the end of the process. A forked child neither serves nor keeps it."""

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.number = int(server.server_port)
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.5}, name="vllm-slo-metrics", daemon=True
        )
        self._thread.start()
        os.register_at_fork(after_in_child=_let_go(weakref.ref(server)))

    def close(self) -> None:
        """Frees the port."""
        self._server.shutdown()
        self._server.server_close()


def _let_go(server: weakref.ref[_Server]) -> Any:
    def in_child() -> None:
        if (held := server()) is not None:
            held.socket.close()

    return in_child


def serve(collector: ProbeCollector, host: str, first_port: int, engine: int) -> Port | None:
    """Serves an engine's series on ``first_port + engine``.

    None where ``first_port`` is 0, and, after one warning, where the port cannot be had.
    """
    if not first_port:
        return None
    port = first_port + engine
    try:
        served = Port(_Server((host, port), collector))
    except (OSError, OverflowError, RuntimeError) as error:
        logger.warning(
            "vllm-slo: engine %d has no series, %s:%d cannot be listened on (%s); records go on. "
            "Give each server its own VLLM_SLO_METRICS_PORT, at least its number of engines apart",
            engine,
            host,
            port,
            error,
        )
        return None
    logger.info("vllm-slo: series of engine %d at http://%s:%d%s", engine, host, port, PATH)
    return served
