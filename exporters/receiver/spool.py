"""The folder where accepted bodies wait for the lake: what ``append`` returned for is on disk, whatever happens next.

    <spool>/lock                 held while a process owns the folder
    <spool>/id                   uuid under which the lake remembers the segments it has taken
    <spool>/000000000001.seg     segments, see ``segment``
    <quarantine>/<uuid>-000000000001.seg and .reason.txt

A number never comes twice under one id, whatever process dies when: the file that bears the highest number stays,
emptied once its rows are in the lake, until a file with a higher one is on disk; those in quarantine count too.
"""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.receiver import segment
from vllm_slo.exporters.receiver.segment import Record, SegmentError

__all__ = ["Record", "Spool", "SpoolBusyError", "SpoolError", "SpoolWriteError", "SystemCalls"]

_MOST_BUFFERS = 1024
"""Buffers handed to one writev; Linux allows 1024 (IOV_MAX)."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_NEEDS = "the spool needs a local folder that this user may write"


class SpoolError(SloError):
    """The spool folder cannot be used."""


class SpoolBusyError(SpoolError):
    """Another process owns the spool folder."""


class SpoolWriteError(SpoolError):
    """Nothing of this append was kept; the sender must try again later. ``errno`` says why."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(message)
        self.errno = number


@dataclass(frozen=True)
class SystemCalls:
    """The system calls that can fail on a full or broken disk; tests hand in failing ones."""

    writev: Callable[[int, Sequence[bytes | memoryview]], int] = os.writev
    fdatasync: Callable[[int], None] = os.fdatasync
    ftruncate: Callable[[int, int], None] = os.ftruncate


@dataclass
class _Open:
    number: int
    path: Path
    fd: int
    size: int
    records: int = 0


