"""The configuration of an engine as an event."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum
from types import SimpleNamespace
from typing import Any

from vllm_slo.exporters import records
from vllm_slo.exporters.probe.configuration import LONGEST, ConfigurationEvent, changes, read


class Mode(Enum):
    FAST = 1


@dataclass
class Cache:
    block_size: int = 16
    gpu_memory_utilization: float = 0.9
    enable_prefix_caching: bool = True
    layers: list[str] = field(default_factory=lambda: ["a", "b"])
    kinds: set[str] = field(default_factory=lambda: {"z", "y"})
    mode: Mode = Mode.FAST
    hf_token: str = "hf_secret"
    chat_template: str = "You are ..."
    api_key: str = "sk-secret"
    master_port: int = 29501
    unset: int | None = None
    nested: dict[str, int] = field(default_factory=dict)
    long: str = "x" * 1000


def scheduler(**more: Any) -> Any:
    values = {"max_num_running_reqs": 8, "max_num_scheduled_tokens": 2048, "block_size": 16}
    return SimpleNamespace(vllm_config=SimpleNamespace(cache_config=Cache()), **{**values, **more})


def test_values_are_named_after_their_part_and_are_text() -> None:
    found = read(scheduler(), "0.32.0", "0.1.0", {"probe.buckets": "short=4096,long"})
    assert found["vllm_version"] == "0.32.0"
    assert found["probe.buckets"] == "short=4096,long"
    assert found["scheduler.max_num_scheduled_tokens"] == "2048"
    assert found["cache.block_size"] == "16"
    assert (found["cache.layers"], found["cache.kinds"]) == ("['a', 'b']", "['y', 'z']")
    assert found["cache.mode"] == "FAST"
    assert len(found["cache.long"]) == LONGEST


def test_secrets_prompts_and_what_differs_at_each_start_are_left_out() -> None:
    found = json.dumps(read(scheduler(), "0.32.0", "0.1.0", {}))
    for word in ("secret", "You are", "29501", "unset", "nested"):
        assert word not in found


def test_a_change_names_what_was_and_is() -> None:
    before = read(scheduler(), "0.32.0", "0.1.0", {})
    now = read(scheduler(max_num_running_reqs=4), "0.32.0", "0.1.0", {})
    assert changes(before, now) == {"scheduler.max_num_running_reqs": ["8", "4"]}
    assert changes(now, now) == {}


def test_the_same_configuration_of_the_same_start_is_the_same_event() -> None:
    values = {"cache.block_size": "16"}
    first = ConfigurationEvent("0", 5, values, {}, 1).span()
    assert first.attributes == ConfigurationEvent("0", 5, dict(values), {}, 1).span().attributes
    other = ConfigurationEvent("0", 5, values, {}, 2).span()
    identity, kind, title = (records.key(name) for name in ("event_id", "kind", "title"))
    assert first.attributes[identity] != other.attributes[identity]
    assert (first.name, first.attributes[kind]) == (records.EVENT, "configuration")
    changed = ConfigurationEvent("0", 5, values, {"cache.block_size": ["32", "16"]}, 1).span()
    assert changed.attributes[title] == "engine 0: 1 settings changed (cache.block_size)"
