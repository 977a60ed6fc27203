"""What a resource says about all of its spans: service, instance, shard, model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import Any

from vllm_slo.exporters.conventions import (
    INSTRUMENTING_MODULE,
    MODEL,
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    SHARD,
    VLLM_SCOPE_PREFIX,
)
from vllm_slo.exporters.otlp.decoded import DecodeSettings, ShardRule
from vllm_slo.exporters.otlp.values import Json, json_text, label, plain_object
from vllm_slo.exporters.records import PROBE_VERSION, SCOPE

PROCESS_ID = "vllm.process_id"


@dataclass(frozen=True)
class Resource:
    """The resource columns of a row; ``is_vllm`` when vLLM's own tracing made the resource.

    ``probe``: the server runs the probe, whichever of its spans this is.
    """

    service_name: str | None
    service_instance_id: str | None
    shard: str | None
    model: str | None
    attributes: str | None
    is_vllm: bool
    probe: bool = False


def resource_of(message: Any, settings: DecodeSettings) -> Resource:
    """The resource columns for a protobuf ``Resource`` without prompt text.

    Shard: ``vllm.shard``, else the first shard rule that matches, else the instance, else the service.
    Model: ``vllm.model``, else what the settings say about the instance, else None.
    """
    attributes = plain_object(message.attributes)
    service = label(attributes.get(SERVICE_NAME))
    instance = label(attributes.get(SERVICE_INSTANCE_ID))
    shard = label(attributes.get(SHARD)) or _ruled(attributes, settings.shard_rules) or instance or service
    model = label(attributes.get(MODEL))
    if model is None and instance is not None:
        model = next((name for key, name in settings.models if key == instance), None)
    return Resource(
        service_name=service,
        service_instance_id=instance,
        shard=shard,
        model=model,
        attributes=json_text(attributes) if attributes else None,
        is_vllm=INSTRUMENTING_MODULE in attributes or PROCESS_ID in attributes,
        probe=PROBE_VERSION in attributes,
    )


def is_vllm_scope(name: str) -> bool:
    """Whether an instrumentation scope is one of vLLM's (``vllm.tracing.otel``, ``vllm.v1.engine.core`` and so on)."""
    return name.startswith(VLLM_SCOPE_PREFIX) and name != SCOPE


def _ruled(attributes: dict[str, Json], rules: tuple[ShardRule, ...]) -> str | None:
    for rule in rules:
        value = label(attributes.get(rule.attribute))
        if value is not None and _compiled(rule.pattern).match(value):
            return rule.shard
    return None


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile(translate(pattern))
