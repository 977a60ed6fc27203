"""Segments enter the lake exactly once, whatever dies in between and whoever else writes."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from lake_rows import NO_REQUESTS, NO_SPANS, NOON, random_requests, requests, spans
from probe_spans import Request, body, edge, event, sample
from vllm_slo.analytics import rollup
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.drain import Applied, Drain
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.maintenance import Maintenance, MaintenanceSettings
from vllm_slo.exporters.otlp import plain
from vllm_slo.exporters.otlp.decoded import DecodeSettings
from vllm_slo.exporters.otlp.lot import Lot
from vllm_slo.serving.partners import request_ids, split, with_partners

BUCKETS = Buckets()
Segment = tuple[int, pa.Table, pa.Table]


def tables(requests: pa.Table, spans: pa.Table) -> dict[str, pa.Table]:
    return {"requests": requests, "spans": spans}


class Died(BaseException):
    """Stands for the end of the process."""


class Dying(Lake):
    """A lake whose process dies at the n-th commit, before or after it takes effect."""

    left: int = 10**9
    after: bool = False

    def _commit(self, *given: Any) -> None:
        self.left -= 1
        if self.left < 0 and not self.after:
            raise Died
        super()._commit(*given)
        if self.left < 0:
            raise Died


def _segments() -> list[Segment]:
    """Three segments with retries of each other inside, and further completions of one request."""
    first = random_requests(60, seed=1)
    second = pa.concat_tables([random_requests(40, seed=2), first.slice(10, 20)])
    family = requests([1, 2, 3], request_id="r", start_time=NOON)
    third = pa.concat_tables([family, second.slice(0, 15)])
    return [
        (1, first, spans(range(20))),
        (2, second, spans(range(10, 30))),
        (4, third, NO_SPANS),
    ]


def _drain_all(drain: Drain) -> list[Applied]:
    return [drain.apply("spool", number, tables(rows, others)) for number, rows, others in _segments()]


def _content(place: Path) -> dict[str, list[Any]]:
    """Every row of the three tables, rollups summed, in a fixed order."""
    lake = Lake.open(place, create=False)
    tables = {name: lake.read(name, lake.data_files(name)) for name in ("requests", "spans", "rollups")}
    tables["rollups"] = rollup.merge(tables["rollups"])
    return {name: sorted(table.to_pylist(), key=repr) for name, table in tables.items()}


def _agree(place: Path) -> None:
    """The rollups are those of the rows in the lake."""
    lake = Lake.open(place, create=False)
    stored = rollup.merge(lake.read("rollups", lake.data_files("rollups")))
    expected = rollup.merge(rollup.rows(lake.read("requests", lake.data_files("requests")), BUCKETS))
    assert sorted(stored.to_pylist(), key=repr) == sorted(expected.to_pylist(), key=repr)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    place = tmp_path_factory.mktemp("undisturbed")
    _drain_all(Drain(Lake.open(place), BUCKETS))
    _agree(place)
    return _content(place)


def test_a_segment_reports_what_it_brought(tmp_path: Path) -> None:
    assert _drain_all(Drain(Lake.open(tmp_path), BUCKETS)) == [
        Applied(requests=60, spans=20),
        Applied(requests=40, spans=10, duplicates=30),
        Applied(requests=3, duplicates=15, shared=2),
    ]
    _agree(tmp_path)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("commit", range(8))
@pytest.mark.parametrize("maintained", [False, True], ids=["", "maintained"])
def test_dying_around_any_commit_and_replaying_gives_the_same_rows(
    tmp_path: Path, undisturbed: dict[str, list[Any]], commit: int, after: bool, maintained: bool
) -> None:
    lake = Dying.open(tmp_path)
    assert isinstance(lake, Dying)
    lake.left, lake.after = commit, after
    drain = Drain(lake, BUCKETS)
    with pytest.raises(Died):
        _drain_all(drain)
    again = Lake.open(tmp_path)
    if maintained:
        eager = MaintenanceSettings(fan_in=2, grace=timedelta(0))
        Maintenance(again, eager, lambda: NOON + timedelta(days=1)).run_once()
    _drain_all(Drain(again, BUCKETS))
    assert _content(tmp_path) == undisturbed


_START = int(NOON.timestamp()) * 10**9
_PROBED = [Request(f"cmpl-{number}-0", _START + number * 10**9) for number in range(12)]


def _probe_segments() -> list[Lot]:
    """Records of twelve requests over three segments: whole, torn apart, twice, aborted, refused, with children."""
    torn, late = _PROBED[:4], _PROBED[4]
    children = [Request("cmpl-n", _START, child=child) for child in (0, 1)]
    aborted = Request("cmpl-aborted", _START, finish_reason="abort")
    first = [
        *(one.engine() for one in _PROBED[:9]),
        *(one.stock() for one in _PROBED[5:]),
        sample(_START),
        late.engine(),
    ]
    second = [*(one.frontend() for one in _PROBED[:4]), *(one.frontend() for one in _PROBED[5:]), torn[0].engine()]
    second += [aborted.frontend(), event(_START, "started"), edge("cmpl-refused", _START, 503)]
    third = [*(one.stock() for one in torn), *(one.engine() for one in _PROBED[9:]), late.frontend(), aborted.engine()]
    third += [record for child in children for record in (child.engine(), child.frontend())]
    third += [sample(_START), sample(_START + 10**9), event(_START, "started"), Request("cmpl-n", _START).stock()]
    return [plain.decode(body(spans), _START + 60 * 10**9, DecodeSettings()).lot for spans in (first, second, third)]


def _drain_probe(drain: Drain, whole: set[int]) -> None:
    """As the draining does: what later segments hold of a segment's requests goes with it, and is skipped later on
    but for the segments in ``whole``, which another process, that remembers nothing, finds again."""
    lots = _probe_segments()
    given = list(lots)
    for number in range(len(lots)):
        mine = lots[number] if number in whole else given[number]
        ids = request_ids(mine.requests)
        taken = []
        if number < 2:
            rows, given[number + 1] = split(given[number + 1], ids)
            taken = [] if rows is None else [rows]
        drain.apply("spool", number + 1, with_partners(mine, taken).tables if taken else mine.tables)


def _probe_content(place: Path) -> dict[str, list[Any]]:
    lake = Lake.open(place, create=False)
    more = {name: lake.read(name, lake.data_files(name)) for name in ("engine_samples", "events")}
    return _content(place) | {name: sorted(table.to_pylist(), key=repr) for name, table in more.items()}


@pytest.fixture(scope="module")
def undisturbed_probe(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    place = tmp_path_factory.mktemp("undisturbed_probe")
    _drain_probe(Drain(Lake.open(place), BUCKETS), set())
    _agree(place)
    return _probe_content(place)


def test_every_request_of_the_probe_counts_once(undisturbed_probe: dict[str, list[Any]]) -> None:
    rows = undisturbed_probe["requests"]
    counted = [row for row in rows if row["quality"] not in ("superseded", "late_record", "shared_request_id")]
    wanted = {one.name for one in _PROBED} | {"cmpl-n", "cmpl-aborted", "cmpl-refused"}
    assert sorted(row["request_id"] for row in counted) == sorted(wanted)
    assert {row["records"] for row in counted if row["quality"] is None} >= {"engine+frontend+edge"}
    assert {row["quality"] for row in rows if row["source"] == "stock"} == {"superseded"}
    assert {row["finish_reason"] for row in counted if row["quality"] == "unfinished"} == {"abort", "rejected"}
    assert len(undisturbed_probe["engine_samples"]) == 2
    assert len(undisturbed_probe["events"]) == 1


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("commit", range(9))
@pytest.mark.parametrize("maintained", [False, True], ids=["", "maintained"])
def test_dying_around_any_commit_of_the_probes_records_gives_the_same_rows(
    tmp_path: Path, undisturbed_probe: dict[str, list[Any]], commit: int, after: bool, maintained: bool
) -> None:
    lake = Dying.open(tmp_path)
    assert isinstance(lake, Dying)
    lake.left, lake.after = commit, after
    with pytest.raises(Died):
        _drain_probe(Drain(lake, BUCKETS), set())
    again = Lake.open(tmp_path)
    if maintained:
        eager = MaintenanceSettings(fan_in=2, grace=timedelta(0))
        Maintenance(again, eager, lambda: NOON + timedelta(days=1)).run_once()
    _drain_probe(Drain(again, BUCKETS), {1, 2})
    _agree(tmp_path)
    assert _probe_content(tmp_path) == undisturbed_probe


def test_replaying_everything_brings_nothing(tmp_path: Path, undisturbed: dict[str, list[Any]]) -> None:
    for _ in range(3):
        brought = _drain_all(Drain(Lake.open(tmp_path), BUCKETS))
    assert brought == [Applied(replayed=True)] * 3
    assert _content(tmp_path) == undisturbed


def test_another_spool_with_the_same_spans_brings_nothing(tmp_path: Path, undisturbed: dict[str, list[Any]]) -> None:
    drain = Drain(Lake.open(tmp_path), BUCKETS)
    _drain_all(drain)
    again = drain.apply("another", 1, tables(*_segments()[0][1:]))
    assert again == Applied(duplicates=80)
    assert _content(tmp_path) == undisturbed


def test_segments_without_rows_commit_nothing(tmp_path: Path) -> None:
    lake = Lake.open(tmp_path)
    before = {name: stats.version for name, stats in lake.table_stats().items()}
    assert Drain(lake, BUCKETS).apply("spool", 1, tables(NO_REQUESTS, NO_SPANS)) == Applied()
    assert {name: stats.version for name, stats in lake.table_stats().items()} == before


def test_two_writers_at_once_keep_each_row_once(tmp_path: Path) -> None:
    Lake.open(tmp_path)
    batches = [random_requests(30, seed) for seed in range(12)]
    failures: list[BaseException] = []

    def write(name: str, order: list[int]) -> None:
        try:
            drain = Drain(Lake.open(tmp_path), BUCKETS)
            for number, place in enumerate(order):
                drain.apply(name, number, {"requests": batches[place]})
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    orders = [random.Random(seed).sample(range(12), 12) for seed in range(2)]
    threads = [threading.Thread(target=write, args=(f"w{i}", order)) for i, order in enumerate(orders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert Lake.open(tmp_path).table_stats()["requests"].rows == 360
    _agree(tmp_path)


def test_rollups_keep_up_when_a_row_is_marked_by_the_lake(tmp_path: Path) -> None:
    drain = Drain(Lake.open(tmp_path), BUCKETS)
    drain.apply("spool", 1, {"requests": requests([1], request_id="r", start_time=NOON)})
    drain.apply("spool", 2, {"requests": requests([2], request_id="r", start_time=NOON)})
    counts = {
        (row["quality"], row["count"])
        for row in _content(tmp_path)["rollups"]
        if row["metric"] == "requests" and row["level"] == "day"
    }
    assert counts == {(None, 1), ("shared_request_id", 1)}


_CHILD = """
    import sys
    from datetime import timedelta
    sys.path.insert(0, sys.argv[2])
    from lake_rows import NOON, random_requests, spans
    from vllm_slo.analytics.buckets import Buckets
    from vllm_slo.analytics.drain import Drain
    from vllm_slo.analytics.lake import Lake
    drain = Drain(Lake.open(sys.argv[1]), Buckets())
    print("ready", flush=True)
    for number in range(40):
        rows = {"requests": random_requests(50, number), "spans": spans(range(number, number + 10))}
        drain.apply("spool", number, rows)
    print("done", flush=True)
"""


@pytest.fixture
def child(tmp_path: Path) -> list[str]:
    script = tmp_path / "child.py"
    script.write_text(textwrap.dedent(_CHILD))
    return [sys.executable, str(script), str(tmp_path / "lake"), str(Path(__file__).parents[1])]


def test_kill_9_at_random_moments_loses_and_doubles_nothing(tmp_path: Path, child: list[str]) -> None:
    chance = random.Random(7)
    kills = 0
    for attempt in range(12):
        with subprocess.Popen(child, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            if attempt < 5:
                time.sleep(chance.uniform(0, 0.8))
                os.kill(process.pid, signal.SIGKILL)
            said = process.stdout.read()
        if said == "done\n":
            break
        kills += 1
    assert said == "done\n"
    assert kills >= 2
    lake = Lake.open(tmp_path / "lake")
    assert (lake.table_stats()["requests"].rows, lake.table_stats()["spans"].rows) == (2000, 49)
    _agree(tmp_path / "lake")
