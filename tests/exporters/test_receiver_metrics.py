"""The receiver's own series say what happened, and go on counting after a restart."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from receiving import ROOMY, Running, body, receiving
from vllm_slo.exporters.receiver.metrics import COUNTERS, PREFIX, FsyncTimes
from vllm_slo.exporters.receiver.settings import Limits, ReceiverSettings
from vllm_slo.exporters.receiver.tally import Tally


def series(running: Running) -> dict[tuple[str, ...], float]:
    """Samples of ``/metrics`` by name (without prefix) and label values, in the order of the labels' names."""
    text = httpx.get(f"{running.url}/metrics").text
    return {
        (sample.name.removeprefix(PREFIX), *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_what_was_taken_and_refused_is_counted(tmp_path: Path) -> None:
    with receiving(tmp_path, ReceiverSettings(limits=Limits(free_bytes=0, segment_seconds=60))) as running:
        running.export(body(3, text="secret"))
        running.export(body([b"bad", os.urandom(8)]))
        with pytest.raises(grpc.RpcError):
            running.export(b"\xff\xff")
        httpx.post(f"{running.url}/v1/traces", content=b"{", headers={"content-type": "application/json"})
        found = series(running)
        on_disk = sum(path.stat().st_size for path in (tmp_path / "spool").glob("*.seg"))
    assert found[("spans_accepted_total",)] == 4
    assert found[("bodies_total", "accepted", "grpc")] == 1
    assert found[("bodies_total", "partial", "grpc")] == 1
    assert found[("bodies_total", "unusable", "grpc")] == 1
    assert found[("bodies_total", "unusable", "http_json")] == 1
    assert found[("spans_refused_total", "malformed_json")] == 1
    assert sum(value for key, value in found.items() if key[0] == "spans_refused_total") == 3
    assert found[("attributes_dropped_total", "gen_ai.prompt*")] == 3
    assert found[("spool_segments",)] == 1
    assert found[("spool_bytes",)] == on_disk
    assert 0 <= found[("spool_oldest_age_seconds",)] < 10
    assert found[("fsync_seconds_count",)] == 2
    assert found[("fsync_seconds_bucket", "+Inf")] == 2
    assert found[("fsync_seconds_sum",)] > 0
    assert found[("pending_bytes",)] == 0


def test_push_backs_are_counted_by_cause(tmp_path: Path) -> None:
    with receiving(tmp_path, ReceiverSettings(limits=Limits(free_bytes=0, spool_bytes=0))) as running:
        with pytest.raises(grpc.RpcError):
            running.export(body(1))
        found = series(running)
    assert found[("back_pressure_total", "spool_full")] == 1
    assert found[("bodies_total", "pushed_back", "grpc")] == 1
    assert found[("spans_accepted_total",)] == 0


def test_a_torn_tail_is_counted_by_the_next_process(tmp_path: Path) -> None:
    with receiving(tmp_path, ReceiverSettings(limits=ROOMY)) as running:
        running.export(body(1))
    (path,) = (tmp_path / "spool").glob("*.seg")
    with path.open("ab") as file:
        file.write(b"torn")
    with receiving(tmp_path) as running:
        found = series(running)
    assert (found[("torn_tails_total",)], found[("torn_bytes_total",)]) == (1, 4)


def test_every_name_has_its_prefix_and_every_counter_its_help(tmp_path: Path) -> None:
    with receiving(tmp_path) as running:
        families = list(text_string_to_metric_families(httpx.get(f"{running.url}/metrics").text))
    assert {family.name for family in families} >= {PREFIX + counter.count for counter in COUNTERS}
    assert all(family.name.startswith(PREFIX) and family.documentation for family in families)


def test_a_tally_comes_back_as_it_was_saved(tmp_path: Path) -> None:
    tally = Tally()
    tally.add("spans_refused", "bad_id", 3)
    tally.add("spans_accepted", "", 0)
    tally.save(tmp_path / "counters.json")
    again = Tally.load(tmp_path / "counters.json")
    again.add("spans_refused", "bad_id")
    assert again.counts() == {"spans_refused": {"bad_id": 4}}
    assert again.get("spans_refused", "other") == 0


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": 1}', b'{"a": {"b": "x"}}', b"\xff"])
def test_counts_that_cannot_be_read_start_anew(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "counters.json"
    file.write_bytes(content)
    assert Tally.load(file).counts() == {}
    assert Tally.load(tmp_path / "absent").counts() == {}


def test_saving_is_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "counters.json"
    Tally({"a": {"": 1}}).save(file)

    def fail(source: object, target: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="full"):
        Tally({"a": {"": 2}}).save(file)
    assert Tally.load(file).get("a") == 1


def test_the_fsync_histogram_counts_into_the_bucket_of_its_bound() -> None:
    times = FsyncTimes()
    for seconds in (0.0001, 0.0005, 0.0006, 100.0):
        times.observe(seconds)
    buckets = {s.labels["le"]: s.value for s in times.family().samples if s.name.endswith("_bucket")}
    assert (buckets["0.0005"], buckets["0.001"], buckets["5.0"], buckets["+Inf"]) == (2, 3, 3, 4)
