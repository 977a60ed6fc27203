"""The configuration of an engine as an event: when it starts, and when a value changes. Reads vLLM's objects."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from vllm_slo.exporters import records
from vllm_slo.exporters.probe.spans import SpanData

SECTIONS: tuple[str, ...] = (
    "model_config",
    "cache_config",
    "parallel_config",
    "scheduler_config",
    "load_config",
    "device_config",
    "lora_config",
    "speculative_config",
    "structured_outputs_config",
    "observability_config",
    "kv_transfer_config",
    "compilation_config",
)
"""Parts of vLLM's VllmConfig; a value of any is named ``<part>.<field>``."""
PRIVATE = ("auth", "key", "secret", "password", "credential", "header", "template", "hf_token", "api_token")
"""Fields with these words in their names are left out: they may hold secrets or prompts."""
PASSING = ("port", "_ip", "host", "_time", "traced_files", "cache_dir", "instance_id", "engine_id")
"""So are these: they differ from one start to the next, or while it runs, and say nothing of how it is configured."""
LONGEST = 200


def read(scheduler: Any, vllm_version: str, probe_version: str, settings: Mapping[str, str]) -> dict[str, str]:
    """Name -> value as text, of every plain field of vLLM's configuration and what the scheduler made of it."""
    config = scheduler.vllm_config
    found = {
        "vllm_version": vllm_version,
        "probe_version": probe_version,
        "scheduler.class": type(scheduler).__name__,
        "scheduler.max_num_running_reqs": str(scheduler.max_num_running_reqs),
        "scheduler.max_num_scheduled_tokens": str(scheduler.max_num_scheduled_tokens),
        "scheduler.block_size": str(scheduler.block_size),
        **settings,
    }
    for section in SECTIONS:
        part = getattr(config, section, None)
        name = section.removesuffix("_config")
        if part is not None:
            found.update((f"{name}.{field}", text) for field, text in _plain(part).items())
    return dict(sorted(found.items()))


def _plain(part: Any) -> dict[str, str]:
    """Fields that hold a number, a word or a list of those; paths and long values are cut."""
    names = [field.name for field in fields(part)] if is_dataclass(part) else list(vars(part))
    found = {}
    for name in names:
        value = getattr(part, name, None)
        if name.startswith("_") or any(word in name for word in (*PRIVATE, *PASSING)) or value is None:
            continue
        if isinstance(value, list | tuple | set | frozenset):
            value = sorted(value, key=str) if isinstance(value, set | frozenset) else list(value)
            if not all(isinstance(item, bool | int | float | str) for item in value):
                continue
        elif not isinstance(value, bool | int | float | str):
            value = getattr(value, "name", None)
        if value is not None:
            found[name] = str(value)[:LONGEST]
    return found


class ConfigurationEvent:
    """One row of `events`, of kind ``configuration``; the same configuration of the same start has the same id."""

    def __init__(
        self, engine: str, time_ns: int, values: Mapping[str, str], changed: Mapping[str, Any], started_ns: int
    ) -> None:
        self._engine, self._time_ns, self._values, self._changed = engine, time_ns, values, changed
        self._started_ns = started_ns

    def span(self) -> SpanData:
        """The record."""
        title = f"engine {self._engine}: configuration seen"
        if self._changed:
            title = (
                f"engine {self._engine}: {len(self._changed)} settings changed ({', '.join(list(self._changed)[:3])})"
            )
        text = json.dumps({"changed": self._changed, "configuration": self._values}, sort_keys=True)
        digest = hashlib.sha256(f"{self._engine}\n{self._started_ns}\n{text}".encode()).hexdigest()[:32]
        attributes = {
            records.key("event_id"): digest,
            records.key("kind"): "configuration",
            records.key("title"): title,
            records.key("detail"): text,
        }
        return SpanData(records.EVENT, self._time_ns, self._time_ns, attributes)


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> dict[str, list[str | None]]:
    """Name -> value before and now, of what differs."""
    names = sorted(before.keys() | now.keys())
    return {name: [before.get(name), now.get(name)] for name in names if before.get(name) != now.get(name)}
