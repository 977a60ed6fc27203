"""Configuration and restart events."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

from vllm_slo.exporters.schema import EVENT_KINDS, EVENTS
from vllm_slo.exporters.vllm.changes import observe
from vllm_slo.exporters.vllm.metrics import Scrape, Target, read

T0 = datetime(2026, 11, 30, 12, 0, tzinfo=UTC)
TARGET = Target("http://127.0.0.1:8000/metrics", "general-0", "general")


def page(*, start: datetime | None = T0, blocks: int = 100, tokens: int = 10, version: str | None = "0.32.0") -> Scrape:
    text = f'vllm:generation_tokens_total{{engine="0",model_name="m"}} {tokens}\n'
    text += f'vllm:cache_config_info{{engine="0",num_gpu_blocks="{blocks}"}} 1.0\n'
    if start is not None:
        text += f"process_start_time_seconds {start.timestamp()}\n"
    return read(text, T0 + timedelta(minutes=1), TARGET, version)


def at(minutes: int) -> datetime:
    return T0 + timedelta(minutes=minutes)


def test_the_first_page_brings_the_whole_configuration_dated_at_the_start_of_the_process() -> None:
    _, (event,) = observe(None, page(), at(5), TARGET)
    assert list(event) == EVENTS.schema.names
    assert event["kind"] in EVENT_KINDS
    assert (event["kind"], event["time"], event["service_instance_id"]) == ("configuration", T0, "general-0")
    assert (event["shard"], event["model"], event["source"]) == ("general", "m", "scrape")
    detail = json.loads(str(event["detail"]))
    assert detail["changed"] == {}
    assert detail["configuration"]["cache.0.num_gpu_blocks"] == "100"
    assert detail["configuration"]["vllm_version"] == "0.32.0"


def test_the_same_page_again_brings_nothing() -> None:
    seen, _ = observe(None, page(), at(5), TARGET)
    assert observe(seen, page(tokens=20), at(6), TARGET)[1] == []


def test_a_changed_key_is_told_old_and_new() -> None:
    seen, _ = observe(None, page(), at(5), TARGET)
    _, (event,) = observe(seen, page(blocks=200), at(6), TARGET)
    assert (event["kind"], event["time"]) == ("configuration", at(6))
    assert json.loads(str(event["detail"]))["changed"] == {"cache.0.num_gpu_blocks": ["100", "200"]}
    assert event["title"] == "general-0: 1 settings changed (cache.0.num_gpu_blocks)"


def test_a_later_process_start_is_a_restart_at_that_moment() -> None:
    seen, _ = observe(None, page(), at(5), TARGET)
    _, (event,) = observe(seen, page(start=at(7), tokens=0), at(8), TARGET)
    assert (event["kind"], event["time"]) == ("restart", at(7))


def test_a_restart_with_another_configuration_brings_both() -> None:
    seen, _ = observe(None, page(), at(5), TARGET)
    _, events = observe(seen, page(start=at(7), blocks=50), at(8), TARGET)
    assert [event["kind"] for event in events] == ["restart", "configuration"]
    assert {event["time"] for event in events} == {at(7)}


def test_without_a_process_start_a_restart_is_seen_by_falling_tokens() -> None:
    seen, _ = observe(None, page(start=None), at(5), TARGET)
    seen, events = observe(seen, page(start=None, tokens=11), at(6), TARGET)
    assert events == []
    _, (event,) = observe(seen, page(start=None, tokens=3), at(7), TARGET)
    assert (event["kind"], event["time"]) == ("restart", at(7))
    assert json.loads(str(event["detail"])) == {"generation_tokens_total": ["11", "3"]}


def test_two_processes_behind_one_address_are_not_a_restart_every_time() -> None:
    older, newer = page(start=T0), page(start=at(1))
    seen, _ = observe(None, older, at(5), TARGET)
    ids = []
    for minute in range(6, 12):
        seen, events = observe(seen, newer if minute % 2 else older, at(minute), TARGET)
        ids += [event["event_id"] for event in events]
    assert len(set(ids)) == 1


def test_the_same_observation_has_the_same_id_and_another_has_another() -> None:
    first = observe(None, page(), at(5), TARGET)[1][0]["event_id"]
    assert observe(None, page(tokens=99), at(9), TARGET)[1][0]["event_id"] == first
    assert observe(None, page(blocks=1), at(5), TARGET)[1][0]["event_id"] != first
    assert observe(None, page(), at(5), Target("http://a/metrics", "general-1"))[1][0]["event_id"] != first
    assert observe(None, page(start=at(1)), at(5), TARGET)[1][0]["event_id"] != first


def test_a_version_that_could_not_be_asked_for_is_no_change() -> None:
    seen, _ = observe(None, page(), at(5), TARGET)
    seen, events = observe(seen, page(version=None), at(6), TARGET)
    assert events == []
    _, events = observe(seen, page(start=at(7), version=None), at(8), TARGET)
    assert [event["kind"] for event in events] == ["restart"]


def test_a_new_version_is_told() -> None:
    seen, _ = observe(None, page(), at(5), TARGET)
    _, events = observe(seen, page(start=at(7), version="0.33.0"), at(8), TARGET)
    assert json.loads(str(events[1]["detail"]))["changed"] == {"vllm_version": ["0.32.0", "0.33.0"]}


def test_a_page_without_vllm_series_changes_nothing() -> None:
    seen, _ = observe(None, page(), at(5), TARGET)
    empty = read("process_start_time_seconds 1.7e9\n", at(6), TARGET)
    assert observe(seen, empty, at(6), TARGET) == (seen, [])
