"""What workers' allocators hold, from injected readings through files to the sample and the series."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_slo.exporters.probe import worker
from vllm_slo.exporters.probe.worker import Allocator, Reader, Writer, columns, from_stats, read_torch
from vllm_slo.exporters.schema import ENGINE_SAMPLES

FIRST = Allocator("0", 60, 80, 5, 1, 0)
SECOND = Allocator("1", 10, 40, 2, 0, 3)
NOW = 1_800_000_000.0


def write(folder: Path, *readings: Allocator, at: float = NOW) -> None:
    """As a worker in this process would."""
    Writer(folder, lambda: enumerate(readings), lambda: at).write()


def read(folder: Path, at: float = NOW) -> tuple[Allocator, ...]:
    """As the engine core in this process would."""
    reader = Reader(folder, lambda: at)
    reader.refresh()
    return reader.latest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runtime"


class Child:
    """A process of ours that writes a file for itself and lives until it is told to end."""

    CODE = """
import sys
from pathlib import Path
from vllm_slo.exporters.probe.worker import Allocator, Writer
Writer(Path(sys.argv[1]), lambda: [(0, Allocator(sys.argv[2], 1, 2, 0, 0, 0))], lambda: float(sys.argv[3])).write()
print("written", flush=True)
sys.stdin.read()
"""

    def __init__(self, folder: Path, rank: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.CODE, str(folder), rank, str(NOW)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"written\n"

    def kill(self) -> None:
        """Without being waited for, as a parent does that has not noticed yet."""
        self.process.kill()
        while worker.start_of(self.process.pid):
            time.sleep(0.01)

    def close(self) -> None:
        """Waits for its end."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child(folder: Path) -> Iterator[Child]:
    made = Child(folder, "1")
    yield made
    made.close()


def test_what_a_worker_writes_its_engine_reads(folder: Path) -> None:
    write(folder, FIRST, SECOND)
    assert read(folder) == (FIRST, SECOND)
    assert FIRST.fragmentation_ratio == 0.25


def test_a_later_reading_takes_the_place_of_the_one_before(folder: Path) -> None:
    write(folder, SECOND)
    write(folder, FIRST)
    assert read(folder) == (FIRST,)
    assert [path.suffix for path in folder.iterdir()] == [".json"]


def test_workers_in_children_are_read_in_the_order_of_their_ranks(folder: Path, child: Child) -> None:
    others = [Child(folder, rank) for rank in ("10", "2")]
    try:
        assert [one.worker for one in read(folder)] == ["1", "2", "10"]
    finally:
        for other in others:
            other.close()


def test_files_of_ended_workers_are_removed_also_before_they_are_waited_for(folder: Path, child: Child) -> None:
    child.kill()
    assert read(folder) == ()
    assert list(folder.iterdir()) == []


def test_a_number_that_another_process_has_now_is_an_ended_worker(folder: Path) -> None:
    write(folder, FIRST)
    (path,) = folder.iterdir()
    path.write_text(json.dumps({**json.loads(path.read_text()), "start": "1"}))
    assert read(folder) == ()
    assert not path.exists()


def test_files_of_another_server_are_left_alone(folder: Path) -> None:
    write(folder, FIRST)
    (path,) = folder.iterdir()
    said = {**json.loads(path.read_text()), "process": 1, "parent": 0, "start": worker.start_of(1)}
    path.write_text(json.dumps(said))
    assert read(folder) == ()
    assert path.exists()


def test_a_reading_that_is_old_is_absent(folder: Path) -> None:
    write(folder, FIRST)
    assert read(folder, NOW + worker.STALE_SECONDS) == (FIRST,)
    assert read(folder, NOW + worker.STALE_SECONDS + 1) == ()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"process": "x"}', "null"])
def test_a_file_that_cannot_be_read_is_passed_over(folder: Path, text: str) -> None:
    write(folder, FIRST)
    (folder / "worker-1-0.json").write_text(text)
    assert read(folder) == (FIRST,)


def test_without_a_gpu_nothing_is_written_and_everything_is_null(folder: Path) -> None:
    write(folder)
    assert not folder.exists()
    assert read(folder) == ()
    assert set(columns(()).values()) == {None}


