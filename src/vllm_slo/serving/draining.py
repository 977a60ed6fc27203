"""The thread between spool and lake: sealed segments in order, each committed exactly once, then removed.

The records of one request come from several processes and so in several segments. A segment of servers with the probe
waits for up to WINDOW_SECONDS after it was sealed (and until what came meanwhile is sealed, as long again at most), as
long as one of its requests lacks a record; then what later segments hold of its requests is committed with it, and is
left out when their turn comes. Nothing of this needs to outlive the process: rows that were taken ahead are found in
the lake when their segment is drained after a crash. A segment that the lake had taken before the crash takes nothing
ahead now, so later ones keep what they hold.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.otlp.decoded import Decoder, DecodeSettings
from vllm_slo.exporters.otlp.lot import Lot, Tables
from vllm_slo.exporters.receiver import tally as counts
from vllm_slo.exporters.receiver.spool import Spool
from vllm_slo.exporters.receiver.tally import Tally
from vllm_slo.serving.partners import incomplete, request_ids, requests_of, split, with_partners

_log = logging.getLogger(__name__)

_LONGEST_PAUSE_SECONDS = 10.0
WINDOW_SECONDS = 3.0
WINDOW_BYTES = 64 * 1024 * 1024
"""How much of the spool is looked into ahead; with more of it waiting, segments go without waiting for records."""
AHEAD_SECONDS = 10.0
"""Segments written so long after another hold no records of its requests that the window would have waited for: in a
backlog of small segments looking further costs more than the drain itself."""
REMEMBERED_REQUESTS = 200_000
"""Requests of the probe drained last; records of theirs that come later wait for nobody."""
_UNFIT = (ValueError, TypeError, KeyError, IndexError, AttributeError, NotImplementedError)
"""What is raised by rows that no later try will make fit (Arrow's conversion errors are among them)."""
_UNFIT_TRIES = 3


@dataclass(frozen=True)
class Committed:
    """What became of a segment: duplicates left out; ``replayed``: the lake had taken requests under its number before,
    and looked at none of those given now."""

    duplicates: int = 0
    replayed: bool = False


Commit = Callable[[str, int, Tables], Committed]
"""(spool id, segment number, rows by table); every row committed exactly once."""


class Rows(Protocol):
    """Where decoded rows of a segment may still be in memory, and the signal that a segment is ready."""

    settings: DecodeSettings
    sealed: threading.Event

    def tables(self, number: int) -> Lot | None:
        """Rows of a segment, once."""


class Draining:
    """Moves what ``spool`` holds into the lake until stopped.

    A lake that fails is tried again, with pauses that grow to ten seconds; meanwhile the spool fills and senders are
    pushed back at its limit. A segment that cannot be decoded, or whose rows the lake cannot hold, goes to quarantine.
    ``saved`` is where the tally is kept every ``save_seconds``. A stop waits for no record.
    """

    def __init__(
        self,
        spool: Spool,
        rows: Rows,
        decode: Decoder,
        commit: Commit,
        tally: Tally,
        saved: Path,
        *,
        clock: Callable[[], float] = time.time,
        save_seconds: float = 5.0,
        window_seconds: float = WINDOW_SECONDS,
    ) -> None:
        self.committed_time: float | None = None
        self._spool = spool
        self._rows = rows
        self._decode = decode
        self._commit = commit
        self._tally = tally
        self._saved = saved
        self._clock = clock
        self._save_seconds = save_seconds
        self._save_due = 0.0
        self._window_seconds = window_seconds
        self._pause = save_seconds
        self._lots: dict[int, Lot] = {}
        self._closes: dict[int, float] = {}
        self._last: dict[int, int] = {}
        self._drained: dict[int, None] = {}
        self._ending = threading.Event()
        self._deadline = float("inf")
        self._thread = threading.Thread(target=self._run, name="draining")

    def start(self) -> None:
        """Begin; segments of an earlier process go first."""
        self._thread.start()

    def stop(self, patience_seconds: float) -> None:
        """Drain what is sealed for at most so long; what remains is drained at the next start."""
        self._deadline = time.monotonic() + patience_seconds
        self._ending.set()
        self._rows.sealed.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            ending = self._ending.is_set()
            self._rows.sealed.clear()
            self._pause = self._save_seconds
            closes = time.monotonic() + self._window_seconds
            for number in self._spool.sealed():
                self._closes.setdefault(number, closes)
            for number in self._spool.sealed():
                if time.monotonic() > self._deadline or not self._try(number):
                    break
                self._save()
            self._save(now=ending)
            if ending:
                return
            self._rows.sealed.wait(self._pause)

    def _try(self, number: int) -> bool:
        """Whether the segment left the spool."""
        try:
            return self._drain(number)
        except Exception as error:  # noqa: BLE001 - the thread must live: without it the spool only fills
            self._tally.add(counts.LAKE_ERRORS, type(error).__name__)
            _log.error("segment %d cannot be read or removed now: %s: %s", number, type(error).__name__, error)
            self._ending.wait(1.0)
            return False

    def _drain(self, number: int) -> bool:
        rest: dict[int, Lot] = {}
        try:
            lot = self._lot(number)
            if lot.probe:
                lot, rest = self._with_partners(number, lot)
                left = self._window(number, lot)
                if left > 0:
                    self._pause = min(self._pause, left)
                    return False
        except (OSError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it must not block the others
            self._set_aside(number, f"cannot be decoded: {type(error).__name__}: {error}")
            return True
        tries, pause = 0, 0.1
        while True:
            try:
                committed = self._commit(self._spool.id, number, lot.tables)
            except Exception as error:  # noqa: BLE001 - a failing lake must not end the thread
                tries += 1
                self._tally.add(counts.LAKE_ERRORS, type(error).__name__)
                if isinstance(error, _UNFIT) and not isinstance(error, SloError) and tries >= _UNFIT_TRIES:
                    _log.exception("segment %d does not fit the lake", number)
                    self._set_aside(number, f"its rows do not fit the lake: {type(error).__name__}: {error}")
                    return True
                if tries == 1:
                    _log.error(
                        "segment %d is not in the lake yet, trying on: %s: %s", number, type(error).__name__, error
                    )
                if time.monotonic() + pause > self._deadline:
                    return False
                self._ending.wait(pause)
                if self._ending.is_set():
                    time.sleep(min(pause, 0.2))
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self._save()
            else:
                break
        if not committed.replayed:
            self._lots.update(rest)
        self._spool.retire(number)
        self._forget(number)
        if lot.probe:
            self._remember(lot.requests)
        self.committed_time = self._clock()
        self._tally.add(counts.SEGMENTS_COMMITTED)
        self._tally.add(counts.SPANS_DUPLICATE, "", committed.duplicates)
        return True

    def _window(self, number: int, lot: Lot) -> float:
        """Seconds for which a segment waits for records of its requests; 0: no longer.

        What came while the window was open counts: the segment that is being written when it closes is waited for too.
        """
        if self._ending.is_set() or self._spool.size_bytes > WINDOW_BYTES:
            return 0.0
        left = self._closes.setdefault(number, time.monotonic() + self._window_seconds) - time.monotonic()
        if left <= 0:
            last = self._last.setdefault(number, self._spool.open_number or 0)
            left = left + self._window_seconds if self._spool.open_number == last else 0.0
        return left if left > 0 and self._awaited(lot.requests) else 0.0

    def _awaited(self, requests: pa.Table) -> bool:
        """Whether a record of one of the requests may still be on its way."""
        return any(hash(request) not in self._drained for request in requests_of(incomplete(requests)))

    def _with_partners(self, number: int, lot: Lot) -> tuple[Lot, dict[int, Lot]]:
        """The lot with what the segments behind it hold of its requests, and those segments without that.

        Looks into the next one, and on as far as all of them together are no larger than WINDOW_BYTES and were written
        within AHEAD_SECONDS. A segment that cannot be read now is passed over.
        """
        ids = request_ids(lot.requests)
        taken: list[pa.Table] = []
        rest: dict[int, Lot] = {}
        size = self._spool.size_of(number)
        until = self._spool.written_time(number) + AHEAD_SECONDS
        behind = [later for later in self._spool.sealed() if later > number]
        for later in behind:
            size += self._spool.size_of(later)
            if later != behind[0] and (size > WINDOW_BYTES or self._spool.written_time(later) > until):
                break
            try:
                rows, others = split(self._lot(later), ids)
            except Exception as error:  # noqa: BLE001 - it is told when its turn comes
                _log.debug("segment %d cannot be looked into: %s", later, type(error).__name__)
                continue
            if rows is not None:
                taken.append(rows)
                rest[later] = others
        return with_partners(lot, taken) if taken else lot, rest

    def _lot(self, number: int) -> Lot:
        """The rows of a segment that no earlier one took; kept until it is drained."""
        if number not in self._lots:
            self._lots[number] = self._rows.tables(number) or self._read(number)
        return self._lots[number]

    def _forget(self, number: int) -> None:
        self._lots.pop(number, None)
        self._closes.pop(number, None)
        self._last.pop(number, None)

    def _remember(self, requests: pa.Table) -> None:
        """Keep which requests the probe reported, the last ones at the end."""
        probe = requests.filter(pc.equal(requests["source"], "probe"))
        self._drained.update(dict.fromkeys(map(hash, requests_of(probe))))
        for oldest in list(islice(self._drained, max(len(self._drained) - REMEMBERED_REQUESTS, 0))):
            del self._drained[oldest]

    def _read(self, number: int) -> Lot:
        return Lot.joined(
            self._decode(r.body, r.received_ns, self._rows.settings).lot for r in self._spool.read(number)
        )

    def _set_aside(self, number: int, reason: str) -> None:
        target = self._spool.quarantine(number, reason)
        self._forget(number)
        self._tally.add(counts.SEGMENTS_QUARANTINED)
        _log.error("segment %d %s; it was moved to %s", number, reason, target)

    def _save(self, now: bool = False) -> None:
        if not now and time.monotonic() < self._save_due:
            return
        self._save_due = time.monotonic() + self._save_seconds
        try:
            self._tally.save(self._saved)
        except OSError as error:
            _log.warning("%s: the counts could not be saved: %s", self._saved, error.strerror)
