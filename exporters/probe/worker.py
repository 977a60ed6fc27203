"""What PyTorch's allocator holds on the GPUs of a worker, from the worker's process to its engine's.

In a worker a thread reads the allocator once a second, if CUDA is in use there; it never initialises CUDA. It writes
`worker-<process>-<device>.json` in the probe's runtime folder. The engine core reads the files of its own process and
of its children; those of ended processes are removed. Without a GPU nothing is written and there is nothing to read.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Any

from vllm_slo.exporters.probe.settings import Settings

INTERVAL_SECONDS = 1.0
STALE_SECONDS = 10.0
"""A file that old is passed over: its worker hangs, and what it held then says nothing of now."""
FILE_PREFIX = "worker-"


@dataclass(frozen=True)
class Allocator:
    """One device of one worker. Counters are since the start of the process; ``worker`` is its rank."""

    worker: str
    allocated_bytes: int
    reserved_bytes: int
    inactive_split_bytes: int
    retries: int
    out_of_memory_errors: int

    @property
    def fragmentation_ratio(self) -> float | None:
        """1 - allocated / reserved; null when nothing is reserved."""
        return 1 - self.allocated_bytes / self.reserved_bytes if self.reserved_bytes else None


def read_torch() -> list[tuple[int, Allocator]]:
    """(Device, what its allocator holds), of those that this process uses; none where CUDA is not in use yet."""
    torch: Any = sys.modules.get("torch")
    cuda: Any = getattr(torch, "cuda", None)
    if cuda is None or not cuda.is_initialized():
        return []
    distributed: Any = getattr(torch, "distributed", None)
    ranked = distributed is not None and distributed.is_available() and distributed.is_initialized()
    found = []
    for device in range(cuda.device_count()):
        stats = cuda.memory_stats(device)
        if stats.get("reserved_bytes.all.peak", 0):
            found.append((device, from_stats(stats, str(distributed.get_rank() if ranked else device))))
    return found


def from_stats(stats: dict[str, int], worker: str) -> Allocator:
    """What counts of ``torch.cuda.memory_stats``."""
    return Allocator(
        worker=worker,
        allocated_bytes=stats["allocated_bytes.all.current"],
        reserved_bytes=stats["reserved_bytes.all.current"],
        inactive_split_bytes=stats.get("inactive_split_bytes.all.current", 0),
        retries=stats.get("num_alloc_retries", 0),
        out_of_memory_errors=stats.get("num_ooms", 0),
    )


class Writer:
    """Writes the readings of this process. ``read`` gives them, ``clock`` epoch seconds."""

    def __init__(
        self,
        folder: Path,
        read: Callable[[], Iterable[tuple[int, Allocator]]] = read_torch,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder, self._read, self._clock = folder, read, clock

    def write(self) -> None:
        """One file a device, replaced as a whole. Raises OSError, also where the folder is another user's."""
        own = os.getpid()
        for device, reading in self._read():
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _must_be_ours(self._folder)
            path = self._folder / f"{FILE_PREFIX}{own}-{device}.json"
            new = path.with_suffix(".new")
            whose = {"process": own, "parent": os.getppid(), "start": start_of(own), "time": self._clock()}
            new.write_text(json.dumps({**whose, **asdict(reading)}))
            new.replace(path)


class Reader:
    """Reads what the workers of this engine core wrote; ``refresh`` does IO, ``latest`` is what it found last."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._clock = folder, clock
        self.latest: tuple[Allocator, ...] = ()

    def refresh(self) -> None:
        """Reads anew. A file that cannot be read is passed over."""
        own = os.getpid()
        found = []
        try:
            _must_be_ours(self._folder)
        except OSError:
            self.latest = ()
            return
        for path in sorted(self._folder.glob(f"{FILE_PREFIX}*.json")):
            try:
                said = json.loads(path.read_text())
                process = int(said["process"])
                if start_of(process) != said["start"]:
                    path.unlink(missing_ok=True)
                    continue
                if own not in (process, said["parent"]) or self._clock() - said["time"] > STALE_SECONDS:
                    continue
                fields = {name: said[name] for name in Allocator.__dataclass_fields__}
                found.append(Allocator(**fields))
            except (OSError, ValueError, KeyError, TypeError):
                continue
        self.latest = tuple(sorted(found, key=lambda one: (len(one.worker), one.worker)))


def _must_be_ours(folder: Path) -> None:
    """In a folder for everybody's files another user may have made it first, with links in it."""
    status = folder.lstat()
    if not S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of this user")


def columns(readings: Sequence[Allocator]) -> dict[str, float | None]:
    """Columns of `engine_samples`: sums over the workers, the ratio of the worst; null without readings."""
    ratios = [one.fragmentation_ratio for one in readings if one.fragmentation_ratio is not None]
    sums = {
        "gpu_memory_allocated_bytes": [one.allocated_bytes for one in readings],
        "gpu_memory_reserved_bytes": [one.reserved_bytes for one in readings],
        "gpu_memory_inactive_bytes": [one.inactive_split_bytes for one in readings],
        "gpu_allocation_retries_total": [one.retries for one in readings],
        "out_of_memory_errors_total": [one.out_of_memory_errors for one in readings],
    }
    found: dict[str, float | None] = {name: sum(values) if values else None for name, values in sums.items()}
    return {**found, "gpu_fragmentation_ratio": max(ratios, default=None)}


def start_of(process: int) -> str:
    """When the process was started, in the kernel's ticks: tells it from a later one of the same number.

    Empty where it has ended (a zombie has, too), or its folder in /proc cannot be read.
    """
    try:
        with open(f"/proc/{process}/stat", encoding="utf-8", errors="replace") as stat:
            # The name of the program stands in brackets and may hold anything.
            after_name = stat.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if after_name[0] in ("Z", "X") else after_name[19]


def install(settings: Settings) -> None:
    """Starts the thread in this process, and in those forked from it."""
    writer = Writer(settings.runtime_dir)
    _start(writer)
    os.register_at_fork(after_in_child=lambda: _start(writer))


def _start(writer: Writer) -> None:
    threading.Thread(target=_run, args=(writer,), name="vllm-slo-worker", daemon=True).start()


def _run(writer: Writer) -> None:
    """Until the process ends; a reading that fails is left out, the next one may not."""
    while True:
        time.sleep(INTERVAL_SECONDS)
        try:
            writer.write()
        except Exception:  # noqa: BLE001
            continue
