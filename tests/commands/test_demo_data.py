"""The files of the demo, made from lakes: every row as it is, small, and the same whatever the commits."""

from __future__ import annotations

import importlib.util
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from fixtures.latency_lake import NOON
from fixtures.probe_lake import add, fill, samples, told
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.query import connect
from vllm_slo.commands import demo
from vllm_slo.commands.group import group
from vllm_slo.commands.invocation import Invocation

ROOT = Path(__file__).resolve().parents[2]
BUCKETS = Buckets()
RUN = told(1500, seed=31, hours=0.1, stock=0.1)
LATER = told(1500, seed=32, hours=0.1, stock=0.1)


@pytest.fixture(scope="module")
def packing() -> ModuleType:
    """The script, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("demo_data", ROOT / "benchmarks" / "demo_data.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def recorded(folder: Path, commits: int = 1) -> Lake:
    """A run of two servers with the probe, appended in so many commits, in another order for each number of them."""
    lake = fill(folder, [])
    size = -(-len(RUN) // commits)
    for first in reversed(range(0, len(RUN), size)):
        add(lake, RUN[first : first + size], first=first + 1, buckets=BUCKETS)
    for shard in ("a", "b") if commits == 1 else ("b", "a"):
        lake.append("engine_samples", samples(shard, 600))
    return lake


def test_the_files_are_small_and_the_same_however_the_rows_were_committed(packing: ModuleType, tmp_path: Path) -> None:
    one = packing.of_lakes([recorded(tmp_path / "one")], "x", 5)
    many = packing.of_lakes([recorded(tmp_path / "many", commits=2)], "x", 5)
    assert one == many
    later = fill(tmp_path / "later", [], BUCKETS)
    add(later, LATER, first=5000, buckets=BUCKETS)
    both = packing.of_lakes([recorded(tmp_path / "again"), later], "x", 5)
    assert sum(map(len, both.values())) < packing.MOST_BYTES


def test_a_demo_made_from_lakes_loads_every_row_as_it_was(
    packing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = recorded(tmp_path / "before")
    after = fill(tmp_path / "after", [], BUCKETS)
    add(after, LATER, first=5000, buckets=BUCKETS)
    data = tmp_path / "vllm_slo" / "demo_data"
    data.mkdir(parents=True)
    for name, content in packing.of_lakes([before, after], "a second replica", 5).items():
        (data / name).write_bytes(content)
    monkeypatch.setattr(demo, "files", lambda _: tmp_path / "vllm_slo")
    assert "3000 requests loaded" in demo.load(Invocation(lake_option=str(tmp_path / "lake")))
    assert demo.load(Invocation(lake_option=str(tmp_path / "lake"))) == "loaded before"
    loaded = connect(Lake.open(tmp_path / "lake", create=False), BUCKETS)
    everything = "select * from requests order by start_time, span_id"
    expected = sorted(
        (row for lake in (before, after) for row in connect(lake, BUCKETS).sql(everything).fetchall()),
        key=lambda row: (row[1], row[5]),
    )
    assert sorted(loaded.sql(everything).fetchall(), key=lambda row: (row[1], row[5])) == expected
    ((kept, first, last),) = loaded.sql(
        "select count(*), min(time), max(time) from engine_samples where service_instance_id = 'a'"
    ).fetchall()
    assert (kept, first, last) == (120, NOON, NOON + timedelta(seconds=595))
    ((title, at),) = loaded.sql("select title, time from events where kind = 'deploy'").fetchall()
    began = min(each.at for each in LATER)
    assert (title, at) == ("a second replica", began.replace(microsecond=0))


def test_a_recording_that_is_too_large_is_refused_with_the_cure(
    packing: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path / "lake")
    monkeypatch.setattr(packing, "MOST_BYTES", 1000)
    monkeypatch.setattr("sys.argv", ["demo_data.py", "lakes", str(tmp_path / "lake"), "--output", str(tmp_path)])
    with pytest.raises(SystemExit, match="--every"):
        packing.main()
    assert list(tmp_path.glob("*.gz")) == []


def test_the_demo_that_is_shipped_still_loads(tmp_path: Path) -> None:
    done = CliRunner().invoke(group, ["demo", "--no-app", "--lake", str(tmp_path / "lake")])
    assert done.exit_code == 0, done.exception
