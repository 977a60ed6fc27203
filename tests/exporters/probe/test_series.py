"""Every series of an engine's probe: table, documentation, and what a scrape shows of plain data."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric

from vllm_slo.exporters.probe import collector as collecting
from vllm_slo.exporters.probe.collector import Identity, ProbeCollector
from vllm_slo.exporters.probe.life import DECODE, PREEMPTED, PREFILL, QUEUED
from vllm_slo.exporters.probe.meters import Buckets, Cell, Meters
from vllm_slo.exporters.probe.objectives import SLIS, Objective, read, thresholds
from vllm_slo.exporters.probe.series import ENGINE_LABELS, PREFIX, SERIES
from vllm_slo.exporters.probe.worker import Allocator
from vllm_slo.exporters.schema import ENGINE_SAMPLES

ROOT = Path(__file__).resolve().parent.parent.parent.parent
PAGE = ROOT / "docs" / "probe-metrics.md"
BUCKETS = Buckets.of((("short", 4096), ("medium", 32768), ("long", None)))
WHO = Identity("llama", "general", "0", "0.1.0", "0.32.0")
SECOND = 1_000_000_000
NOW_NS, EPOCH_NS = 5_000 * SECOND, 1_800_000_000 * SECOND


SLO_FILE = """
slos:
  - name: chat-ttft
    sli: time_to_first_token
    threshold_seconds: 0.5
    objective: 0.99
    bucket: short          # optional, as are model, shard and priority
"""


def page() -> str:
    """docs/probe-metrics.md: every series, from the table in the code."""
    labels = ", ".join(f"`{label}`" for label in ENGINE_LABELS)
    rows = [
        f"| `{PREFIX}{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels)} | {one.help} |"
        for one in SERIES
    ]
    return "\n".join(
        [
            "# The probe's series",
            "",
            "What an engine with the [probe](probe.md) serves at `http://127.0.0.1:9464/metrics` (engine *n* of a "
            "server on port 9464 + *n*). This page is generated from `exporters/probe/series.py`.",
            "",
            f"Every series also has the labels {labels}: the served model; `vllm.shard`, else the instance, else the "
            "service; the data-parallel engine. A series without a value is absent, never 0: no GPU, no SLO file, no "
            "sample yet.",
            "",
            "* `bucket` is the context bucket of the prompt (`VLLM_SLO_BUCKETS`), `priority` the class of vLLM's "
            "request priorities that it is in (`VLLM_SLO_PRIORITIES`): at most four.",
            "* Bounds of histograms are 1, 1.5, 2, 3, 5, 7.5 in each decade, and the thresholds of the SLO file "
            "(`VLLM_SLO_FILE`), exactly. A quantile lies in a range whose ends differ by at most two thirds.",
            "* Gauges are of the last second; `vllm_slo_sample_timestamp_seconds` says when that was. Requests in "
            "flight are counted when Prometheus asks.",
            "* An engine that is idle has old steps and no requests in flight. One that is stuck has both:",
            "",
            "```promql",
            "time() - vllm_slo_last_step_timestamp_seconds > 30 and on (model, shard, engine) "
            "sum by (model, shard, engine) (vllm_slo_requests_in_flight) > 0",
            "```",
            "",
            "| series | kind | labels | meaning |",
            "| --- | --- | --- | --- |",
            *rows,
            "",
            "## The SLO file",
            "",
            "`VLLM_SLO_FILE` names it. Each threshold becomes a bound of its histogram, so the share of good requests "
            "is exact, and requests in flight that are beyond it already are counted before they end.",
            "",
            "```yaml",
            SLO_FILE.strip(),
            "```",
            "",
            f"`sli` is one of {', '.join(f'`{sli}`' for sli in SLIS)}. `model`, `shard`, `bucket` and `priority` "
            "choose whom it is for; what is left out chooses all. JSON of the same form works as well. A file "
            "with faults is told in vLLM's log, every fault at once, and the server runs on with default bounds.",
            "",
            "The share of requests within an objective, and those that have lost it already:",
            "",
            "```promql",
            'sum(rate(vllm_slo_time_to_first_token_seconds_bucket{bucket="short", le="0.5"}[5m]))',
            '  / sum(rate(vllm_slo_time_to_first_token_seconds_count{bucket="short"}[5m]))',
            'sum(vllm_slo_requests_in_flight_past_objective{objective="chat-ttft"})',
            "```",
            "",
        ]
    )


@dataclass
class Request:
    """As much of vLLM's as is looked at."""

    num_output_tokens: int = 0


