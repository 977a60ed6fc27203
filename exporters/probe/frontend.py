"""The front end's record of every engine request, however it ends: hooks on vLLM's OutputProcessor.

A request begins in ``add_request`` and ends in exactly one of: ``_update_stats_from_finished`` (finished, aborted by
the engine, stopped by a stop string), ``abort_requests`` (the client went away, an operator aborted),
``propagate_error`` (the engine died), ``_finish_request`` with an error already in its queue (refused by a paused
engine, vLLM 0.33), and a further ``add_request`` that closes a streaming input. Cost per request, none per token.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_slo.exporters import records
from vllm_slo.exporters.conventions import (
    COMPLETION_TOKENS,
    MAX_TOKENS,
    PROMPT_TOKENS,
    REQUEST_ID,
    TEMPERATURE,
    TOP_P,
    N,
)
from vllm_slo.exporters.probe.guard import guarded
from vllm_slo.exporters.probe.http_request import REJECTED_STATUSES, HttpRequest
from vllm_slo.exporters.probe.link import Front, Link, activate
from vllm_slo.exporters.probe.spans import SpanData
from vllm_slo.exporters.probe.tenant import tenant_of

if TYPE_CHECKING:
    from vllm_slo.exporters.probe.outbox import Outbox
    from vllm_slo.exporters.probe.settings import Settings

LIMIT = 100_000
"""Requests in flight that are followed in one API server; further ones go without a record."""
NANOSECONDS = 1e9


class FrontendRequest:
    """One engine request in one API server. Holds vLLM's state of it while it runs, plain values afterwards."""

    __slots__ = (
        "arrival",
        "cached_tokens",
        "completion_tokens",
        "duration",
        "ended",
        "engine_request_id",
        "finish_reason",
        "first_token",
        "http",
        "lora",
        "max_tokens",
        "n",
        "priority",
        "prompt_tokens",
        "request_id",
        "sent",
        "state",
        "temperature",
        "top_p",
        "trace_headers",
    )

    def __init__(self, request: Any, state: Any, n: int | None) -> None:
        self.engine_request_id: str = request.request_id
        self.request_id: str = state.external_req_id
        self.arrival: float = request.arrival_time
        self.trace_headers = request.trace_headers
        self.priority: int = request.priority
        self.lora: str | None = state.lora_name
        self.max_tokens: int | None = state.max_tokens_param
        self.temperature: float | None = state.temperature
        self.top_p: float | None = state.top_p
        self.n = n
        self.state: Any = state
        self.first_token: float | None = None
        self.http: HttpRequest | None = None
        self.ended = False
        self.sent = False

    def end(self, reason: str, now: float) -> None:
        """Takes the last values out of vLLM's state and lets go of it. ``now``: epoch seconds of the end."""
        state, self.state = self.state, None
        stats = state.stats
        if stats is not None:
            # A streaming input moves the arrival to its last part.
            self.arrival = stats.arrival_time
            self.completion_tokens = stats.num_generation_tokens
            # What the engine ends before its first token gets a latency of vLLM too, which is none.
            if not state.is_prefilling and (self.completion_tokens or reason not in ("abort", "error")):
                self.first_token = stats.first_token_latency
        else:
            detokenizer = state.detokenizer
            self.completion_tokens = detokenizer.num_output_tokens() if detokenizer is not None else 0
        self.duration = now - self.arrival
        self.finish_reason = reason
        self.prompt_tokens: int = state.prompt_len
        self.cached_tokens: int | None = None if state.is_prefilling else state.num_cached_tokens

    def span(self) -> SpanData:
        """The record; runs in the outbox's thread."""
        key, duration_key = records.key, records.duration_key
        duration = round(self.duration * NANOSECONDS)
        attributes: dict[str, Any] = {
            REQUEST_ID: self.request_id,
            key("engine_request_id"): self.engine_request_id,
            key("finish_reason"): self.finish_reason,
            PROMPT_TOKENS: self.prompt_tokens,
            COMPLETION_TOKENS: self.completion_tokens,
            key("priority"): self.priority,
            duration_key("request_duration"): duration,
        }
        optional = {
            key("cached_tokens"): self.cached_tokens,
            key("lora"): self.lora,
            MAX_TOKENS: self.max_tokens,
            TEMPERATURE: self.temperature,
            TOP_P: self.top_p,
            N: self.n,
        }
        attributes.update((name, value) for name, value in optional.items() if value is not None)
        if self.first_token is not None:
            attributes[duration_key("time_to_first_token")] = round(self.first_token * NANOSECONDS)
        error = self.finish_reason == "error"
        if self.http is not None:
            attributes.update(self.http.attributes())
            error = error or self.http.error
        start = int(self.arrival * NANOSECONDS)
        return SpanData(
            records.FRONTEND_REQUEST,
            start,
            start + max(duration, 0),
            attributes,
            trace_headers=self.trace_headers,
            engine_request_id=self.engine_request_id,
            error=error,
        )


