"""Scraped batches are stored once, and the models they name reach the decoders."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import pyarrow as pa
import pytest

from vllm_slo.analytics import events
from vllm_slo.analytics.lake import Lake, LakeError
from vllm_slo.exporters.schema import ENGINE_SAMPLES
from vllm_slo.serving.scraping import LakeSink, Models, models, shards_of

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def samples(*pairs: tuple[str, str | None]) -> pa.Table:
    rows = [
        {"day": date(2026, 11, 30), "time": NOW, "source": "scrape", "service_instance_id": instance, "model": model}
        for instance, model in pairs
    ]
    return pa.Table.from_pylist(rows, schema=ENGINE_SAMPLES.schema)


def event(name: str) -> dict[str, object]:
    (row,) = events.table(
        [{"event_id": name, "time": NOW, "kind": "restart", "title": name, "source": "scrape"}]
    ).to_pylist()
    return dict(row)


def counts(lake: Lake) -> dict[str, int]:
    return {name: stats.rows for name, stats in lake.table_stats().items() if stats.rows}


def test_a_batch_that_failed_half_way_is_stored_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = Lake.open(tmp_path / "lake")
    sink = LakeSink(lake, "scrape0-test", lambda found: None, {})
    rows = samples(("a", "m"), ("b", "m"))
    add = events.add

    def failing(lake: Lake, table: pa.Table) -> int:
        raise LakeError("no space")

    monkeypatch.setattr(events, "add", failing)
    with pytest.raises(LakeError):
        sink(rows, [event("restart-1")])
    monkeypatch.setattr(events, "add", add)
    sink(rows, [event("restart-1")])
    assert counts(lake) == {"engine_samples": 2, "events": 1}


def test_a_new_process_goes_on_with_new_numbers_and_knows_old_events(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path / "lake")
    LakeSink(lake, "scrape0-test", lambda found: None, {})(samples(("a", "m")), [event("restart-1")])
    LakeSink(lake, "scrape0-test", lambda found: None, {})(samples(("a", "m")), [event("restart-1")])
    assert counts(lake) == {"engine_samples": 2, "events": 1}


def test_models_are_told_once_when_they_are_new(tmp_path: Path) -> None:
    told: list[Models] = []
    sink = LakeSink(Lake.open(tmp_path / "lake"), "scrape0-test", told.append, {})
    sink(samples(("a", "m")), [])
    sink(samples(("a", "m")), [])
    sink(samples(("b", "n")), [])
    assert told == [{"a": "m"}, {"a": "m", "b": "n"}]


def test_an_instance_with_two_models_or_none_names_none() -> None:
    assert models(samples(("a", "m"), ("a", "n"), ("b", None), ("c", "m"), ("c", None))) == {"c": "m"}


def test_samples_take_the_shard_that_the_spans_of_their_instance_named(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path / "lake")
    shards = dict(
        shards_of(pa.table({"service_instance_id": ["a", "a", None], "shard": ["general", "general", "nobody"]}))
    )
    LakeSink(lake, "scrape0-test", lambda found: None, shards)(samples(("a", "m"), ("b", "m")), [])
    lake.refresh(ENGINE_SAMPLES.name)
    stored = lake.read(ENGINE_SAMPLES.name, lake.data_files(ENGINE_SAMPLES.name), ["service_instance_id", "shard"])
    assert sorted(stored.to_pylist(), key=str) == [
        {"service_instance_id": "a", "shard": "general"},
        {"service_instance_id": "b", "shard": None},
    ]
