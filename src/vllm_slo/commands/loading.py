"""Files -> the lake: decoded like what is received, in numbered chunks, so that a repeated load changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from zoneinfo import ZoneInfo

import pyarrow as pa

from vllm_slo.analytics import events, samples
from vllm_slo.analytics.drain import Drain
from vllm_slo.analytics.lake import Lake
from vllm_slo.exporters.importers.items import Body, Item, Rows, Unreadable
from vllm_slo.exporters.importers.reading import digest, read
from vllm_slo.exporters.importers.receipt import settled
from vllm_slo.exporters.otlp import fast, plain
from vllm_slo.exporters.otlp.decoded import BodyError, Decoded, Decoder, DecodeSettings
from vllm_slo.exporters.otlp.lot import Lot, Tables
from vllm_slo.serving.partners import incomplete, request_ids, split, with_partners

CHUNK_BYTES = 8 * 1024 * 1024
"""Bodies are committed together until they are this large: about 12,000 requests."""

TOGETHER_BYTES = 4 * 1024 * 1024
"""Small files that follow each other are loaded as one until they are this large on disk."""

Chunk = list[Body] | Rows | Unreadable


@dataclass(frozen=True)
class File:
    """A file to load, and how people call it."""

    path: Path
    name: str


@dataclass
class Outcome:
    """What became of the files of one load.

    ``refused`` counts by reason, ``first`` keeps the first place of each.
    ``passed_over`` are rows by table that are not loaded because the lake makes them itself (rollups).
    ``resumed`` chunks were in the lake already, under the same content and number; their rows are not counted again.
    """

    files: list[str]
    requests: int = 0
    spans: int = 0
    engine_samples: int = 0
    events: int = 0
    duplicates: int = 0
    resumed: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    first: dict[str, str] = field(default_factory=dict)
    dropped_attributes: dict[str, int] = field(default_factory=dict)
    passed_over: dict[str, int] = field(default_factory=dict)

    @property
    def read(self) -> int:
        """Rows and chunks that could be read, new or not."""
        return self.requests + self.spans + self.engine_samples + self.events + self.duplicates + self.resumed

    def refuse(self, reason: str, count: int, place: str) -> None:
        """Count what was refused."""
        self.refused[reason] = self.refused.get(reason, 0) + count
        self.first.setdefault(reason, place)

    def drop(self, counts: dict[str, int]) -> None:
        """Count attributes that were dropped because they carry prompt text."""
        for pattern, count in counts.items():
            self.dropped_attributes[pattern] = self.dropped_attributes.get(pattern, 0) + count


@dataclass(frozen=True)
class Loading:
    """Where files go and how they are read: ``now`` bounds what can have happened, ``zone`` is of benchmark clients."""

    lake: Lake
    drain: Drain
    settings: DecodeSettings
    now: datetime
    zone: ZoneInfo
    decode: Decoder = field(default_factory=lambda: fast.decode if fast.available() else plain.decode)

    def load(self, files: Sequence[File], progress: Callable[[int], None] = lambda read: None) -> Outcome:
        """Load files as one; what became of them. ``progress`` is told the bytes read so far.

        A record of the probe whose request lacks another one is committed with the next chunk, which may hold it.
        The application id is that of the contents, so a repeated or interrupted load continues where it ended, and the
        same contents under other names are known.
        """
        digests = [digest(file.path) for file in files]
        writer = f"import-{digests[0] if len(files) == 1 else sha256(''.join(digests).encode()).hexdigest()}"
        outcome = Outcome([file.name for file in files])
        torn: pa.Table | None = None
        resumed: list[Body] = []
        done = {table: self.lake.applied(table, writer) or 0 for table in ("rollups", "engine_samples")}
        number = 0
        for chunk in chunks(self._items(files, progress)):
            if isinstance(chunk, Unreadable):
                outcome.refuse(chunk.reason, 1, f"{chunk.place}: {chunk.detail}")
                continue
            number += 1
            if isinstance(chunk, Rows):
                self._rows(chunk, writer, number, done, outcome)
            elif number <= done["rollups"]:
                outcome.resumed += 1
                resumed = chunk
            else:
                if resumed:
                    torn = self._left_by(resumed)
                    resumed = []
                torn = self._bodies(chunk, torn, writer, number, outcome)
        if number + 1 > done["rollups"]:
            torn = self._left_by(resumed) if resumed else torn
            if torn is not None:
                self._apply(writer, number + 1, {"requests": torn}, outcome)
        return outcome

    def _items(self, files: Sequence[File], progress: Callable[[int], None]) -> Iterator[Item]:
        """The items of the files in turn; places are named with the file."""
        before = 0
        for file in files:
            for item in read(file.path, self.settings, self.zone, _after(before, progress)):
                yield replace(item, place=f"{file.name}: {item.place}")
            before += file.path.stat().st_size

    def _rows(self, chunk: Rows, writer: str, number: int, done: dict[str, int], outcome: Outcome) -> None:
        for refusal in chunk.refused:
            outcome.refuse(refusal.reason, refusal.count, refusal.detail)
        outcome.drop(chunk.dropped_attributes)
        match chunk.table:
            case "requests" | "spans":
                if number <= done["rollups"]:
                    outcome.resumed += 1
                    return
                self._apply(writer, number, {chunk.table: chunk.rows}, outcome)
            case "engine_samples":
                if number <= done["engine_samples"]:
                    outcome.resumed += 1
                    return
                added = samples.add(self.lake, chunk.rows, (writer, number))
                outcome.engine_samples += added
                outcome.duplicates += chunk.rows.num_rows - added
            case "events":
                added = events.add(self.lake, chunk.rows)
                outcome.events += added
                outcome.duplicates += chunk.rows.num_rows - added
            case other:
                outcome.passed_over[other] = outcome.passed_over.get(other, 0) + chunk.rows.num_rows

    def _bodies(
        self, bodies: list[Body], before: pa.Table | None, writer: str, number: int, outcome: Outcome
    ) -> pa.Table | None:
        """Commits a chunk with the records that the one before left to it; the records that it leaves to the next."""
        for body in bodies:
            for refusal in body.refused:
                outcome.refuse(refusal.reason, refusal.count, f"{body.place}: {refusal.detail}")
        lot = self._decoded(bodies, outcome)
        if before is None and not lot.probe:
            self._apply(writer, number, lot.tables, outcome)
            return None
        earlier = [] if before is None else [before]
        torn, rest = split(lot, request_ids(incomplete(with_partners(lot, earlier).requests)))
        self._apply(writer, number, with_partners(rest, earlier).tables, outcome)
        return torn

    def _left_by(self, bodies: list[Body]) -> pa.Table | None:
        """The records that a chunk of an earlier load left to the next, and maybe some that it did commit: those are
        known to the lake."""
        lot = self._decoded(bodies, Outcome([]))
        return split(lot, request_ids(incomplete(lot.requests)))[0] if lot.probe else None

    def _decoded(self, bodies: list[Body], outcome: Outcome) -> Lot:
        """Bodies joined are again a body; only where something is refused each is decoded alone, to name the place."""
        try:
            together = self._decode(b"".join(body.payload for body in bodies))
            parts = [] if together.refused else [together]
        except BodyError:
            parts = []
        for body in bodies if not parts else ():
            try:
                part = self._decode(body.payload)
            except BodyError as error:
                outcome.refuse(error.reason, 1, f"{body.place}: {error}")
                continue
            for refusal in part.refused:
                outcome.refuse(refusal.reason, refusal.count, f"{body.place}: {refusal.detail}")
            parts.append(part)
        for part in parts:
            outcome.drop(part.dropped_attributes)
        lot = Lot.joined(part.lot for part in parts)
        return Lot(settled(lot.tables, self.now), lot.probe)

    def _decode(self, payload: bytes) -> Decoded:
        return self.decode(payload, int(self.now.timestamp() * 1_000_000_000), self.settings)

    def _apply(self, writer: str, number: int, tables: Tables, outcome: Outcome) -> None:
        applied = self.drain.apply(writer, number, tables)
        outcome.requests += applied.requests
        outcome.spans += applied.spans
        outcome.engine_samples += applied.engine_samples
        outcome.events += applied.events
        outcome.duplicates += applied.duplicates


def _after(before: int, progress: Callable[[int], None]) -> Callable[[int], None]:
    """``progress`` for a part that begins ``before`` bytes into the whole."""
    return lambda at: progress(before + at)


def chunks(items: Iterable[Item]) -> Iterator[Chunk]:
    """Items as they are committed: bodies together up to CHUNK_BYTES, all else alone; the same for the same file."""
    waiting: list[Body] = []
    size = 0
    for item in items:
        if isinstance(item, Body):
            waiting.append(item)
            size += len(item.payload)
        if waiting and (size >= CHUNK_BYTES or not isinstance(item, Body)):
            yield waiting
            waiting, size = [], 0
        if not isinstance(item, Body):
            yield item
    if waiting:
        yield waiting


def together(files: Iterable[File]) -> Iterator[list[File]]:
    """Files as they are loaded: small ones that follow each other as one, large ones alone."""
    waiting: list[File] = []
    size = 0
    for file in files:
        own = file.path.stat().st_size
        if waiting and size + own > TOGETHER_BYTES:
            yield waiting
            waiting, size = [], 0
        waiting.append(file)
        size += own
    if waiting:
        yield waiting
