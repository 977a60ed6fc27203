"""What append() returned for is there again, whatever happens to the process or the disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from vllm_slo.exporters.receiver import segment
from vllm_slo.exporters.receiver.spool import (
    Record,
    Spool,
    SpoolBusyError,
    SpoolError,
    SpoolWriteError,
    SystemCalls,
)

A, B, C = Record(1, b"a" * 10), Record(2, b"b" * 300), Record(3, b"c")


def bodies(spool: Spool, number: int) -> list[Record]:
    return list(spool.read(number))


def test_what_was_appended_is_read_back_in_order(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool")
    assert spool.append([A, B]) == spool.append([C]) == 1
    assert spool.seal() == 1
    assert bodies(spool, 1) == [A, B, C]
    assert spool.sealed() == [1]
    spool.close()


def test_more_records_than_one_writev_takes_are_all_written(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool")
    many = [Record(n, b"%d" % n) for n in range(3000)]
    spool.append(many)
    number = spool.seal()
    assert number is not None
    assert bodies(spool, number) == many
    spool.close()


def test_a_restart_seals_what_was_open_and_goes_on_in_a_new_segment(tmp_path: Path) -> None:
    first = Spool.open(tmp_path / "spool")
    first.append([A])
    os.close(first._lock_fd)  # as after kill -9: nothing sealed, nothing closed in order
    second = Spool.open(tmp_path / "spool")
    assert second.id == first.id
    assert second.sealed() == [1]
    assert second.append([B]) == 2
    assert second.torn_tails == 0
    second.close()


@pytest.mark.parametrize("kept", range(segment.FRAME_BYTES + len(B.body)))
def test_a_tail_torn_at_any_byte_is_cut_and_counted(tmp_path: Path, kept: int) -> None:
    spool = Spool.open(tmp_path / "spool")
    spool.append([A])
    good = spool.open_bytes + segment.HEADER_BYTES
    spool.append([B])
    spool.close()
    path = tmp_path / "spool" / "000000000001.seg"
    os.truncate(path, good + kept)
    again = Spool.open(tmp_path / "spool")
    assert bodies(again, 1) == [A]
    assert (again.torn_tails, again.torn_bytes) == ((1, kept) if kept else (0, 0))
    assert path.stat().st_size == good == again.size_bytes
    again.close()


@pytest.mark.parametrize("size", range(segment.HEADER_BYTES))
def test_a_segment_torn_inside_its_header_is_no_segment_and_stops_nothing(tmp_path: Path, size: int) -> None:
    spool = Spool.open(tmp_path / "spool")
    spool.append([A])
    spool.close()
    os.truncate(tmp_path / "spool" / "000000000001.seg", size)
    again = Spool.open(tmp_path / "spool")
    assert again.sealed() == []
    assert again.torn_tails == 1
    assert again.append([B]) == 2
    again.close()


def test_a_tail_of_zeros_is_torn(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool")
    spool.append([A])
    spool.close()
    with (tmp_path / "spool" / "000000000001.seg").open("ab") as file:
        file.write(bytes(4096))
    again = Spool.open(tmp_path / "spool")
    assert bodies(again, 1) == [A]
    assert again.torn_bytes == 4096
    again.close()


def test_a_damaged_record_costs_its_neighbours_nothing(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool")
    spool.append([A, B, C])
    spool.close()
    path = tmp_path / "spool" / "000000000001.seg"
    data = bytearray(path.read_bytes())
    data[data.index(b"bbb") + 7] ^= 1
    path.write_bytes(data)
    again = Spool.open(tmp_path / "spool")
    assert bodies(again, 1) == [A, C]
    assert (again.damaged_records, again.torn_tails) == (1, 0)
    again.close()


def test_a_second_process_is_refused_with_the_owner_named(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool")
    code = (
        "import sys; from pathlib import Path; from vllm_slo.exporters.receiver.spool import Spool, SpoolBusyError\n"
        "try: Spool.open(Path(sys.argv[1]))\nexcept SpoolBusyError as error: print(error)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "spool"], capture_output=True, text=True, check=True
    ).stdout
    assert f"(process {os.getpid()})" in found
    assert "stop it" in found
    with pytest.raises(SpoolBusyError):
        Spool.open(tmp_path / "spool")
    spool.close()
    Spool.open(tmp_path / "spool").close()


def test_a_number_never_comes_twice_even_after_everything_was_retired(tmp_path: Path) -> None:
    seen: list[int] = []
    for _ in range(4):
        spool = Spool.open(tmp_path / "spool")
        for number in spool.sealed():
            spool.retire(number)
        for _ in range(3):
            seen.append(spool.append([A]))
            spool.seal()
            spool.retire(seen[-1])
        assert spool.size_bytes == 0
        os.close(spool._lock_fd)
    assert seen == sorted(set(seen))
    assert len(list((tmp_path / "spool").glob("*.seg"))) == 1


def test_retiring_out_of_order_while_a_segment_is_open_keeps_numbers_apart(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool")
    spool.append([A])
    spool.seal()
    spool.append([B])
    spool.retire(1)
    assert spool.seal() == 2
    spool.retire(2)
    os.close(spool._lock_fd)
    again = Spool.open(tmp_path / "spool")
    assert again.append([C]) == 3
    again.close()


def test_numbers_start_above_what_the_lake_has_seen(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool")
    spool.number_after(41)
    assert spool.append([A]) == 42
    spool.close()


def test_a_lost_id_is_replaced_by_a_new_one(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool")
    spool.close()
    (tmp_path / "spool" / "id").write_text("???")
    again = Spool.open(tmp_path / "spool")
    assert again.id != spool.id
    again.close()


class Disk:
    """System calls of a disk that fails when told to, after writing ``room`` bytes of what it was given."""

    def __init__(self) -> None:
        self.failing: dict[str, int] = {}
        self.room = 0

    def calls(self) -> SystemCalls:
        return SystemCalls(self.writev, self.fdatasync, self.ftruncate)

    def writev(self, fd: int, parts: Sequence[bytes | memoryview]) -> int:
        if "writev" in self.failing:
            if self.room:
                written, self.room = os.write(fd, b"".join(parts)[: self.room]), 0
                return written
            raise OSError(self.failing["writev"], os.strerror(self.failing["writev"]))
        return os.writev(fd, parts)

    def fdatasync(self, fd: int) -> None:
        if "fdatasync" in self.failing:
            raise OSError(self.failing["fdatasync"], os.strerror(self.failing["fdatasync"]))
        os.fdatasync(fd)

    def ftruncate(self, fd: int, size: int) -> None:
        if "ftruncate" in self.failing:
            raise OSError(self.failing["ftruncate"], os.strerror(self.failing["ftruncate"]))
        os.ftruncate(fd, size)


@pytest.mark.parametrize("room", [0, 1, 15, 16, 17, 200])
def test_a_full_disk_keeps_nothing_of_the_append_and_recovers(tmp_path: Path, room: int) -> None:
    disk = Disk()
    spool = Spool.open(tmp_path / "spool", calls=disk.calls())
    spool.append([A])
    size = spool.size_bytes
    disk.failing, disk.room = {"writev": errno.ENOSPC}, room
    with pytest.raises(SpoolWriteError, match="free space") as caught:
        spool.append([B])
    assert caught.value.errno == errno.ENOSPC
    assert spool.size_bytes == size == (tmp_path / "spool" / "000000000001.seg").stat().st_size
    disk.failing = {}
    assert spool.append([C]) == 1
    spool.seal()
    assert bodies(spool, 1) == [A, C]
    spool.close()


@pytest.mark.parametrize("also", [{}, {"ftruncate": errno.EIO}])
def test_after_a_failed_fsync_the_segment_is_sealed_and_the_next_one_serves(
    tmp_path: Path, also: dict[str, int]
) -> None:
    disk = Disk()
    spool = Spool.open(tmp_path / "spool", calls=disk.calls())
    spool.append([A])
    disk.failing = {"fdatasync": errno.EIO, **also}
    with pytest.raises(SpoolWriteError, match="check that disk"):
        spool.append([B])
    disk.failing = {}
    assert spool.sealed() == [1]
    assert spool.append([C]) == 2
    assert bodies(spool, 1)[0] == A
    spool.close()


def test_a_segment_that_cannot_be_begun_leaves_no_file(tmp_path: Path) -> None:
    disk = Disk()
    spool = Spool.open(tmp_path / "spool", calls=disk.calls())
    disk.failing = {"writev": errno.ENOSPC}
    with pytest.raises(SpoolWriteError):
        spool.append([A])
    assert list((tmp_path / "spool").glob("*.seg")) == []
    assert spool.size_bytes == 0
    disk.failing = {}
    assert spool.append([A]) == 1
    spool.close()


def test_quarantine_moves_the_segment_with_its_reason_and_blocks_nothing(tmp_path: Path) -> None:
    spool = Spool.open(tmp_path / "spool")
    spool.append([A])
    spool.seal()
    spool.append([B])
    spool.seal()
    target = spool.quarantine(1, "rows do not fit the schema")
    assert target.parent == tmp_path / "quarantine"
    assert target.with_suffix(".reason.txt").read_text() == "rows do not fit the schema\n"
    assert list(segment.records(target.read_bytes())) == [A]
    assert spool.sealed() == [2]
    assert spool.quarantined == 1
    assert spool.size_bytes == (tmp_path / "spool" / "000000000002.seg").stat().st_size
    spool.close()


def test_a_number_in_quarantine_never_comes_again_and_overwrites_nothing(tmp_path: Path) -> None:
    for content, number in ((A, 1), (B, 2)):
        spool = Spool.open(tmp_path / "spool")
        assert spool.append([content]) == number
        spool.seal()
        spool.quarantine(number, "rows do not fit")
        spool.close()
    kept = sorted((tmp_path / "quarantine").glob("*.seg"))
    assert [list(segment.records(path.read_bytes())) for path in kept] == [[A], [B]]


def test_a_foreign_file_named_like_a_segment_goes_to_quarantine(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "spool" / "000000000007.seg").write_bytes(b"something else entirely")
    spool = Spool.open(tmp_path / "spool")
    assert spool.quarantined == 1
    assert spool.sealed() == []
    assert spool.append([A]) == 8
    spool.close()


def test_a_folder_that_cannot_be_made_is_said_with_the_cure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SpoolError, match="local folder"):
        Spool.open(tmp_path / "file" / "spool")
