"""A life that has ended, as the span of the engine core. Runs in the outbox's thread. Pure."""

from __future__ import annotations

import json
from typing import Any

from vllm_slo.exporters import records
from vllm_slo.exporters.conventions import COMPLETION_TOKENS, MAX_TOKENS, PROMPT_TOKENS, REQUEST_ID, TEMPERATURE, TOP_P
from vllm_slo.exporters.probe.blocked import largest
from vllm_slo.exporters.probe.ids import external_id
from vllm_slo.exporters.probe.life import Life
from vllm_slo.exporters.probe.spans import SpanData

_KEYS = {
    stem: records.duration_key(stem)
    for stem in (
        *records.QUEUE_PARTS,
        *records.PREFILL_PARTS,
        *records.DECODE_PARTS,
        "queue",
        "queue_behind",
        "prefill",
        "decode",
        "preempted",
        "recompute",
        "decode_reference",
        "inter_token_latency_max",
        "time_to_first_token",
        "request_duration",
        "token_budget_blocker",
        "kv_blocks_blocker",
    )
}


class EngineRecord:
    """One request of one engine; see ``records.ENGINE_REQUEST``."""

    __slots__ = ("engine", "life", "random_ids")

    def __init__(self, life: Life, engine: str, random_ids: bool) -> None:
        self.life = life
        self.engine = engine
        self.random_ids = random_ids

    def span(self) -> SpanData:
        """The record; durations of 0 are left out, ids of blockers are the engine's."""
        life, key, time_key = self.life, records.key, records.time_key
        offset = life.offset_ns
        attributes: dict[str, Any] = {
            REQUEST_ID: external_id(life.engine_request_id, self.random_ids),
            key("engine_request_id"): life.engine_request_id,
            key("engine"): self.engine,
            key("priority"): life.priority,
            key("finish_reason"): life.finish_reason,
            key("preemptions"): life.preemptions,
            PROMPT_TOKENS: life.prompt_tokens,
            COMPLETION_TOKENS: life.completion_tokens,
            time_key("queued_time"): life.queued_ns + offset,
            time_key("engine_end_time"): life.end_ns + offset,
            _KEYS["request_duration"]: life.end_ns + offset - life.arrival_ns,
        }
        durations = {
            "queue": life.queue,
            "queue_sequence_cap": life.queue_sequence_cap,
            "queue_token_budget": life.queue_token_budget,
            "queue_kv_blocks": life.queue_kv_blocks,
            "queue_deferred": life.queue_deferred,
            "queue_step": life.queue_step,
            "queue_behind": life.queue_behind,
        }
        if life.deferred:
            attributes[key("queue_deferred_reasons")] = json.dumps(life.deferred)
        self._blockers(attributes)
        if life.scheduled_ns:
            attributes[time_key("scheduled_time")] = life.scheduled_ns + offset
            durations.update(
                prefill_own=life.prefill_own,
                prefill_interference=life.prefill_interference,
                prefill_other=life.prefill_other,
                preempted=life.preempted,
                recompute=life.recompute,
                preempted_before_first_token=life.preempted_before,
                recompute_before_first_token=life.recompute_before,
            )
            counts = {
                "cached_tokens_local": life.cached_local,
                "cached_tokens_external": life.cached_external,
                "lost_tokens": life.lost_tokens,
                "recomputed_tokens": life.recomputed_tokens,
                "kv_blocks_peak": life.kv_blocks_peak,
            }
            attributes.update((key(name), value) for name, value in counts.items() if value is not None)
            if life.cached_local is not None:
                attributes[key("cached_tokens")] = life.cached_local + (life.cached_external or 0)
        if life.first_token_ns:
            attributes[time_key("first_token_time")] = life.first_token_ns + offset
            attributes[_KEYS["time_to_first_token"]] = life.first_token_ns + offset - life.arrival_ns
            attributes[_KEYS["prefill"]] = life.prefill
            attributes[_KEYS["decode"]] = life.decode
            durations.update(
                decode_work=life.decode_work,
                decode_interference=life.decode_interference,
                decode_slowdown=life.decode_slowdown,
                decode_reference=life.reference_ns,
                inter_token_latency_max=life.worst_gap_ns,
            )
        attributes.update((_KEYS[stem], value) for stem, value in durations.items() if value)
        self._parameters(attributes)
        return SpanData(
            records.ENGINE_REQUEST,
            life.arrival_ns,
            life.end_ns + offset,
            attributes,
            trace_headers=life.trace_headers,
            engine_request_id=life.engine_request_id,
            error=life.finish_reason == "error",
        )

    def _blockers(self, attributes: dict[str, Any]) -> None:
        life = self.life
        for stem, runs, most in (
            ("token_budget_blocker", life.token_budget_blockers, life.queue_token_budget),
            ("kv_blocks_blocker", life.kv_blocks_blockers, life.queue_kv_blocks),
        ):
            found = largest(runs, life.windows) if runs else None
            if found is not None:
                attributes[records.key(stem)] = found[0]
                attributes[_KEYS[stem]] = min(found[1], most)

    def _parameters(self, attributes: dict[str, Any]) -> None:
        life, key = self.life, records.key
        temperature, top_p = life.sampling
        optional = {
            MAX_TOKENS: life.max_tokens,
            # vLLM leaves out what is 0 here, and so do we: one row must not say both.
            TEMPERATURE: temperature or None,
            TOP_P: top_p or None,
            key("lora"): life.lora,
            key("draft_tokens"): life.draft_tokens or None,
            key("accepted_tokens"): life.accepted_tokens if life.draft_tokens else None,
        }
        attributes.update((name, value) for name, value in optional.items() if value is not None)
