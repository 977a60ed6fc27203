"""Groups of bodies: one fsync for all, every sender its own answer, nothing half acknowledged."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from receiving import ROOMY, body, spans_of
from vllm_slo.exporters.otlp import plain
from vllm_slo.exporters.otlp.decoded import BodyError, Decoded, DecodeSettings
from vllm_slo.exporters.receiver.framing import joinable
from vllm_slo.exporters.receiver.intake import Intake
from vllm_slo.exporters.receiver.outcome import ALL_ACCEPTED, Accepted, Outcome, PushedBack, Unusable
from vllm_slo.exporters.receiver.settings import Limits
from vllm_slo.exporters.receiver.spool import Spool, SystemCalls
from vllm_slo.exporters.receiver.tally import Tally

SETTINGS = DecodeSettings()


class Bench:
    """An intake whose decoder can be held, so that what is sent meanwhile becomes one group."""

    def __init__(self, folder: Path, limits: Limits = ROOMY, calls: SystemCalls | None = None, **options: Any) -> None:
        self.calls: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failing: Callable[[bytes], Exception | None] = lambda body: None
        self.syncs = 0
        self.spool = Spool.open(folder / "spool", calls=calls)
        self.tally = Tally()
        self.intake = Intake(
            self.spool, self.decode, SETTINGS, limits, self.tally, observe_fsync=self.observe, **options
        )

    def observe(self, seconds: float) -> None:
        self.syncs += 1

    def decode(self, data: bytes, received_ns: int, settings: DecodeSettings) -> Decoded:
        self.gate.wait(10)
        self.calls.append(len(data))
        error = self.failing(data)
        if error is not None:
            raise error
        return plain.decode(data, received_ns, settings)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        self.intake.start()
        try:
            asyncio.run(work)
        finally:
            self.gate.set()
            self.intake.stop()

    async def together(self, *bodies: bytes) -> list[Outcome]:
        """Outcomes of bodies that wait while the intake is busy with another one."""
        self.gate.clear()
        first = asyncio.create_task(self.intake.take(body(1), "grpc"))
        await asyncio.sleep(0.05)
        tasks = [asyncio.create_task(self.intake.take(one, "grpc")) for one in bodies]
        await asyncio.sleep(0.05)
        self.gate.set()
        await first
        return list(await asyncio.gather(*tasks))

    def on_disk(self) -> list[bytes]:
        self.spool.seal()
        return [
            span.span_id for n in self.spool.sealed() for record in self.spool.read(n) for span in spans_of(record.body)
        ]


def ids(count: int) -> list[bytes]:
    return [os.urandom(8) for _ in range(count)]


def test_bodies_that_wait_together_take_one_decode_and_one_fsync(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    wanted = ids(30)

    async def work() -> None:
        outcomes = await bench.together(*(body([one]) for one in wanted))
        assert outcomes == [ALL_ACCEPTED] * 30
        assert len(bench.calls) == 2
        assert bench.syncs == 2

    bench.run(work())
    assert bench.on_disk()[1:] == wanted
    assert bench.tally.counts()["bodies"] == {"grpc/accepted": 31}
    bench.spool.close()


def test_one_bad_span_is_told_to_its_sender_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    good, bad, mixed = ids(2), [b"short"], [os.urandom(8), b""]

    async def work() -> None:
        first, second, third = await bench.together(body(good), body(bad), body(mixed))
        assert first is ALL_ACCEPTED
        assert isinstance(second, Accepted)
        assert second.rejected_spans == 1
        assert isinstance(third, Accepted)
        assert third.rejected_spans == 1
        assert third.message

    bench.run(work())
    assert bench.on_disk()[1:] == [*good, mixed[0]]
    assert sum(bench.tally.counts()["spans_refused"].values()) == 2
    assert bench.tally.counts()["bodies"] == {"grpc/accepted": 2, "grpc/partial": 2}
    bench.spool.close()


def test_a_body_cut_short_never_swallows_its_neighbour(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    wanted = ids(3)
    cut = body(4)[:-7]

    async def work() -> None:
        outcomes = await bench.together(body(wanted[:1]), cut, body(wanted[1:]))
        assert outcomes[0] is ALL_ACCEPTED
        assert isinstance(outcomes[1], Unusable)
        assert outcomes[2] is ALL_ACCEPTED

    bench.run(work())
    assert sorted(bench.on_disk()[1:]) == sorted(wanted)
    bench.spool.close()


@pytest.mark.parametrize("cut", range(1, len(body([b"12345678"])) + 1))
def test_only_whole_bodies_are_joinable(cut: int) -> None:
    whole = body([b"12345678"])
    assert joinable(whole[:cut]) == (cut == len(whole))
    assert joinable(whole + whole)


def test_unknown_fields_at_the_top_are_decoded_alone() -> None:
    assert joinable(b"")
    assert not joinable(b"\x12\x00")
    assert not joinable(b"\x0a" + b"\xff" * 9 + b"\x01")


def test_prompt_text_never_reaches_the_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def work() -> None:
        assert await bench.together(body(2, text="my secret"), body(1)) == [ALL_ACCEPTED, ALL_ACCEPTED]

    bench.run(work())
    bench.spool.close()
    files = [path.read_bytes() for path in (tmp_path / "spool").iterdir()]
    assert any(b"work" in data for data in files)
    assert all(b"secret" not in data for data in files)
    assert bench.tally.counts()["attributes_dropped"] == {"gen_ai.prompt*": 2}


def test_a_decoder_that_fails_refuses_that_body_and_lives_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench(tmp_path)
    poison = body([b"poisoned"])
    bench.failing = lambda data: RuntimeError("bug in 'prompt text'") if b"poisoned" in data else None
    wanted = ids(2)

    async def work() -> None:
        with caplog.at_level(logging.ERROR):
            first, second, third = await bench.together(body(wanted[:1]), poison, body(wanted[1:]))
            again = await bench.intake.take(poison, "grpc")
        assert first is third is ALL_ACCEPTED
        assert isinstance(second, Unusable)
        assert (second.reason, second.message) == ("decoder_error", "the body cannot be decoded (RuntimeError)")
        assert isinstance(again, Unusable)

    bench.run(work())
    assert bench.on_disk()[1:] == wanted
    assert len(caplog.records) == 1
    assert "RuntimeError" in caplog.text
    assert "prompt text" not in caplog.text
    assert bench.tally.get("spans_refused", "decoder_error") == 2
    bench.spool.close()


def test_an_unusable_body_says_why(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.failing = lambda data: BodyError("too_deep", "values nest deeper than 64")

    async def work() -> None:
        assert await bench.intake.take(body(1), "grpc") == Unusable("too_deep", "values nest deeper than 64")

    bench.run(work())
    assert bench.on_disk() == []
    bench.spool.close()


def test_when_the_write_fails_everybody_in_the_group_is_pushed_back(tmp_path: Path) -> None:
    broken = threading.Event()

    def fdatasync(fd: int) -> None:
        if broken.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fdatasync(fd)

    bench = Bench(tmp_path, calls=SystemCalls(fdatasync=fdatasync))
    wanted = ids(1)

    async def work() -> None:
        await bench.intake.take(body(wanted), "grpc")
        broken.set()
        outcomes = [await bench.intake.take(body(1), "grpc") for _ in range(3)]
        assert all(isinstance(one, PushedBack) and one.cause == "spool_write" for one in outcomes)
        broken.clear()
        wanted.extend(ids(1))
        assert await bench.intake.take(body(wanted[1:]), "grpc") is ALL_ACCEPTED

    bench.run(work())
    assert bench.on_disk() == wanted
    assert bench.tally.get("back_pressure", "spool_write") == 3
    assert bench.tally.get("spans_accepted") == 2
    bench.spool.close()


@pytest.mark.parametrize(
    ("limits", "free", "cause"),
    [
        (Limits(spool_bytes=1, free_bytes=0), 1 << 40, "spool_full"),
        (Limits(free_bytes=1000), 999, "disk_full"),
    ],
)
def test_without_room_senders_are_pushed_back(tmp_path: Path, limits: Limits, free: int, cause: str) -> None:
    bench = Bench(tmp_path, limits, free_bytes=lambda: free)
    bench.spool.size_bytes = 1

    async def work() -> None:
        outcome = await bench.intake.take(body(1), "grpc")
        assert isinstance(outcome, PushedBack)
        assert outcome.cause == cause
        assert outcome.retry_seconds > 0

    bench.run(work())
    assert bench.calls == []
    bench.spool.close()


def test_being_without_room_is_logged_when_it_begins_and_when_it_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    free = [0]
    bench = Bench(tmp_path, Limits(free_bytes=1), free_bytes=lambda: free[0])

    async def work() -> None:
        with caplog.at_level(logging.WARNING):
            for free[0] in (0, 0, 2, 2):
                await bench.intake.take(body(1), "grpc")

    bench.run(work())
    first, second = (record.getMessage() for record in caplog.records)
    assert "the disk of the spool has 0 bytes free" in first
    assert "there is room again" in second
    bench.spool.close()


def test_what_waits_is_bounded_in_bytes_and_in_number(tmp_path: Path) -> None:
    small = body(1)
    bench = Bench(tmp_path, Limits(free_bytes=0, pending_bytes=3 * len(small), requests_in_flight=100))

    async def work() -> None:
        outcomes = await bench.together(*[small] * 5)
        assert [type(one) for one in outcomes] == [Accepted] * 2 + [PushedBack] * 3
        assert bench.intake.pending_bytes == 0
        assert await bench.intake.take(body(100), "grpc") is ALL_ACCEPTED, "alone, any body within its limit is taken"

    bench.run(work())
    assert bench.tally.get("back_pressure", "pending_bytes") == 3
    bench.spool.close()


def test_a_segment_is_sealed_by_age_and_its_rows_are_still_in_memory(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Limits(free_bytes=0, segment_seconds=0.05))
    wanted = ids(3)

    async def work() -> None:
        await bench.intake.take(body(wanted), "grpc")
        assert await asyncio.to_thread(bench.intake.sealed.wait, 5)

    bench.run(work())
    assert bench.spool.sealed() == [1]
    lot = bench.intake.tables(1)
    assert lot is not None
    assert lot.tables["spans"]["span_id"].to_pylist() == wanted
    assert bench.intake.tables(1) is None
    bench.spool.close()


def test_a_segment_is_sealed_by_size(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Limits(free_bytes=0, segment_seconds=60, segment_bytes=1000))

    async def work() -> None:
        for _ in range(3):
            await bench.intake.take(body(20), "grpc")

    bench.run(work())
    assert len(bench.spool.sealed()) == 3
    bench.spool.close()


def test_rows_beyond_the_memory_limit_are_left_to_the_spool(tmp_path: Path) -> None:
    bench = Bench(tmp_path, Limits(free_bytes=0, segment_seconds=60, table_bytes=3 * 16 * 1024))

    async def work() -> None:
        for _ in range(3):
            await bench.intake.take(body(1), "grpc")

    bench.run(work())
    assert bench.intake.tables(1) is None
    decoded = [plain.decode(record.body, record.received_ns, SETTINGS) for record in bench.spool.read(1)]
    assert pa.concat_tables([one.spans for one in decoded]).num_rows == 3
    bench.spool.close()


def test_while_rows_fill_their_memory_bodies_are_taken_at_a_bounded_rate(tmp_path: Path) -> None:
    small = plain.decode(body(1), 1, SETTINGS)
    spool = Spool.open(tmp_path / "spool")
    intake = Intake(
        spool,
        lambda data, received_ns, settings: Decoded(small.lot, data),
        SETTINGS,
        Limits(free_bytes=0, segment_seconds=60, table_bytes=9_000_000),
        Tally(),
    )
    data = bytes(4 << 20)

    async def seconds() -> float:
        start = time.monotonic()
        assert await intake.take(data, "grpc") is ALL_ACCEPTED
        await intake.take(body(1), "grpc")
        return time.monotonic() - start

    async def work() -> None:
        assert intake.tables(1) is None
        await seconds()
        assert await seconds() > 0.1, "4 MiB at 32 MiB a second"
        number = spool.open_number
        assert number is not None
        assert intake.tables(number) is not None
        begun = time.monotonic()
        await intake.take(body(1), "grpc")
        assert time.monotonic() - begun < 0.1, "room again"

    intake.start()
    try:
        asyncio.run(work())
    finally:
        intake.stop()
        spool.close()


def test_rows_decoded_again_from_the_spool_are_the_rows_of_the_intake(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def work() -> None:
        await bench.together(body(3), body(2, text="gone"), body([b"bad", os.urandom(8)]))

    bench.run(work())
    bench.spool.seal()
    for number in bench.spool.sealed():
        kept = bench.intake.tables(number)
        decoded = [plain.decode(r.body, r.received_ns, SETTINGS) for r in bench.spool.read(number)]
        assert kept is not None
        assert pa.concat_tables([one.requests for one in decoded]).equals(kept.tables["requests"])
        assert pa.concat_tables([one.spans for one in decoded]).equals(kept.tables["spans"])
    bench.spool.close()


def test_stopping_answers_who_waits_and_turns_the_others_away(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def work() -> None:
        bench.gate.clear()
        waiting = asyncio.create_task(bench.intake.take(body(1), "grpc"))
        await asyncio.sleep(0.05)
        bench.intake.turn_away()
        late = await bench.intake.take(body(1), "grpc")
        assert isinstance(late, PushedBack)
        assert late.cause == "stopping"
        bench.gate.set()
        assert await waiting is ALL_ACCEPTED

    bench.run(work())
    assert len(bench.on_disk()) == 1
    bench.spool.close()


def test_a_sender_that_went_away_costs_the_others_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    async def work() -> None:
        bench.gate.clear()
        gone = asyncio.create_task(bench.intake.take(body(1), "grpc"))
        await asyncio.sleep(0.05)
        other = asyncio.create_task(bench.intake.take(body(1), "grpc"))
        await asyncio.sleep(0.02)
        gone.cancel()
        bench.gate.set()
        assert await other is ALL_ACCEPTED
        deadline = time.monotonic() + 5
        while bench.intake.pending_bytes and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert bench.intake.pending_bytes == 0

    bench.run(work())
    bench.spool.close()
