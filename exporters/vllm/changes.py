"""Successive scrapes of one server -> ``events``: the configuration seen, when it changed, and restarts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

import pyarrow.compute as pc

from vllm_slo.exporters.vllm.metrics import Scrape, Target

Event = dict[str, object]
"""One row of ``events``: exactly the columns of ``schema.EVENTS``."""

_SAME_START = timedelta(seconds=1)


@dataclass(frozen=True)
class Seen:
    """What is remembered of a server between scrapes."""

    configuration: Mapping[str, str]
    process_start: datetime | None
    generation_tokens: float | None


def observe(previous: Seen | None, scrape: Scrape, when: datetime, target: Target) -> tuple[Seen | None, list[Event]]:
    """What to remember, and the events this scrape brings.

    A page without vLLM's series brings nothing and changes nothing (a server that is starting).
    ``configuration``: the first time, and whenever a key changed. Dated at the process start when the process is new.
    Keys that one process shows late or not on every page (histograms before their first value) are no change.
    ``restart``: the process start moved forward by more than a second; where a page does not show it (several API
    servers), the generated tokens fell.
    Ids depend on the server, its process start and the configuration, so that a repeated observation is the same event.
    """
    if scrape.rows.num_rows == 0:
        return previous, []
    start, tokens = scrape.process_start, pc.sum(scrape.rows["generation_tokens_total"]).as_py()
    before = previous.configuration if previous is not None else {}
    restarted = previous is not None and _restarted(previous, start, tokens)
    now = scrape.configuration if restarted else {**before, **scrape.configuration}
    compared = before.keys() & scrape.configuration.keys()
    if restarted:  # a version that could not be asked for is no change
        compared = now.keys() | (before.keys() - {"vllm_version"})
    changed = {key: [before.get(key), now.get(key)] for key in sorted(compared) if before.get(key) != now.get(key)}
    seen = Seen(now, start, tokens)
    new_process = previous is None or previous.process_start != start
    began = start if start is not None and start <= when and new_process else when
    events: list[Event] = []
    if previous is not None and restarted:
        identity = start.isoformat() if start is not None else when.isoformat()
        evidence = {"process_start_time": [_text(previous.process_start), _text(start)]}
        if start is None:
            evidence = {"generation_tokens_total": [_text(previous.generation_tokens), _text(tokens)]}
        title = f"{target.instance} restarted"
        events.append(_event("restart", title, began, evidence, target, scrape, identity))
    if previous is None or changed:
        title = f"{target.instance}: configuration seen"
        if previous is not None:
            title = f"{target.instance}: {len(changed)} settings changed ({', '.join(list(changed)[:3])})"
        detail = {"changed": changed, "configuration": dict(now)}
        identity = start.isoformat() if start is not None else "" if previous is None else when.isoformat()
        identity += json.dumps(dict(now), sort_keys=True)
        events.append(_event("configuration", title, began, detail, target, scrape, identity))
    return seen, events


def _restarted(previous: Seen, start: datetime | None, tokens: float | None) -> bool:
    if previous.process_start is not None and start is not None:
        return start - previous.process_start > _SAME_START
    if previous.generation_tokens is None or tokens is None:
        return False
    return tokens < previous.generation_tokens


def _event(
    kind: str,
    title: str,
    time: datetime,
    detail: Mapping[str, object],
    target: Target,
    scrape: Scrape,
    identity: str,
) -> Event:
    models = sorted({model for model in scrape.rows["model"].to_pylist() if model is not None})
    digest = hashlib.sha256(f"{kind}\n{target.instance}\n{identity}".encode()).hexdigest()[:32]
    return {
        "event_id": digest,
        "time": time.astimezone(UTC),
        "end_time": None,
        "kind": kind,
        "title": title,
        "detail": json.dumps(detail, sort_keys=True),
        "service_instance_id": target.instance,
        "shard": target.shard,
        "model": models[0] if len(models) == 1 else None,
        "source": "scrape",
    }


def _text(value: datetime | float | None) -> str | None:
    if value is None:
        return None
    return value.isoformat() if isinstance(value, datetime) else f"{value:g}"