@dataclass
class Life:
    """A request in flight."""

    cell: Cell = ("short", 1)
    arrival_ns: int = EPOCH_NS
    queued_ns: int = NOW_NS
    scheduled_ns: int = 0
    first_token_ns: int = 0
    phase: int = QUEUED
    gap_since_ns: int = 0
    earlier_tokens: int = 0
    request: Any = None


@dataclass
class Records:
    """Counters of an outbox."""

    exported: int = 7
    dropped: int = 2
    failed: int = 1


SAMPLE: dict[str, Any] = {
    "requests_running": 6.0,
    "requests_running_by_bucket": json.dumps({"short": 5, "medium": 1, "long": 0}),
    "requests_waiting_by_bucket": json.dumps({"short": 3, "medium": 0, "long": 1}),
    "requests_waiting_capacity": 3.0,
    "requests_waiting_deferred": 1.0,
    "blocked_by": "kv_blocks",
    "oldest_waiting_seconds": 2.5,
    "steps": 10.0,
    "token_budget": 2048.0,
    "scheduled_prefill_tokens": 10_000.0,
    "scheduled_decode_tokens": 240.0,
    "sequence_cap": 8.0,
    "blocked_kv_blocks_seconds": 0.75,
    "blocked_token_budget_seconds": 0.125,
    "blocked_sequence_cap_seconds": 0.0,
    "kv_blocks_total": 100.0,
    "kv_blocks_used": 60.0,
    "kv_blocks_free": 40.0,
    "kv_blocks_cached": 30.0,
    "kv_blocks_by_bucket": json.dumps({"short": 50, "medium": 10, "long": 0}),
    "kv_block_size_tokens": 16.0,
    "kv_tokens_stored": 900.0,
    "kv_slots_wasted": 60.0,
    "kv_fragmentation_ratio": 0.0625,
    "kv_cache_usage_ratio": 0.6,
}


def made(
    meters: Meters | None = None, lives: dict[str, Life] | None = None, who: Identity = WHO, **more: Any
) -> ProbeCollector:
    """A collector whose clocks stand still."""
    return ProbeCollector(
        meters or Meters(BUCKETS, (-1, 0)),
        who,
        lives if lives is not None else {},
        Records(),
        monotonic_ns=lambda: NOW_NS,
        time_ns=lambda: EPOCH_NS,
        **more,
    )


def families(collector: ProbeCollector) -> dict[str, Metric]:
    """By the name in the table."""
    return {
        metric.name.removeprefix(PREFIX) + ("_total" if metric.type == "counter" else ""): metric
        for metric in collector.collect()
    }


def values(collector: ProbeCollector, name: str, *by: str) -> dict[tuple[str, ...], float]:
    """Values of one series by some labels; no entry where the series is absent."""
    metric = families(collector).get(name)
    return {tuple(s.labels[label] for label in by): s.value for s in metric.samples} if metric else {}


def test_hooks_that_are_off_show_no_numbers_that_stand_still() -> None:
    on = [True]
    collector = made(on=lambda: on[0], errors=lambda: {"engine.added": 10})
    collector.sampled(SAMPLE)
    assert {"queue_seconds", "kv_blocks_used", "requests_in_flight"} <= families(collector).keys()
    on[0] = False
    left = families(collector).keys()
    assert {name for name in left if not name.startswith("probe_")} == set()
    assert values(collector, "probe_errors_total", "hook") == {("engine.added",): 10}


