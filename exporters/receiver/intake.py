"""Bodies of both protocols -> one decode, one write and one fsync for all that wait; then each sender's answer.

One thread does the work. While it decodes and syncs one group the next one gathers, so groups grow with the load and a
lone body waits for nobody.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm_slo.exporters.otlp.decoded import BodyError, Decoded, Decoder, DecodeSettings, Refusal
from vllm_slo.exporters.otlp.lot import Lot
from vllm_slo.exporters.receiver import tally as counts
from vllm_slo.exporters.receiver.framing import joinable
from vllm_slo.exporters.receiver.outcome import ALL_ACCEPTED, STOPPING, Accepted, Outcome, PushedBack, Unusable, bounded
from vllm_slo.exporters.receiver.row_memory import RowMemory
from vllm_slo.exporters.receiver.settings import Limits
from vllm_slo.exporters.receiver.spool import Record, Spool, SpoolWriteError
from vllm_slo.exporters.receiver.tally import Tally

__all__ = ["Intake", "Preparation"]

_log = logging.getLogger(__name__)
_GROUP_BYTES = 16 * 1024 * 1024
"""A group stops growing here: what one fsync covers, and the memory its rows take."""
_JOIN_BYTES = 4 * 1024 * 1024
"""Bodies are joined for one decode up to this size: beyond it joining saves nothing."""
_PACED_SHARE = 0.75
_PACED_BYTES_PER_SECOND = 8 * 1024 * 1024
"""With this share of the memory for rows in use, bodies are taken no faster than this (about 12,000 spans a second)."""

Preparation = Callable[[bytes], tuple[bytes, list[Refusal]]]
"""Another encoding -> OTLP protobuf, with what was refused on the way; raises BodyError."""


class _Waiting:
    """One body and where its answer goes."""

    __slots__ = ("body", "future", "outcome", "prepare", "protocol", "size")

    def __init__(
        self, body: bytes, protocol: str, prepare: Preparation | None, future: asyncio.Future[Outcome]
    ) -> None:
        self.body = body
        self.size = len(body)
        self.protocol = protocol
        self.prepare = prepare
        self.future = future
        self.outcome: Outcome = ALL_ACCEPTED


@dataclass
class _Group:
    """What one fsync will cover."""

    decoded: list[Decoded]
    spooled: list[_Waiting]


class Intake:
    """Takes bodies on an event loop, answers when they are on disk.

    ``clock`` gives epoch nanoseconds; ``free_bytes`` the free space of the spool's disk; ``observe_fsync`` gets the
    seconds that each write with its fsync took; ``sealed`` is set whenever a segment is ready for the lake.
    """

    def __init__(
        self,
        spool: Spool,
        decode: Decoder,
        settings: DecodeSettings,
        limits: Limits,
        tally: Tally,
        *,
        clock: Callable[[], int] = time.time_ns,
        free_bytes: Callable[[], int] | None = None,
        observe_fsync: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        self.settings = settings
        self.sealed = threading.Event()
        self._spool = spool
        self._decode = decode
        self._limits = limits
        self._tally = tally
        self._clock = clock
        self._free_bytes = free_bytes or (lambda: _free_bytes(spool))
        self._observe_fsync = observe_fsync
        self._queue: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._pending_bytes = 0
        self._pending = 0
        self._tables = RowMemory(limits.table_bytes)
        self._opened = 0.0
        self._logged: set[str] = set()
        self._without_room = ""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="intake")

    def start(self) -> None:
        """Begin to work; call before the first ``take``."""
        self._thread.start()

    def turn_away(self) -> None:
        """From now on tell senders that the receiver is stopping."""
        self._stopping = True

    def stop(self) -> None:
        """Answer what waits, seal the open segment, end the thread."""
        self._stopping = True
        self._queue.put(None)
        self._thread.join()

    @property
    def pending_bytes(self) -> int:
        """Bytes of the bodies that wait for an answer, those that are still being read among them."""
        return self._pending_bytes

    def reading(self, size: int) -> None:
        """Count ``size`` more bytes of a body that an edge is still reading; negative to give them back."""
        self._pending_bytes += size

    def crowded(self, size: int = 0) -> PushedBack | None:
        """The answer to one more body of ``size`` bytes when too much waits already, else None."""
        limits = self._limits
        if self._stopping:
            return self._push_back(STOPPING, "the receiver is stopping")
        if self._pending_bytes and self._pending_bytes + size > limits.pending_bytes:
            return self._push_back("pending_bytes", f"{self._pending_bytes} bytes wait to be written already")
        if self._pending >= limits.requests_in_flight:
            return self._push_back("requests_in_flight", f"{self._pending} requests wait to be written already")
        return None

    def count_refused(self, outcome: Unusable | PushedBack, protocol: str) -> None:
        """Count a body that an edge turned away itself."""
        if isinstance(outcome, Unusable):
            self._tally.add(counts.SPANS_REFUSED, outcome.reason)
            self._tally.add(counts.BODIES, f"{protocol}/unusable")
        else:
            self._tally.add(counts.BACK_PRESSURE, outcome.cause)
            self._tally.add(counts.BODIES, f"{protocol}/pushed_back")

    async def take(self, body: bytes, protocol: str, prepare: Preparation | None = None) -> Outcome:
        """What became of ``body``; Accepted only once it is fsynced. Call on the event loop that awaits it."""
        crowded = self.crowded(len(body))
        if crowded is not None:
            self.count_refused(crowded, protocol)
            return crowded
        waiting = _Waiting(body, protocol, prepare, asyncio.get_running_loop().create_future())
        self._pending += 1
        self._pending_bytes += waiting.size
        self._queue.put(waiting)
        return await waiting.future

    def tables(self, number: int) -> Lot | None:
        """Rows of a sealed segment, once, when they are still in memory; else None."""
        return self._tables.pop(number)

    def _run(self) -> None:
        while True:
            group, last = self._gather()
            if group:
                try:
                    self._work(group)
                except Exception:  # noqa: BLE001 - the thread must live; the group is not acknowledged
                    _log.exception("the intake failed on a group of %d bodies; they are pushed back", len(group))
                    failed = self._push_back("internal_error", "the receiver failed on this group of requests")
                    for waiting in group:
                        waiting.outcome = failed
                self._answer(group)
                self._pace(group)
            try:
                self._seal_if_due(last)
            except OSError as error:
                _log.error("the open segment of the spool cannot be closed: %s", error)
            if last:
                return

    def _gather(self) -> tuple[list[_Waiting], bool]:
        """The next body and what waits behind it; whether the intake shall end after them."""
        wait = None
        if self._spool.open_records:
            wait = max(self._opened + self._limits.segment_seconds - time.monotonic(), 0.0)
        try:
            first = self._queue.get(timeout=wait)
        except queue.Empty:
            return [], False
        if first is None:
            return [], True
        group, size = [first], first.size
        try:
            while size < _GROUP_BYTES:
                waiting = self._queue.get_nowait()
                if waiting is None:
                    return group, True
                group.append(waiting)
                size += waiting.size
        except queue.Empty:
            pass
        return group, False

    def _work(self, waiting: list[_Waiting]) -> None:
        no_room = self._no_room()
        if no_room is not None:
            for one in waiting:
                one.outcome = no_room
            return
        received_ns = self._clock()
        group = _Group([], [])
        joined: list[_Waiting] = []
        size = 0
        for one in waiting:
            if one.prepare is not None or not joinable(one.body):
                self._alone(one, received_ns, group)
                continue
            if size and size + one.size > _JOIN_BYTES:
                self._together(joined, received_ns, group)
                joined, size = [], 0
            joined.append(one)
            size += one.size
        self._together(joined, received_ns, group)
        self._keep(group, received_ns)

    def _together(self, waiting: list[_Waiting], received_ns: int, group: _Group) -> None:
        """Decode bodies at once; one by one when any has something to say to its own sender."""
        if len(waiting) > 1:
            try:
                decoded = self._decode(b"".join([one.body for one in waiting]), received_ns, self.settings)
            except Exception:  # noqa: BLE001 - whichever body it was is found below, and told
                decoded = None
            if decoded is not None and not decoded.refused:
                group.decoded.append(decoded)
                group.spooled.extend(waiting)
                return
        for one in waiting:
            self._alone(one, received_ns, group)

    def _alone(self, waiting: _Waiting, received_ns: int, group: _Group) -> None:
        refused: list[Refusal] = []
        try:
            body = waiting.body
            if waiting.prepare is not None:
                body, refused = waiting.prepare(body)
            decoded = self._decode(body, received_ns, self.settings)
        except BodyError as error:
            waiting.outcome = Unusable(error.reason, bounded(str(error)))
            return
        except Exception as error:  # noqa: BLE001 - the thread must live; what cannot be decoded is not acknowledged
            kind = type(error).__name__
            if kind not in self._logged:
                self._logged.add(kind)
                # Never the words of the error: they may quote the body, which may hold prompt text.
                frames = "".join(traceback.format_tb(error.__traceback__))
                _log.error(
                    "a body of %d bytes made the decoder fail, it is refused: %s\n%s", waiting.size, kind, frames
                )
            waiting.outcome = Unusable("decoder_error", f"the body cannot be decoded ({kind})")
            return
        waiting.outcome = Accepted((*refused, *decoded.refused)) if refused or decoded.refused else ALL_ACCEPTED
        group.decoded.append(decoded)
        group.spooled.append(waiting)

    def _keep(self, group: _Group, received_ns: int) -> None:
        """Spool what was accepted; when that fails, everybody whose spans were in it is pushed back."""
        kept = [decoded for decoded in group.decoded if decoded.rows]
        if kept:
            first = not self._spool.open_records
            start = time.perf_counter()
            try:
                number = self._spool.append([Record(received_ns, decoded.clean_body) for decoded in kept])
            except SpoolWriteError as error:
                _log.warning("%s", error)
                failed = self._push_back("spool_write", "the disk of the spool takes no more")
                for waiting in group.spooled:
                    waiting.outcome = failed
                return
            self._observe_fsync(time.perf_counter() - start)
            if first:
                self._opened = time.monotonic()
            for decoded in kept:
                self._tables.add(number, decoded.lot, len(decoded.clean_body))
        for decoded in group.decoded:
            self._tally.add(counts.SPANS_ACCEPTED, "", decoded.rows)
            for pattern, count in decoded.dropped_attributes.items():
                self._tally.add(counts.ATTRIBUTES_DROPPED, pattern, count)

    def _answer(self, group: Sequence[_Waiting]) -> None:
        """Count what became of the bodies and wake their senders, once for the whole group and event loop."""
        bodies: dict[str, int] = {}
        for waiting in group:
            outcome = waiting.outcome
            if outcome is ALL_ACCEPTED:
                label = f"{waiting.protocol}/accepted"
            elif isinstance(outcome, Accepted):
                label = f"{waiting.protocol}/partial"
                for refusal in outcome.refused:
                    self._tally.add(counts.SPANS_REFUSED, refusal.reason, refusal.count)
            elif isinstance(outcome, Unusable):
                label = f"{waiting.protocol}/unusable"
                self._tally.add(counts.SPANS_REFUSED, outcome.reason)
            else:
                label = f"{waiting.protocol}/pushed_back"
                self._tally.add(counts.BACK_PRESSURE, outcome.cause)
            bodies[label] = bodies.get(label, 0) + 1
        for label, count in bodies.items():
            self._tally.add(counts.BODIES, label, count)
        loops = {waiting.future.get_loop() for waiting in group}
        for loop in loops:
            mine = group if len(loops) == 1 else [waiting for waiting in group if waiting.future.get_loop() is loop]
            try:
                loop.call_soon_threadsafe(self._resolve, mine)
            except RuntimeError:  # the loop is closed: nobody waits there any more
                _log.debug("%d senders went away before their answer", len(mine))

    def _resolve(self, group: Sequence[_Waiting]) -> None:
        for waiting in group:
            self._pending -= 1
            self._pending_bytes -= waiting.size
            if not waiting.future.done():
                waiting.future.set_result(waiting.outcome)

    def _pace(self, group: Sequence[_Waiting]) -> None:
        """Let the lake catch up while rows fill the memory kept for them: beyond it they would be decoded twice."""
        patience = sum(waiting.size for waiting in group) / _PACED_BYTES_PER_SECOND
        while patience > 0 and self._tables.filled > _PACED_SHARE and not self._stopping:
            pause = min(patience, 0.01)
            time.sleep(pause)
            patience -= pause

    def _no_room(self) -> PushedBack | None:
        """The answer to everybody while the spool or its disk is full; each change is logged."""
        limits, size = self._limits, self._spool.size_bytes
        found = None
        if size >= limits.spool_bytes:
            found = self._push_back("spool_full", f"{size} bytes in the spool wait for the lake")
        elif (free := self._free_bytes()) < limits.free_bytes:
            found = self._push_back("disk_full", f"the disk of the spool has {free} bytes free")
        cause = found.cause if found else ""
        if cause != self._without_room:
            self._without_room = cause
            _log.warning("senders are pushed back: %s", found.message if found else "no more, there is room again")
        return found

    def _push_back(self, cause: str, message: str) -> PushedBack:
        return PushedBack(cause, f"{message}; nothing was kept, send again later", self._limits.retry_seconds)

    def _seal_if_due(self, last: bool) -> None:
        spool = self._spool
        if not spool.open_records:
            return
        old = time.monotonic() >= self._opened + self._limits.segment_seconds
        if (last or old or spool.open_bytes >= self._limits.segment_bytes) and spool.seal() is not None:
            self.sealed.set()


def _free_bytes(spool: Spool) -> int:
    found = os.statvfs(spool.folder)
    return found.f_bavail * found.f_frsize