class Spool:
    """One owner, any threads: ``append`` and ``seal`` on one side, ``sealed``, ``read`` and ``retire`` on the other.

    ``size_bytes`` is what the segments take on disk. ``torn_tails``, ``torn_bytes``, ``damaged_records`` and
    ``quarantined`` count what was found since the spool was opened.
    """

    def __init__(self, folder: Path, quarantine: Path, lock: int, calls: SystemCalls) -> None:
        self.folder = folder
        self.quarantine_folder = quarantine
        self.torn_tails = self.torn_bytes = self.damaged_records = self.quarantined = 0
        self.size_bytes = 0
        self._calls = calls
        self._lock_fd = lock
        self._guard = threading.RLock()
        self._open: _Open | None = None
        self._sealed: dict[int, int] = {}
        self._last = 0
        self._marker: Path | None = None
        self.id = self._identity()
        self._recover()

    @classmethod
    def open(cls, folder: Path, quarantine: Path | None = None, calls: SystemCalls | None = None) -> Spool:
        """The spool in ``folder``, created when absent; every segment found there is sealed, its torn tail cut.

        ``quarantine`` is a sibling folder of that name unless given. Raises SpoolBusyError when another process owns
        the folder, SpoolError when it cannot be used.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise SpoolError(
                f"{folder}: {error.strerror}; the spool needs a local folder that this user may write"
            ) from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            owner = os.read(lock, 32).decode("ascii", "replace").strip()
            os.close(lock)
            raise SpoolBusyError(
                f"{folder}: another receiver (process {owner or 'unknown'}) owns this spool; "
                "stop it, or give this one a lake or a spool folder of its own"
            ) from error
        try:
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            return cls(folder, quarantine or folder.parent / "quarantine", lock, calls or SystemCalls())
        except OSError as error:
            os.close(lock)
            raise SpoolError(f"{folder}: {error.strerror}; {_NEEDS}") from error
        except BaseException:
            os.close(lock)
            raise

    @property
    def open_records(self) -> int:
        """Records in the segment that is being written."""
        current = self._open
        return current.records if current else 0

    @property
    def open_bytes(self) -> int:
        """Bytes of the segment that is being written, its header not among them."""
        current = self._open
        return current.size - segment.HEADER_BYTES if current else 0

    @property
    def open_number(self) -> int | None:
        """Number of the segment that is being written."""
        current = self._open
        return current.number if current else None

    @property
    def segments(self) -> int:
        """Segments on disk."""
        return len(self._sealed) + (self._open is not None)

    def append(self, records: Sequence[Record]) -> int:
        """The number of the segment in which all records are now on disk (written, fsynced, its folder too).

        Raises SpoolWriteError when that could not be done; then none of them is kept.
        """
        with self._guard:
            current = self._open or self._begin()
            parts: list[bytes | memoryview] = list(segment.encode(records))
            total = sum(map(len, parts))
            try:
                self._write(current.fd, parts)
                self._calls.fdatasync(current.fd)
            except OSError as error:
                self._undo(current, error)
                raise self._failed(current.path, error) from error
            current.size += total
            current.records += len(records)
            self.size_bytes += total
            return current.number

    def seal(self) -> int | None:
        """End the open segment and hand it to the drain; its number, or None when nothing was in it."""
        with self._guard:
            current = self._open
            if current is None:
                return None
            self._open = None
            os.close(current.fd)
            if not current.records:
                self._marker = current.path
                self.size_bytes -= current.size
                return None
            self._sealed[current.number] = current.size
            return current.number

    def number_after(self, number: int) -> None:
        """Give new segments numbers above ``number``: the highest that the lake has seen under this spool's id."""
        with self._guard:
            self._last = max(self._last, number)

    def sealed(self) -> list[int]:
        """Numbers of the sealed segments, oldest first."""
        with self._guard:
            return sorted(self._sealed)

    def size_of(self, number: int) -> int:
        """Bytes of a sealed segment; 0 when it is not there."""
        with self._guard:
            return self._sealed.get(number, 0)

    def written_time(self, number: int) -> float:
        """When a sealed segment was last written, in epoch seconds; 0 when it is not there."""
        try:
            return self._path(number).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def oldest_mtime(self) -> float | None:
        """When the oldest segment on disk was last written, in epoch seconds."""
        with self._guard:
            numbers = sorted(self._sealed) or ([self._open.number] if self._open else [])
        try:
            return self._path(numbers[0]).stat().st_mtime if numbers else None
        except FileNotFoundError:
            return None

    def read(self, number: int) -> Iterator[Record]:
        """The records of a sealed segment; damaged ones are left out. Raises SegmentError when it is no segment."""
        path = self._path(number)
        data = path.read_bytes()
        segment.check_header(data, str(path))
        yield from segment.records(data)

    def retire(self, number: int) -> None:
        """Remove a segment whose rows are in the lake."""
        with self._guard:
            path = self._path(number)
            if number == self._last:
                os.truncate(path, segment.HEADER_BYTES)
                self._marker = path
            else:
                path.unlink(missing_ok=True)
            self.size_bytes -= self._sealed.pop(number)

    def quarantine(self, number: int, reason: str) -> Path:
        """Set a segment that cannot be decoded aside, with the reason beside it; where it went."""
        with self._guard:
            target = self._set_aside(self._path(number), reason)
            self.size_bytes -= self._sealed.pop(number)
            return target

    def close(self) -> None:
        """Seal the open segment and give the folder up."""
        with self._guard:
            self.seal()
            if self._lock_fd >= 0:
                os.close(self._lock_fd)
                self._lock_fd = -1

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:012d}.seg"

    def _begin(self) -> _Open:
        number = self._last + 1
        path = self._path(number)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
        except OSError as error:
            raise self._failed(path, error) from error
        try:
            self._write(fd, [segment.header()])
            self._calls.fdatasync(fd)
            _fsync_folder(self.folder)
        except OSError as error:
            os.close(fd)
            try:
                path.unlink()
            except OSError:
                self._last = number
            raise self._failed(path, error) from error
        self._drop_marker()
        self._last = number
        self._open = _Open(number, path, fd, segment.HEADER_BYTES)
        self.size_bytes += segment.HEADER_BYTES
        return self._open

    def _write(self, fd: int, parts: list[bytes | memoryview]) -> None:
        position = 0
        while position < len(parts):
            written = self._calls.writev(fd, parts[position : position + _MOST_BUFFERS])
            while position < len(parts) and written >= len(parts[position]):
                written -= len(parts[position])
                position += 1
            if written:
                parts[position] = memoryview(parts[position])[written:]

    def _undo(self, current: _Open, error: OSError) -> None:
        """Cut what the failed append left. After anything but a full disk the file is not trusted with more."""
        try:
            self._calls.ftruncate(current.fd, current.size)
            trusted = error.errno in _FULL
        except OSError:
            trusted = False
        if not trusted:
            self.seal()

    def _failed(self, path: Path, error: OSError) -> SpoolWriteError:
        cure = "free space on that disk" if error.errno in _FULL else "check that disk"
        return SpoolWriteError(
            f"{path}: {error.strerror}; nothing was accepted, senders are asked to retry; {cure}", error.errno
        )

    def _identity(self) -> str:
        path = self.folder / "id"
        try:
            return str(uuid.UUID(path.read_text(encoding="ascii").strip()))
        except FileNotFoundError:
            pass
        except ValueError:
            # A new id is safe: at worst rows of segments still here are sent again, and the lake knows them by span id.
            path.replace(path.with_suffix(".damaged"))
        identity = str(uuid.uuid4())
        draft = path.with_suffix(".draft")
        with draft.open("w", encoding="ascii") as file:
            file.write(identity + "\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
        _fsync_folder(self.folder)
        return identity

    def _set_aside(self, path: Path, reason: str) -> Path:
        self.quarantine_folder.mkdir(parents=True, exist_ok=True)
        target = self.quarantine_folder / f"{self.id}-{path.name}"
        target.with_suffix(".reason.txt").write_text(reason.rstrip() + "\n", encoding="utf-8")
        path.replace(target)
        self.quarantined += 1
        return target

    def _recover(self) -> None:
        for path in self.quarantine_folder.glob(f"{self.id}-*.seg"):
            aside = path.stem.removeprefix(f"{self.id}-")
            self._last = max(self._last, int(aside) if aside.isdigit() else 0)
        for path in sorted(self.folder.glob("*.seg")):
            if not path.stem.isdigit():
                continue
            number = int(path.stem)
            data = path.read_bytes()
            if len(data) < segment.HEADER_BYTES:
                self._torn(len(data))
                self._leave_marker(path, number)
                continue
            try:
                segment.check_header(data, str(path))
            except SegmentError as error:
                self._set_aside(path, str(error))
                self._last = max(self._last, number)
                continue
            found = segment.extent(data)
            self.damaged_records += found.damaged
            if found.torn_bytes:
                self._torn(found.torn_bytes)
                os.truncate(path, found.end)
            if found.records:
                self._drop_marker()
                self._last = max(self._last, number)
                self._sealed[number] = found.end
                self.size_bytes += found.end
            else:
                self._leave_marker(path, number)

    def _leave_marker(self, path: Path, number: int) -> None:
        self._drop_marker()
        self._last = max(self._last, number)
        self._marker = path

    def _drop_marker(self) -> None:
        if self._marker:
            self._marker.unlink(missing_ok=True)
            self._marker = None

    def _torn(self, size: int) -> None:
        self.torn_tails += 1
        self.torn_bytes += size


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