def test_the_page_of_series_is_generated_from_the_table(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run pytest --rewrite-golden tests/exporters/probe/test_series.py"


def test_the_slo_file_of_the_page_is_read(tmp_path: Path) -> None:
    (tmp_path / "slos.yaml").write_text(SLO_FILE)
    expected = Objective("chat-ttft", "time_to_first_token", 0.5, 0.99, bucket="short")
    assert read(tmp_path / "slos.yaml", BUCKETS.names) == (expected,)


def test_names_are_of_the_house() -> None:
    names = [one.name for one in SERIES]
    assert len(set(names)) == len(names)
    for one in SERIES:
        assert one.name.endswith("_total") == (one.kind == "counter"), one.name
        assert not one.name.endswith(("_ms", "_perc", "_percent", "_mb")), one.name
        if one.kind == "histogram":
            assert one.name.endswith("_seconds"), one.name


def test_every_column_shown_is_one_of_the_sample() -> None:
    known = {column.name for column in ENGINE_SAMPLES.columns}
    assert {one.column for one in SERIES if one.column} <= known
    assert set(SAMPLE) <= known


def test_everything_in_the_table_can_be_shown() -> None:
    meters = Meters(BUCKETS, (-1, 0))
    meters.step(1, NOW_NS)
    collector = made(
        meters,
        objectives=[Objective("a", "queue", 1.0, 0.9)],
        workers=lambda: [Allocator("0", 1, 2, 0, 0, 0)],
        errors=lambda: {"schedule": 1},
    )
    collector.sampled(SAMPLE)
    assert families(collector).keys() == {one.name for one in SERIES}


def test_without_a_gpu_a_sample_and_objectives_their_series_are_absent() -> None:
    shown = set(families(made()))
    assert not [name for name in shown if name.startswith(("allocator", "out_of_memory", "kv_blocks", "objective"))]
    assert shown.isdisjoint(
        {"sample_timestamp_seconds", "last_step_timestamp_seconds", "requests_in_flight_past_objective"}
    )
    assert "requests_in_flight" in shown


def test_a_null_of_the_sample_is_absent() -> None:
    collector = made()
    collector.sampled({**SAMPLE, "kv_fragmentation_ratio": None, "kv_blocks_by_bucket": None})
    shown = set(families(collector))
    assert "kv_blocks_used" in shown
    assert shown.isdisjoint({"kv_fragmentation_ratio", "kv_blocks_held"})


def test_gauges_are_those_of_the_last_sample() -> None:
    collector = made()
    collector.sampled({**SAMPLE, "kv_blocks_used": 1.0})
    collector.sampled(SAMPLE)
    assert values(collector, "kv_blocks_used") == {(): 60.0}
    assert values(collector, "kv_blocks_held", "bucket") == {("short",): 50, ("medium",): 10, ("long",): 0}
    assert values(collector, "requests_running", "bucket") == {("short",): 5, ("medium",): 1, ("long",): 0}
    assert values(collector, "requests_waiting_for", "reason") == {
        ("sequence_cap",): 0,
        ("token_budget",): 0,
        ("kv_blocks",): 3,
        ("step",): 0,
        ("deferred",): 1,
    }
    assert values(collector, "token_budget_used_ratio") == {(): 0.5}
    assert values(collector, "sequence_cap_used_ratio") == {(): 0.75}
    assert values(collector, "sample_timestamp_seconds") == {(): EPOCH_NS / SECOND}


def test_a_queue_that_nothing_blocks_waits_for_the_step() -> None:
    collector = made()
    collector.sampled({**SAMPLE, "blocked_by": None})
    assert values(collector, "requests_waiting_for", "reason")["step",] == 3


def test_sums_of_intervals_add_up_to_counters() -> None:
    collector = made()
    for _ in range(4):
        collector.sampled(SAMPLE)
    assert values(collector, "queue_blocked_seconds_total", "reason") == {
        ("sequence_cap",): 0.0,
        ("token_budget",): 0.5,
        ("kv_blocks",): 3.0,
    }
    assert values(collector, "scheduled_tokens_total", "kind") == {("prefill",): 40_000, ("decode",): 960}


def test_counters_begin_at_0_in_every_cell() -> None:
    meters = Meters(BUCKETS, (-1, 0))
    collector = made(meters)
    ended = values(collector, "requests_total", "bucket", "priority", "outcome")
    assert len(ended) == 3 * 3 * 5
    assert set(ended.values()) == {0}
    cell = meters.cell(10, 5)
    meters.finished(cell, "abort", 1)
    meters.preempted(cell, "kv_blocks", 12)
    meters.recomputed(9)
    meters.evicted(4)
    assert values(collector, "requests_total", "bucket", "priority", "outcome")["short", ">=1", "abort"] == 1
    assert values(collector, "preemptions_total", "bucket", "priority", "reason")["short", ">=1", "kv_blocks"] == 1
    assert values(collector, "lost_tokens_total", "bucket", "priority")["short", ">=1"] == 12
    assert values(collector, "recomputed_tokens_total") == {(): 9}
    assert values(collector, "kv_evicted_blocks_total") == {(): 4}


def test_the_last_step_is_told_as_a_time() -> None:
    meters = Meters(BUCKETS)
    meters.step(1, NOW_NS - 40 * SECOND)
    assert values(made(meters), "last_step_timestamp_seconds") == {(): EPOCH_NS / SECOND - 40}


def test_records_that_failed_are_lost_like_those_dropped() -> None:
    collector = made(errors=lambda: {"schedule": 3})
    assert values(collector, "probe_records_exported_total") == {(): 7}
    assert values(collector, "probe_records_dropped_total") == {(): 3}
    assert values(collector, "probe_errors_total", "hook") == {("schedule",): 3}
    assert values(collector, "probe_info", "service_instance_id", "version") == {("", "0.1.0"): 1}
    named = made(who=WHO._replace(instance="vllm-0"))
    assert values(named, "probe_info", "service_instance_id", "vllm_version") == {("vllm-0", "0.32.0"): 1}


def test_allocators_are_shown_by_worker() -> None:
    collector = made(workers=lambda: [Allocator("0", 60, 80, 5, 1, 0), Allocator("1", 0, 0, 0, 0, 2)])
    assert values(collector, "allocator_reserved_bytes", "worker") == {("0",): 80, ("1",): 0}
    assert values(collector, "allocator_inactive_split_bytes", "worker") == {("0",): 5, ("1",): 0}
    assert values(collector, "allocator_fragmentation_ratio", "worker") == {("0",): 0.25}
    assert values(collector, "out_of_memory_errors_total", "worker") == {("0",): 0, ("1",): 2}


class TestInFlight:
    """Requests that an objective has lost before any histogram has them; the threshold is one second."""

    @staticmethod
    def past(sli: str, lives: list[Life], last_step_ns: int = NOW_NS, **filters: Any) -> dict[tuple[str, ...], float]:
        """By bucket and priority."""
        meters = Meters(BUCKETS, (-1, 0))
        meters.last_step_ns = last_step_ns
        objective = Objective("one", sli, 1.0, 0.9, **filters)
        collector = made(meters, {str(n): life for n, life in enumerate(lives)}, objectives=[objective])
        found = values(collector, "requests_in_flight_past_objective", "objective", "bucket", "priority")
        assert {objective for objective, _, _ in found} <= {"one"}
        return {(bucket, priority): count for (_, bucket, priority), count in found.items()}

    def ago(self, seconds: float, now_ns: int = NOW_NS) -> int:
        """That time."""
        return now_ns - round(seconds * SECOND)

    def test_every_cell_has_a_number(self) -> None:
        for sli in SLIS:
            assert set(self.past(sli, []).values()) == {0}
            assert len(self.past(sli, [])) == 9

    def test_the_queue_counts_those_not_yet_scheduled(self) -> None:
        lives = [
            Life(queued_ns=self.ago(1.1)),
            Life(queued_ns=self.ago(1.0)),
            Life(queued_ns=self.ago(9), scheduled_ns=self.ago(8), phase=PREFILL),
            Life(("long", 2), queued_ns=self.ago(5)),
        ]
        found = self.past("queue", lives)
        assert found["short", "0"] == 1
        assert found["long", ">=1"] == 1
        assert sum(found.values()) == 2

    def test_time_to_first_token_counts_those_without_one_from_their_arrival(self) -> None:
        lives = [
            Life(arrival_ns=self.ago(1.5, EPOCH_NS), queued_ns=self.ago(0.5)),
            Life(arrival_ns=self.ago(0.5, EPOCH_NS)),
            Life(arrival_ns=self.ago(9, EPOCH_NS), first_token_ns=self.ago(1), phase=DECODE),
        ]
        assert sum(self.past("time_to_first_token", lives).values()) == 1

    def test_the_duration_counts_whoever_is_still_there(self) -> None:
        lives = [Life(arrival_ns=self.ago(2, EPOCH_NS), first_token_ns=self.ago(1), phase=DECODE), Life()]
        assert sum(self.past("request_duration", lives).values()) == 1

    def test_a_late_token_counts_for_each_that_decodes_when_steps_stop(self) -> None:
        decoding = Life(first_token_ns=self.ago(9), gap_since_ns=self.ago(8), phase=DECODE)
        assert sum(self.past("inter_token_latency", [decoding, Life()], self.ago(0.5)).values()) == 0
        assert sum(self.past("inter_token_latency", [decoding, Life()], self.ago(1.5)).values()) == 1

    def test_a_preempted_request_waits_for_its_token_while_steps_go_on(self) -> None:
        preempted = Life(first_token_ns=self.ago(9), gap_since_ns=self.ago(3), phase=PREEMPTED)
        assert sum(self.past("inter_token_latency", [preempted]).values()) == 1

    def test_the_mean_so_far_counts_from_the_second_token_on(self) -> None:
        lives = [
            Life(first_token_ns=self.ago(9), phase=DECODE, request=Request(1)),
            Life(first_token_ns=self.ago(9), phase=DECODE, request=Request(5)),
            Life(first_token_ns=self.ago(9), phase=DECODE, request=Request(50)),
            Life(first_token_ns=self.ago(9), phase=DECODE, request=None, earlier_tokens=3),
        ]
        assert sum(self.past("time_per_output_token", lives).values()) == 2

    def test_filters_choose_cells(self) -> None:
        lives = [Life(("short", n), queued_ns=self.ago(5)) for n in range(3)] + [Life(("long", 1), queued_ns=0)]
        assert self.past("queue", lives, bucket="short", priority=-7) == {("short", "<=-1"): 1}
        assert self.past("queue", lives, bucket="long") == {("long", "<=-1"): 0, ("long", "0"): 1, ("long", ">=1"): 0}
        assert self.past("queue", lives, model="other") == {}
        assert self.past("queue", lives, shard="other") == {}
        assert sum(self.past("queue", lives, model="llama", shard="general").values()) == 4

    def test_all_are_counted_in_parts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(collecting, "LIVES_AT_ONCE", 3)
        assert sum(self.past("queue", [Life(queued_ns=0) for _ in range(10)]).values()) == 10

    def test_requests_in_flight_are_counted_by_cell(self) -> None:
        found = values(made(lives={"a": Life(), "b": Life(("long", 0))}), "requests_in_flight", "bucket", "priority")
        assert {cell: count for cell, count in found.items() if count} == {("short", "0"): 1, ("long", "<=-1"): 1}


def test_labels_are_escaped() -> None:
    registry = CollectorRegistry()
    registry.register(made(who=WHO._replace(model='a"b\\c\nd')))
    assert 'model="a\\"b\\\\c\\nd"' in generate_latest(registry).decode()


def test_a_scrape_while_the_engine_counts_is_whole() -> None:
    meters = Meters(BUCKETS, (-1, 0))
    lives: dict[str, Life] = {}
    collector = made(meters, lives, objectives=[Objective("a", "queue", 1.0, 0.9)])
    stop, before = threading.Event(), sys.getswitchinterval()

    def work() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            cell = meters.cell(number * 977 % 60_000, number % 5 - 2)
            lives[str(number)] = Life(cell)
            lives.pop(str(number - 40), None)
            meters.scheduled(cell, number)
            meters.finished(cell, f"reason{number % 7}", number)
            meters.preempted(cell, "kv_blocks", 1)

    worker = threading.Thread(target=work)
    sys.setswitchinterval(1e-5)
    try:
        worker.start()
        for _ in range(30):
            for name, metric in families(collector).items():
                if name == "queue_seconds":
                    for sample in metric.samples:
                        assert sample.value >= 0
    finally:
        stop.set()
        worker.join()
        sys.setswitchinterval(before)


def test_a_scrape_offers_the_interpreter_to_the_engine_between_families(monkeypatch: pytest.MonkeyPatch) -> None:
    offers: list[float] = []
    monkeypatch.setattr(collecting.time, "sleep", offers.append)
    shown = families(made())
    assert len(offers) >= len(shown)
    assert set(offers) == {0}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool; apt-get install prometheus")
def test_promtool_has_nothing_to_say_of_the_page() -> None:
    meters = Meters(BUCKETS, (-1, 0), thresholds([Objective("a", "queue", 0.123, 0.9)]))
    meters.scheduled(meters.cell(10, 0), 5_000_000)
    meters.step(1, NOW_NS)
    collector = made(
        meters,
        objectives=[Objective("a", "queue", 1.0, 0.9)],
        workers=lambda: [Allocator("0", 1, 2, 0, 0, 0)],
        errors=lambda: {"schedule": 1},
    )
    collector.sampled(SAMPLE)
    registry = CollectorRegistry()
    registry.register(collector)
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=generate_latest(registry), capture_output=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
