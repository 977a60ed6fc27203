"""Segments reach the lake in order, once, whatever fails in between; what never fits is set aside."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from probe_spans import Request, edge, event, sample
from probe_spans import body as probe_body
from receiving import body
from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.drain import Drain
from vllm_slo.analytics.lake import Lake as RealLake
from vllm_slo.analytics.lake import LakeError
from vllm_slo.exporters.otlp import plain
from vllm_slo.exporters.otlp.decoded import Decoded, DecodeSettings
from vllm_slo.exporters.otlp.lot import Lot, Tables
from vllm_slo.exporters.receiver.spool import Record, Spool
from vllm_slo.exporters.receiver.tally import Tally
from vllm_slo.serving import draining
from vllm_slo.serving.draining import Commit, Committed, Draining


class Rows:
    """Rows in memory, as the intake keeps them."""

    settings = DecodeSettings()

    def __init__(self) -> None:
        self.sealed = threading.Event()
        self.kept: dict[int, Lot] = {}

    def tables(self, number: int) -> Lot | None:
        return self.kept.pop(number, None)


class Lake:
    """Remembers what was committed; fails when told to."""

    def __init__(self) -> None:
        self.committed: list[tuple[int, int]] = []
        self.requests: list[list[str]] = []
        self.failing: Callable[[int], Exception | None] = lambda number: None
        self.tries = 0

    def commit(self, writer: str, number: int, tables: Tables) -> Committed:
        self.tries += 1
        error = self.failing(number)
        if error is not None:
            raise error
        self.committed.append((number, sum(rows.num_rows for rows in tables.values())))
        self.requests.append(tables["requests"]["records"].to_pylist() if "requests" in tables else [])
        return Committed(1)


def committing(lake: RealLake) -> Commit:
    """What `up` hands to the draining."""
    drain = Drain(lake, Buckets())

    def commit(writer: str, number: int, tables: Tables) -> Committed:
        applied = drain.apply(writer, number, tables)
        return Committed(applied.duplicates, applied.replayed)

    return commit


class Bench:
    def __init__(self, folder: Path, window_seconds: float = 3.0) -> None:
        self.spool, self.rows, self.lake, self.tally = Spool.open(folder / "spool"), Rows(), Lake(), Tally()
        self.decoded = 0
        self.counters = folder / "spool" / "counters.json"
        self.draining = Draining(
            self.spool, self.rows, self.decode, self.lake.commit, self.tally, self.counters, save_seconds=0.05,
            window_seconds=window_seconds,
        )  # fmt: skip

    def decode(self, data: bytes, received_ns: int, settings: DecodeSettings) -> Decoded:
        self.decoded += 1
        return plain.decode(data, received_ns, settings)

    def segment(self, *counts: int) -> int:
        return self.sealed(*(body(count) for count in counts))

    def sealed(self, *bodies: bytes) -> int:
        self.spool.append([Record(time.time_ns(), data) for data in bodies])
        number = self.spool.seal()
        assert number is not None
        self.rows.sealed.set()
        return number

    def wait(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 10
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@contextmanager
def bench(folder: Path, window_seconds: float = 3.0) -> Iterator[Bench]:
    found = Bench(folder, window_seconds)
    try:
        yield found
    finally:
        if found.draining._thread.is_alive():
            found.draining.stop(0)
        found.spool.close()


def test_segments_go_in_order_and_leave_the_spool(tmp_path: Path) -> None:
    with bench(tmp_path) as found:
        found.segment(2, 3)
        found.segment(1)
        found.draining.start()
        found.wait(lambda: not found.spool.sealed())
        found.segment(4)
        found.wait(lambda: not found.spool.sealed())
        found.draining.stop(5)
        assert found.lake.committed == [(1, 5), (2, 1), (3, 4)]
        assert found.draining.committed_time is not None
        assert Tally.load(found.counters).counts() == {"segments_committed": {"": 3}, "spans_duplicate": {"": 3}}


def test_rows_in_memory_are_not_decoded_again(tmp_path: Path) -> None:
    with bench(tmp_path) as found:
        number = found.segment(2)
        decoded = plain.decode(body(2), 1, DecodeSettings())
        found.rows.kept[number] = decoded.lot
        found.draining.start()
        found.draining.stop(5)
        assert found.lake.committed == [(1, 2)]
        assert found.decoded == 0


@pytest.mark.parametrize("error", [LakeError("no space"), OSError(28, "No space left on device"), MemoryError()])
def test_a_failing_lake_is_tried_until_it_works(tmp_path: Path, error: Exception) -> None:
    with bench(tmp_path) as found:
        found.lake.failing = lambda number: error if found.lake.tries < 4 else None
        found.segment(1)
        found.segment(1)
        found.draining.start()
        found.wait(lambda: not found.spool.sealed())
        assert found.lake.committed == [(1, 1), (2, 1)]
        assert found.tally.get("lake_errors", type(error).__name__) == 3
        assert found.spool.quarantined == 0


def test_while_the_lake_fails_a_stop_does_not_hang_and_nothing_is_lost(tmp_path: Path) -> None:
    with bench(tmp_path) as found:
        found.lake.failing = lambda number: LakeError("gone")
        found.segment(1)
        found.draining.start()
        found.wait(lambda: found.lake.tries > 0)
        start = time.monotonic()
        found.draining.stop(0.5)
        assert time.monotonic() - start < 3
        assert found.spool.sealed() == [1]


def test_a_segment_that_cannot_be_decoded_is_set_aside_and_the_next_one_goes_on(tmp_path: Path) -> None:
    with bench(tmp_path) as found:
        found.spool.append([Record(1, b"\xff\xff no protobuf")])
        found.spool.seal()
        found.segment(1)
        found.draining.start()
        found.wait(lambda: not found.spool.sealed())
        assert found.lake.committed == [(2, 1)]
        assert found.tally.get("segments_quarantined") == 1
    (reason,) = (tmp_path / "quarantine").glob("*.reason.txt")
    assert reason.read_text().startswith("cannot be decoded: BodyError")


def test_a_file_damaged_after_it_was_sealed_is_set_aside(tmp_path: Path) -> None:
    with bench(tmp_path) as found:
        number = found.segment(1)
        (tmp_path / "spool" / f"{number:012d}.seg").write_bytes(b"overwritten by somebody")
        found.draining.start()
        found.wait(lambda: not found.spool.sealed())
        assert found.spool.quarantined == 1


def test_a_segment_that_finds_no_memory_for_its_decoding_is_tried_again(tmp_path: Path) -> None:
    with bench(tmp_path) as found:
        found.draining._decode = lambda *arguments: _fail_once(found, *arguments)
        found.segment(1)
        found.draining.start()
        found.wait(lambda: not found.spool.sealed())
        assert found.lake.committed == [(1, 1)]
        assert found.spool.quarantined == 0
        assert found.tally.get("lake_errors", "MemoryError") == 1


def _fail_once(found: Bench, data: bytes, received_ns: int, settings: DecodeSettings) -> Decoded:
    if not found.decoded:
        found.decoded += 1
        raise MemoryError
    return plain.decode(data, received_ns, settings)


def test_a_damaged_file_of_the_lake_pushes_no_segment_into_quarantine(tmp_path: Path) -> None:
    lake = RealLake.open(tmp_path / "lake")
    with bench(tmp_path) as found:
        found.draining._commit = lambda *arguments: committing(lake)(*arguments)
        found.segment(1)
        found.draining.start()
        found.wait(lambda: not found.spool.sealed())
        (path,) = map(Path, lake.files("requests") + lake.files("spans"))
        whole = path.read_bytes()
        path.write_bytes(whole[:-20])
        found.segment(1)
        found.wait(lambda: found.tally.get("lake_errors", "LakeError") > 2)
        assert found.spool.quarantined == 0
        path.write_bytes(whole)
        found.wait(lambda: not found.spool.sealed())


def test_rows_that_never_fit_the_lake_are_set_aside_after_some_tries(tmp_path: Path) -> None:
    with bench(tmp_path) as found:
        found.lake.failing = lambda number: pa.ArrowInvalid("column 'x' is not there") if number == 1 else None
        found.segment(1)
        found.segment(1)
        found.draining.start()
        found.wait(lambda: not found.spool.sealed())
        assert found.lake.committed == [(2, 1)]
        assert found.lake.tries == 4
    (reason,) = (tmp_path / "quarantine").glob("*.reason.txt")
    assert "do not fit the lake: ArrowInvalid" in reason.read_text()


def test_a_segment_that_cannot_be_removed_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bench(tmp_path) as found:
        retire = found.spool.retire
        failures = [OSError(5, "Input/output error")]

        def failing(number: int) -> None:
            if failures:
                raise failures.pop()
            retire(number)

        monkeypatch.setattr(found.spool, "retire", failing)
        found.segment(1)
        found.draining.start()
        found.wait(lambda: not found.spool.sealed())
        assert found.lake.committed == [(1, 1), (1, 1)], "the lake knows the number and takes it once"


NOW = time.time_ns()


def of(*spans: Span) -> bytes:
    return probe_body(spans)


def test_a_segment_waits_for_the_records_of_its_requests_and_takes_them_from_later_ones(tmp_path: Path) -> None:
    first, second = Request("r1", NOW), Request("r2", NOW + 1000)
    with bench(tmp_path, window_seconds=30) as found:
        found.draining.start()
        found.sealed(of(first.engine(), first.stock()))
        time.sleep(0.3)
        assert found.lake.committed == []
        found.sealed(of(second.frontend(), first.frontend()), body(3))
        found.wait(lambda: len(found.lake.committed) == 1)
        assert sorted(found.lake.requests[0]) == ["engine", "frontend+edge", "stock"]
        time.sleep(0.2)
        assert len(found.lake.committed) == 1, "the second one waits for the engine core"
        found.sealed(of(second.engine()))
        found.wait(lambda: not found.spool.sealed())
        assert found.lake.requests[1:] == [["frontend+edge", "engine"], []]
        assert found.lake.committed == [(1, 3), (2, 5), (3, 0)]


def test_a_segment_whose_records_do_not_come_goes_when_its_window_closes(tmp_path: Path) -> None:
    with bench(tmp_path, window_seconds=0.5) as found:
        found.draining.start()
        began = time.monotonic()
        for number in range(3):
            found.sealed(of(Request(f"r{number}", NOW).engine()))
        found.wait(lambda: not found.spool.sealed())
        assert 0.4 < time.monotonic() - began < 1.4, "the windows of all run at once"


def test_what_came_before_the_window_closed_is_waited_for_until_it_is_sealed(tmp_path: Path) -> None:
    one, other = Request("r1", NOW), Request("r2", NOW)
    with bench(tmp_path, window_seconds=0.6) as found:
        found.draining.start()
        found.sealed(of(one.engine()))
        found.spool.append([Record(time.time_ns(), of(one.frontend()))])
        time.sleep(0.9)
        assert found.lake.committed == []
        found.spool.seal()
        found.spool.append([Record(time.time_ns(), of(other.frontend()))])
        found.rows.sealed.set()
        found.wait(lambda: not found.spool.sealed())
        assert found.lake.requests == [["engine", "frontend+edge"], []]
        number = found.sealed()
        found.spool.append([Record(time.time_ns(), of(other.stock()))])
        began = time.monotonic()
        found.wait(lambda: number not in found.spool.sealed())
        assert 0.5 < time.monotonic() - began < 2.5, "not for ever"


def test_stock_traffic_and_whole_requests_wait_for_nobody(tmp_path: Path) -> None:
    one = Request("r1", NOW)
    with bench(tmp_path, window_seconds=60) as found:
        found.draining.start()
        found.sealed(of(one.engine(), one.frontend(), edge("r2", NOW, 503), sample(NOW), event(NOW, "started")))
        found.segment(2)
        found.sealed(probe_body([Request("r3", NOW).stock()], {"service.name": "vllm"}))
        found.sealed(of(one.stock()))
        found.wait(lambda: not found.spool.sealed())


def test_a_stock_row_of_a_server_with_the_probe_waits_for_the_records_of_the_probe(tmp_path: Path) -> None:
    one = Request("r1", NOW)
    with bench(tmp_path, window_seconds=60) as found:
        found.draining.start()
        found.sealed(of(one.stock()))
        time.sleep(0.3)
        assert found.lake.committed == []
        found.sealed(of(one.engine(), one.frontend()))
        found.wait(lambda: not found.spool.sealed())
        assert found.lake.requests == [["stock", "engine", "frontend+edge"], []]


def test_a_stop_waits_for_no_window(tmp_path: Path) -> None:
    with bench(tmp_path, window_seconds=60) as found:
        found.draining.start()
        found.sealed(of(Request("r1", NOW).engine()))
        time.sleep(0.2)
        began = time.monotonic()
        found.draining.stop(30)
        assert time.monotonic() - began < 5
        assert found.spool.sealed() == []


def test_when_much_waits_the_oldest_goes_without_its_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "WINDOW_BYTES", 4000)
    with bench(tmp_path, window_seconds=60) as found:
        found.draining.start()
        found.sealed(of(Request("r1", NOW).engine()))
        time.sleep(0.2)
        assert found.lake.committed == []
        found.sealed(of(*(Request(f"s{number}", NOW).engine() for number in range(4))))
        found.wait(lambda: bool(found.lake.committed))
        assert found.lake.requests[0] == ["engine"]


def test_a_later_segment_that_cannot_be_decoded_is_told_in_its_turn(tmp_path: Path) -> None:
    one = Request("r1", NOW)
    with bench(tmp_path, window_seconds=1) as found:
        found.sealed(of(one.engine()))
        found.sealed(b"\xff\xff no protobuf")
        found.sealed(of(one.frontend()))
        found.draining.start()
        found.wait(lambda: not found.spool.sealed())
        assert found.lake.committed == [(1, 2), (3, 0)]
        assert found.tally.get("segments_quarantined") == 1


def test_rows_taken_ahead_stay_with_their_segment_while_the_lake_fails(tmp_path: Path) -> None:
    one = Request("r1", NOW)
    with bench(tmp_path) as found:
        found.lake.failing = lambda number: pa.ArrowInvalid("no") if number == 1 else None
        found.sealed(of(one.engine()))
        found.sealed(of(one.frontend()))
        found.draining.start()
        found.wait(lambda: not found.spool.sealed())
        assert found.lake.committed == [(2, 1)], "the first was set aside, the second has kept its own"


def test_a_segment_that_the_lake_had_taken_before_a_crash_takes_nothing_from_later_ones(tmp_path: Path) -> None:
    first, again = Request("r1", NOW), Request("r1", NOW + 1000)
    lake = RealLake.open(tmp_path / "lake")
    with bench(tmp_path) as found:
        number = found.sealed(of(first.engine()))
        alone = plain.decode(of(first.engine()), time.time_ns(), DecodeSettings()).lot
        committing(lake)(found.spool.id, number, alone.tables)
        found.sealed(of(first.frontend(), first.stock(), again.engine(), again.frontend()))
        found.draining._commit = committing(lake)
        found.draining.start()
        found.wait(lambda: not found.spool.sealed())
    lake = RealLake.open(tmp_path / "lake")
    rows = lake.read("requests", lake.data_files("requests"))
    assert sorted(zip(rows["records"].to_pylist(), rows["quality"].to_pylist(), strict=True), key=str) == [
        ("engine", "missing_milestone"),
        ("engine+frontend+edge", None),
        ("frontend+edge+stock", "late_record"),
        ("stock", "superseded"),
    ]
    rollups = lake.read("rollups", lake.data_files("rollups")).to_pylist()
    counted = [row for row in rollups if (row["metric"], row["level"]) == ("requests", "day")]
    assert sum(row["count"] for row in counted) == rows.num_rows


def test_a_request_id_that_is_used_again_is_waited_for_again(tmp_path: Path) -> None:
    first, again = Request("r1", NOW), Request("r1", NOW + 1000)
    with bench(tmp_path, window_seconds=60) as found:
        found.draining.start()
        found.sealed(of(first.engine(), first.frontend()))
        found.wait(lambda: not found.spool.sealed())
        found.sealed(of(first.stock()))
        found.wait(lambda: not found.spool.sealed())
        found.sealed(of(again.engine()))
        time.sleep(0.3)
        assert len(found.lake.committed) == 2
        found.sealed(of(again.frontend()))
        found.wait(lambda: not found.spool.sealed())
        assert found.lake.requests[2:] == [["engine", "frontend+edge"], []]


def test_in_a_backlog_only_what_was_written_soon_after_is_looked_into(tmp_path: Path) -> None:
    one, other = Request("r1", NOW), Request("r2", NOW)
    with bench(tmp_path, window_seconds=0) as found:
        for number, record in enumerate((one.engine(), other.engine(), other.frontend(), one.frontend())):
            found.sealed(of(record))
            path = found.spool.folder / f"{number + 1:012d}.seg"
            os.utime(path, (NOW / 1e9 + 8 * number, NOW / 1e9 + 8 * number))
        found.draining.start()
        found.wait(lambda: not found.spool.sealed())
        assert found.lake.requests == [["engine"], ["engine", "frontend+edge"], [], ["frontend+edge"]]


def test_the_requests_drained_last_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draining, "REMEMBERED_REQUESTS", 3)
    with bench(tmp_path, window_seconds=60) as found:
        found.draining.start()
        for number in range(5):
            one = Request(f"r{number}", NOW)
            found.sealed(of(one.engine(), one.frontend()))
        found.wait(lambda: not found.spool.sealed())
        assert len(found.draining._drained) == 3
        found.sealed(of(Request("r4", NOW).stock()))
        found.wait(lambda: not found.spool.sealed())
        found.sealed(of(Request("r0", NOW).stock()))
        time.sleep(0.3)
        assert found.spool.sealed() == [7]