def test_columns_are_sums_and_the_worst_ratio() -> None:
    found = columns((FIRST, SECOND))
    assert found == {
        "gpu_memory_allocated_bytes": 70,
        "gpu_memory_reserved_bytes": 120,
        "gpu_memory_inactive_bytes": 7,
        "gpu_allocation_retries_total": 1,
        "out_of_memory_errors_total": 3,
        "gpu_fragmentation_ratio": 0.75,
    }
    assert set(found) <= {column.name for column in ENGINE_SAMPLES.columns}


def test_an_allocator_that_holds_nothing_has_no_fragmentation() -> None:
    assert Allocator("0", 0, 0, 0, 0, 0).fragmentation_ratio is None


def test_a_folder_that_another_user_made_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(folder, FIRST)
    user = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: user + 1)
    with pytest.raises(PermissionError):
        write(folder, SECOND)
    assert read(folder) == ()


def test_a_link_in_place_of_the_folder_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError):
        write(folder, FIRST)
    assert list((tmp_path / "elsewhere").iterdir()) == []


class Cuda(SimpleNamespace):
    """`torch.cuda` as far as it is asked; asking it to initialise is a failure."""

    def memory_stats(self, device: int) -> dict[str, int]:
        assert self.initialised
        return dict(self.stats[device])

    def is_initialized(self) -> bool:
        return bool(self.initialised)

    def device_count(self) -> int:
        assert self.initialised, "counting devices may initialise CUDA"
        return len(self.stats)

    def is_available(self) -> bool:
        raise AssertionError("asking for devices may initialise CUDA")


# Keys of torch.cuda.memory_stats, of PyTorch 2.x; the rest of its hundred are not asked for.
STATS = {
    "allocated_bytes.all.current": 60,
    "reserved_bytes.all.current": 80,
    "reserved_bytes.all.peak": 90,
    "inactive_split_bytes.all.current": 5,
    "num_alloc_retries": 1,
    "num_ooms": 2,
}


class TestTorch:
    """What is asked of PyTorch."""

    @staticmethod
    def torch(monkeypatch: pytest.MonkeyPatch, rank: int | None = None, **cuda: Any) -> None:
        distributed = SimpleNamespace(
            is_available=lambda: True, is_initialized=lambda: rank is not None, get_rank=lambda: rank
        )
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda(**cuda), distributed=distributed))

    def test_nothing_before_somebody_else_imported_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        assert read_torch() == []
        assert "torch" not in sys.modules

    def test_cuda_is_never_initialised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torch(monkeypatch, initialised=False, stats=[STATS])
        assert read_torch() == []

    def test_a_device_that_this_process_does_not_use_is_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torch(monkeypatch, initialised=True, stats=[{}, STATS, {**STATS, "reserved_bytes.all.peak": 0}])
        assert read_torch() == [(1, Allocator("1", 60, 80, 5, 1, 2))]

    def test_the_rank_is_the_name_where_there_is_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.torch(monkeypatch, rank=3, initialised=True, stats=[STATS])
        assert read_torch() == [(0, Allocator("3", 60, 80, 5, 1, 2))]

    def test_counters_that_an_allocator_does_not_keep_are_0(self) -> None:
        few = {key: value for key, value in STATS.items() if key.endswith("bytes.all.current")}
        assert from_stats(few, "0") == Allocator("0", 60, 80, 5, 0, 0)


FORKING = """
import os, sys, time
from pathlib import Path
from types import SimpleNamespace
from vllm_slo.exporters.probe import worker
worker.INTERVAL_SECONDS = 0.05
calls = 0
def reading():
    global calls
    calls += 1
    if calls == 1:
        raise RuntimeError("the first one fails")
    return [(0, worker.Allocator("0", 1, 2, 0, 0, 0))]
worker.read_torch = reading
worker.Writer.__init__.__defaults__ = (reading, time.time)
folder = Path(sys.argv[1])
worker.install(SimpleNamespace(runtime_dir=folder))
if os.fork() == 0:
    calls = 0
deadline = time.monotonic() + 20
own = folder / f"worker-{os.getpid()}-0.json"
while not own.exists() and time.monotonic() < deadline:
    time.sleep(0.02)
print(own.exists(), flush=True)
"""


def test_the_thread_survives_errors_and_runs_in_forked_workers_too(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING, str(folder)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["True", "True"], done.stderr