class Frontend:
    """What the hooks do. Runs in the event loop's thread; in ``LLM`` in the caller's."""

    def __init__(self, link: Link, clock: Callable[[], float] = time.time) -> None:
        self._link = link
        self._clock = clock
        self.in_flight: dict[str, FrontendRequest] = {}
        self._off = False

    def switch_off(self) -> None:
        """Forgets everything: with one hook gone requests would be held that never end."""
        self._off = True
        self.in_flight.clear()

    def added(self, processor: Any, request: Any, parent: Any) -> None:
        """After ``add_request``: a new request, or a further part of a streaming input, perhaps the closing one."""
        engine_request_id = request.request_id
        state = processor.request_states.get(engine_request_id)
        known = self.in_flight.get(engine_request_id)
        if known is not None and known.state is state:
            return
        if known is not None:
            self._ended(known, "stop", self._clock())
        if state is None or self._off or len(self.in_flight) >= LIMIT:
            return
        params = request.sampling_params
        n = parent.n if parent is not None else params.n if params is not None else None
        side = FrontendRequest(request, state, n)
        self.in_flight[engine_request_id] = side
        self._link.engine_started(side)
        if not processor.log_stats:
            self._watch_first_tokens(processor)

    def finished(self, state: Any, reason: Any, iteration_stats: Any) -> None:
        """After ``_update_stats_from_finished``. The end is vLLM's own, as in its span, where it keeps statistics."""
        side = self.in_flight.get(state.request_id)
        if side is not None:
            now = self._clock() if iteration_stats is None else iteration_stats.iteration_timestamp
            self._ended(side, str(reason), now)

    def refused(self, state: Any) -> None:
        """After ``_finish_request``: ends what the engine answered with an error before it ran."""
        failure = getattr(state.queue, "output", None)
        if not isinstance(failure, Exception):
            return
        side = self.in_flight.get(state.request_id)
        if side is not None:
            status = getattr(failure, "status_code", getattr(failure, "http_status", 0))
            self._ended(side, "rejected" if status in REJECTED_STATUSES else "error", self._clock())

    def aborted(self, engine_request_ids: list[str]) -> None:
        """After ``abort_requests``, with what it aborted."""
        for engine_request_id in engine_request_ids:
            side = self.in_flight.get(engine_request_id)
            if side is not None:
                self._ended(side, "abort", self._clock())

    def failed(self, processor: Any) -> None:
        """After ``propagate_error``: nothing of this processor will come to an end any more."""
        for engine_request_id in list(processor.request_states):
            side = self.in_flight.get(engine_request_id)
            if side is not None:
                self._ended(side, "error", self._clock())

    def _ended(self, side: FrontendRequest, reason: str, now: float) -> None:
        del self.in_flight[side.engine_request_id]
        side.end(reason, now)
        self._link.engine_ended(side)

    def _watch_first_tokens(self, processor: Any) -> None:
        """Without vLLM's statistics the first token is timed here; a call per output, on such a processor alone."""
        if "_update_stats_from_output" in vars(processor):
            return
        original = processor._update_stats_from_output
        first = guarded("frontend.first_token", self._first_token)

        def watched(state: Any, output: Any, *rest: Any) -> None:
            if state.is_prefilling and output.new_token_ids:
                first(state)
            original(state, output, *rest)

        processor._update_stats_from_output = watched

    def _first_token(self, state: Any) -> None:
        side = self.in_flight.get(state.request_id)
        if side is not None and side.first_token is None:
            side.first_token = self._clock() - side.arrival


def wrap(processor_class: Any, frontend: Frontend) -> None:
    """Puts the hooks after the methods of vLLM's OutputProcessor; what these return and raise stays theirs."""
    added = guarded("frontend.add_request", frontend.added, frontend.switch_off)
    finished = guarded("frontend.finished", frontend.finished, frontend.switch_off)
    refused = guarded("frontend.finish_request", frontend.refused, frontend.switch_off)
    aborted = guarded("frontend.abort_requests", frontend.aborted, frontend.switch_off)
    failed = guarded("frontend.propagate_error", frontend.failed, frontend.switch_off)

    add_request = processor_class.add_request

    @functools.wraps(add_request)
    def hooked_add(self: Any, request: Any, prompt: Any, parent_req: Any = None, *rest: Any, **named: Any) -> Any:
        result = add_request(self, request, prompt, parent_req, *rest, **named)
        added(self, request, parent_req)
        return result

    update_stats = processor_class._update_stats_from_finished

    @functools.wraps(update_stats)
    def hooked_finished(self: Any, req_state: Any, finish_reason: Any, iteration_stats: Any) -> Any:
        result = update_stats(self, req_state, finish_reason, iteration_stats)
        finished(req_state, finish_reason, iteration_stats)
        return result

    finish_request = processor_class._finish_request

    @functools.wraps(finish_request)
    def hooked_finish(self: Any, req_state: Any) -> Any:
        result = finish_request(self, req_state)
        refused(req_state)
        return result

    abort_requests = processor_class.abort_requests

    @functools.wraps(abort_requests)
    def hooked_abort(self: Any, request_ids: Any, internal: bool) -> Any:
        result = abort_requests(self, request_ids, internal)
        aborted(result)
        return result

    propagate_error = processor_class.propagate_error

    @functools.wraps(propagate_error)
    def hooked_error(self: Any, e: Exception) -> Any:
        try:
            return propagate_error(self, e)
        finally:
            failed(self)

    processor_class.add_request = hooked_add
    processor_class._update_stats_from_finished = hooked_finished
    processor_class._finish_request = hooked_finish
    processor_class.abort_requests = hooked_abort
    processor_class.propagate_error = hooked_error


def install(settings: Settings, outbox: Outbox, version_row: Any) -> None:
    """Starts the front-end part of this process: hooks, and what the middleware and the stat logger find."""
    from vllm.v1.engine.output_processor import OutputProcessor

    link = Link(outbox.put)
    header = settings.tenant_header
    salt = settings.tenant_salt.encode()

    def tenant(value: bytes) -> str | None:
        return tenant_of(value, settings.tenant_hash, salt)

    activate(Front(link, outbox.put, header.encode() if header else None, tenant))
    wrap(OutputProcessor, Frontend(link))
    outbox.before_close.append(link.flush)
