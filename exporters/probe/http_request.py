"""One HTTP request for inference as the middleware saw it, and its record where it never reached the engine."""

from __future__ import annotations

import itertools
import os
import time
from typing import TYPE_CHECKING, Any

from vllm_slo.exporters import records
from vllm_slo.exporters.conventions import REQUEST_ID
from vllm_slo.exporters.probe.spans import SpanData

if TYPE_CHECKING:
    from vllm_slo.exporters.probe.link import EngineSide

REJECTED_STATUSES = (429, 503)
REJECTION = records.key("admission_rejection")
"""Attribute: which limit refused the request, in vLLM's words (`max_num_queued_reqs`, `max_num_queued_tokens`)."""

_numbers = itertools.count()


def outcome_of(status: int) -> str | None:
    """Finish reason of a request that was answered with this status and never reached the engine; null below 400."""
    if status in REJECTED_STATUSES:
        return "rejected"
    if status >= 500:
        return "failed"
    return "invalid" if status >= 400 else None


class HttpRequest:
    """Filled by the middleware while the request runs; read when the record is made.

    Moments are of ``time.monotonic_ns``, 0 until they come; ``start_ns`` is the wall clock at arrival.
    ``stream_error``: the code in the error that came as the first event of a stream whose status was already sent.
    """

    __slots__ = (
        "began_ns",
        "broken",
        "client_disconnected",
        "complete",
        "end_ns",
        "ended",
        "engine_sides",
        "first_byte_ns",
        "linked",
        "own_id",
        "rejection",
        "request_id",
        "route",
        "sent",
        "start_ns",
        "status",
        "stream_error",
        "tenant",
        "trace_headers",
    )

    def __init__(
        self,
        route: str | None,
        request_id: str | None = None,
        tenant: str | None = None,
        trace_headers: dict[str, str] | None = None,
    ) -> None:
        self.start_ns = time.time_ns()
        self.began_ns = time.monotonic_ns()
        self.route = route
        self.own_id = f"edge-{os.getpid():x}-{self.start_ns:x}-{next(_numbers):x}"
        self.request_id = request_id or self.own_id
        self.tenant = tenant
        self.trace_headers = trace_headers
        self.status = 0
        self.stream_error = 0
        self.rejection: str | None = None
        self.first_byte_ns = 0
        self.end_ns = 0
        self.complete = False
        self.broken = False
        self.client_disconnected = False
        self.linked = False
        self.ended = False
        self.sent = False
        self.engine_sides: list[EngineSide] = []

    @property
    def error(self) -> bool:
        """Whether the server failed: any 5xx, 503 among them."""
        return self.broken or self.status >= 500 or self.stream_error >= 500

    @property
    def refused(self) -> bool:
        """Whether the answer alone tells that the request never reached the engine."""
        return self.rejection is not None or self.broken or self.status >= 400 or self.stream_error >= 400

    def outcome(self) -> str | None:
        """Finish reason of a request without an engine request; null where there is nothing to count."""
        if self.rejection is not None:
            return "rejected"
        if self.client_disconnected:
            return "abort"
        found = outcome_of(self.stream_error) or outcome_of(self.status)
        return found or ("failed" if self.broken else None)

    def attributes(self) -> dict[str, Any]:
        """The columns that only the HTTP side knows."""
        found: dict[str, Any] = {}
        if self.route is not None:
            found[records.key("http_route")] = self.route
            found[records.key("client_disconnected")] = self.client_disconnected
        if self.status:
            found[records.key("http_status")] = self.status
        if self.first_byte_ns:
            found[records.duration_key("time_to_first_byte")] = self.first_byte_ns - self.began_ns
        if self.end_ns:
            found[records.duration_key("http_duration")] = self.end_ns - self.began_ns
        if self.tenant is not None:
            found[records.key("tenant")] = self.tenant
        if self.rejection is not None:
            found[REJECTION] = self.rejection
        return found

    def span(self) -> SpanData:
        """The record of a request that never reached the engine."""
        attributes = self.attributes()
        attributes[REQUEST_ID] = self.request_id
        if (outcome := self.outcome()) is not None:
            attributes[records.key("finish_reason")] = outcome
        return SpanData(
            records.EDGE_REQUEST,
            self.start_ns,
            self.start_ns + max(self.end_ns - self.began_ns, 0),
            attributes,
            trace_headers=self.trace_headers,
            # Span ids are made of it: of the client's id they would be the same for requests that it sends again, and
            # of nothing they would be others when the record is sent again.
            engine_request_id=self.own_id,
            error=self.error,
        )
