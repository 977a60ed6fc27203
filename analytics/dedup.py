"""Rows that are new to the lake: retries removed, further rows of one request marked (see siblings). Exact.

Two rows are the same span when trace id, span id and start time are equal and they are of the same day; among rows that
come together, the ids alone decide. A sender that tries again sends the same start time, so every retry is found,
however late, while the row is in the lake. Not found: ids that come again with another start time, and a retry of a row
whose start time is implausible (such rows are of the day of their receipt) that comes on another day.

A Bloom filter for each day of start time says "surely new" for nearly every row; whatever it suspects is looked up in
the lake's files, in the row groups whose time range holds the suspect's start time. So the filter decides only what is
read, never what is kept: a day that is not in memory is loaded, or looked up directly when few rows ask for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.analytics import parquet
from vllm_slo.analytics.bloom import Bloom, Hashes, Keys, mix
from vllm_slo.analytics.datafile import DataFile, Writer
from vllm_slo.analytics.judgement import marked, outranks
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.parquet import SOURCES
from vllm_slo.analytics.siblings import COLUMNS, DUPLICATE, Identity, Siblings, identities

MEMORY_BYTES = 128 << 20
DIRECT_SHARE = 50
"""A day is looked up without loading it while the rows that asked for it number less than 1/50 of the rows it has."""
IDLE_CHECKS = 100
"""A day that so many checks did not touch may be forgotten when another day's filter wants to grow."""

Mask = npt.NDArray[np.bool_]

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


@dataclass(frozen=True)
class Checked:
    """Rows to append, what was found, and the version of the table that this is true of."""

    rows: pa.Table
    duplicates: int
    shared: int
    version: int


@dataclass
class _Day:
    """What is known of one day of one table; ``bloom`` is null until the day is loaded.

    ``files`` are those whose rows the filter holds, ``own`` the writers whose files will hold nothing new.
    """

    bloom: Bloom | None = None
    files: set[str] = field(default_factory=set)
    own: set[Writer] = field(default_factory=set)
    asked: int = 0
    used: int = 0


class Dedup:
    """The memory of what the lake holds, for one writer. Not for use by several threads at once."""

    def __init__(self, lake: Lake, memory_bytes: int = MEMORY_BYTES) -> None:
        self._lake = lake
        self._memory_bytes = memory_bytes
        self._days: dict[tuple[str, str], _Day] = {}
        self._checks = 0
        self._checked: dict[str, list[_Day]] = {}

    @property
    def size_bytes(self) -> int:
        """Memory taken by the filters."""
        return sum(day.bloom.size_bytes for day in self._days.values() if day.bloom)

    def check(self, table: str, rows: pa.Table) -> Checked:
        """What of the rows is new to the table as it is now.

        The first of equal rows stays, in the order given; duplicates are removed. Rows of `requests` get the mark that
        `siblings` gives them, unless they carry one that is tried earlier. Rows without ids are kept.
        """
        version = self._lake.refresh(table)
        self._checks += 1
        if rows.num_rows == 0:
            return Checked(rows, 0, 0, version)
        ids = _id_hashes(rows)
        siblings = _sibling_hashes(rows) if table == "requests" else None
        suspects = _repeated(ids)
        if siblings is not None:
            suspects |= _repeated(siblings)
        files: dict[str, list[DataFile]] = {}
        for file in self._lake.data_files(table):
            files.setdefault(dict(file.partition)["day"], []).append(file)
        self._checked[table] = []
        for day, chosen in _by_day(rows):
            hashes = ids[chosen] if siblings is None else np.concatenate([ids[chosen], siblings[chosen]])
            found = self._suspects(table, day, files.get(day, []), Keys.of(hashes), int(chosen.sum()))
            suspects[chosen] |= found if siblings is None else found[: len(found) // 2] | found[len(found) // 2 :]
        if not suspects.any():
            return Checked(rows, 0, 0, version)
        return self._resolve(table, rows, suspects, files, version)

    def committed(self, table: str, writer: Writer) -> None:
        """Tell that the rows last checked went into the table under this writer: its files need not be read again."""
        for state in self._checked.pop(table, []):
            state.own.add(writer)

    def load(self, table: str, day: str) -> None:
        """Read the ids of a day (`2026-11-30`) into memory ahead of its first row."""
        self._lake.refresh(table)
        files = [f for f in self._lake.data_files(table) if dict(f.partition)["day"] == day]
        self._catch_up(table, day, files, load=True)

    def _suspects(self, table: str, day: str, files: list[DataFile], keys: Keys, rows: int) -> Mask:
        state = self._catch_up(table, day, files, load=False)
        if state.bloom is None:
            state.asked += rows
            if state.asked * DIRECT_SHARE < sum(f.rows for f in files):
                return np.ones(len(keys), dtype=bool)
            state = self._catch_up(table, day, files, load=True)
        bloom = state.bloom
        if bloom is None:
            return np.ones(len(keys), dtype=bool)
        self._checked[table].append(state)
        found = bloom.contains(keys)
        self._remember((table, day), bloom, keys)
        return found

    def _catch_up(self, table: str, day: str, files: list[DataFile], *, load: bool) -> _Day:
        """The day with all that others committed to it; loaded when asked for or when the lake has none of it."""
        key = (table, day)
        state = self._days.pop(key, None) or _Day()
        self._days[key] = state  # most recently used last
        state.used = self._checks
        if state.bloom is None and (load or not files):
            state.bloom, state.asked = Bloom(), 0
        if state.bloom is None:
            return state
        for file in files:
            if file.path in state.files:
                continue
            if file.writer in state.own:
                state.own.discard(file.writer)
            elif not self._sources(table, file) <= state.files:
                self._learn(table, key, state.bloom, file)
            state.files.add(file.path)
        return state

    def _sources(self, table: str, file: DataFile) -> set[str]:
        """The files that maintenance merged into this one; a set holding the file itself if it is no such file."""
        if file.writer is not None:
            return {file.path}
        filesystem, path = self._lake.filesystem(table, file)
        with parquet.opened(filesystem, path) as stored:
            text = (stored.metadata.metadata or {}).get(SOURCES.encode())
        return set(text.decode().split("\n")) if text else {file.path}

    def _learn(self, table: str, key: tuple[str, str], bloom: Bloom, file: DataFile) -> None:
        filesystem, path = self._lake.filesystem(table, file)
        columns = ["start_time", "trace_id", "span_id", *(["request_id"] if table == "requests" else [])]
        with parquet.opened(filesystem, path) as stored:
            for batch in stored.iter_batches(batch_size=65_536, columns=columns):
                rows = pa.Table.from_batches([batch])
                hashes = _id_hashes(rows)
                if table == "requests":
                    hashes = np.concatenate([hashes, _sibling_hashes(rows)])
                self._remember(key, bloom, Keys.of(hashes))

    def _remember(self, key: tuple[str, str], bloom: Bloom, keys: Keys) -> None:
        """Add keys to a day's filter; for its growth the days used longest ago are forgotten, in use ones only for a
        filter that has no memory yet (others are filled on: more suspects, the same rows)."""
        wanted = bloom.growth_bytes(len(keys))
        first = bloom.size_bytes == 0
        for other, state in list(self._days.items()):
            if self.size_bytes + wanted <= self._memory_bytes:
                break
            if other != key and state.bloom and (first or state.used < self._checks - IDLE_CHECKS):
                self._days[other] = _Day()
        bloom.add(keys, self._memory_bytes - self.size_bytes)

    def _resolve(
        self, table: str, rows: pa.Table, suspects: Mask, files: dict[str, list[DataFile]], version: int
    ) -> Checked:
        at = np.flatnonzero(suspects)
        picked = rows.take(pa.array(at))
        times = np.unique(_times(picked))
        known = Siblings()
        for day in {str(d) for d in picked["day"].unique().to_pylist()}:
            for file in files.get(day, []):
                for row in self._rows_at(table, file, times):
                    known.note(row)
        drop = np.zeros(rows.num_rows, dtype=bool)
        marks: dict[str, list[int]] = {}
        for place, row in zip(at, identities(picked, _times(picked).tolist()), strict=True):
            verdict = known.verdict(row)
            if verdict == DUPLICATE:
                drop[place] = True
                continue
            if verdict is not None:
                marks.setdefault(verdict, []).append(int(place))
            known.note(row._replace(quality=verdict) if verdict and outranks(verdict, row.quality) else row)
        return _applied(rows, drop, marks, version)

    def _rows_at(self, table: str, file: DataFile, times: npt.NDArray[np.int64]) -> list[Identity]:
        """Identities of a file's rows that start at one of the times, reading no row group without any."""
        if file.low is not None and file.high is not None and not _any_between(times, _us(file.low), _us(file.high)):
            return []
        filesystem, path = self._lake.filesystem(table, file)
        found: list[Identity] = []
        with parquet.opened(filesystem, path) as stored:
            columns = [name for name in COLUMNS if name in stored.schema_arrow.names]
            place = stored.schema_arrow.get_field_index("start_time")
            for group in range(stored.num_row_groups):
                statistics = stored.metadata.row_group(group).column(place).statistics
                if statistics is not None and not _any_between(times, _us(statistics.min), _us(statistics.max)):
                    continue
                hits = np.flatnonzero(np.isin(_times(stored.read_row_group(group, columns=["start_time"])), times))
                if len(hits):
                    rows = stored.read_row_group(group, columns=columns).take(pa.array(hits))
                    found += identities(rows, _times(rows).tolist())
        return found


def _applied(rows: pa.Table, drop: Mask, marks: dict[str, list[int]], version: int) -> Checked:
    before = rows["quality"] if "shared_request_id" in marks else None
    for reason, places in marks.items():
        chosen = np.zeros(rows.num_rows, dtype=bool)
        chosen[places] = True
        rows = marked(rows, chosen, reason)
    shared = 0
    if before is not None:
        changed = pc.fill_null(pc.not_equal(rows["quality"], pc.fill_null(before, "")), False)
        shared = int(pc.sum(pc.and_(changed, pc.equal(rows["quality"], "shared_request_id"))).as_py() or 0)
    return Checked(rows.filter(pa.array(~drop)) if drop.any() else rows, int(drop.sum()), shared, version)


def _by_day(rows: pa.Table) -> list[tuple[str, Mask]]:
    days = rows["day"].combine_chunks()
    numbers = days.view(pa.int32()).to_numpy()
    distinct = np.unique(numbers)
    return [(str(np.datetime64(int(number), "D")), numbers == number) for number in distinct]


def _repeated(hashes: Hashes) -> Mask:
    """Which hashes occur more than once."""
    ordered = np.sort(hashes)
    twice = ordered[1:][ordered[1:] == ordered[:-1]]
    return np.isin(hashes, twice) if len(twice) else np.zeros(len(hashes), dtype=bool)


def _id_hashes(rows: pa.Table) -> Hashes:
    (low, high), (span,) = _tail_words(rows["trace_id"], 2), _tail_words(rows["span_id"], 1)
    return mix(mix(low) ^ high) ^ mix(span)


def _sibling_hashes(rows: pa.Table) -> Hashes:
    """Of start time and request id (its last 32 bytes); of the ids where there is no request id.

    Of the ids also for `superseded` rows of which nothing but one row of the probe comes with them: that one stands
    for both, and neither need be looked up for the other.
    """
    column = rows["request_id"]
    hashes = mix(_times(rows).view(np.uint64))
    for word in _tail_words(column, 4):
        hashes = mix(hashes ^ word)
    alone = np.asarray(column.is_null().to_numpy(), dtype=bool) if column.null_count else None
    if "engine_request_id" in rows.column_names and "quality" in rows.column_names:
        beside = _is(rows, "quality", "superseded")
        if beside.any():
            values, counts = np.unique(hashes[~beside], return_counts=True)
            one_row = np.intersect1d(values[counts == 1], hashes[_is(rows, "source", "probe")])
            beside &= np.isin(hashes, one_row)
            alone = beside if alone is None else alone | beside
    return hashes if alone is None else np.where(alone, mix(~_id_hashes(rows)), hashes)


def _is(rows: pa.Table, column: str, text: str) -> Mask:
    return np.asarray(pc.fill_null(pc.equal(rows[column], text), False).to_numpy(), dtype=bool)


def _tail_words(column: pa.ChunkedArray, words: int) -> list[Hashes]:
    """The last ``8 * words`` bytes of each value as 64-bit words, last first, zero-filled in front; zeros for null."""
    array = column.combine_chunks()
    if isinstance(array, pa.ChunkedArray):
        array = pa.concat_arrays(array.chunks)
    n = len(array)
    _, offset_buffer, data = array.buffers()
    if data is None or data.size == 0:
        return [np.zeros(n, dtype=np.uint64) for _ in range(words)]
    offsets = np.frombuffer(offset_buffer, dtype=np.int32)[array.offset : array.offset + n + 1].astype(np.int64)
    padded = np.concatenate([np.zeros(8 * words, dtype=np.uint8), np.frombuffer(data, dtype=np.uint8)])
    every = np.ndarray((len(padded) - 7,), dtype=np.uint64, buffer=padded, strides=(1,))
    ends, lengths = offsets[1:] + 8 * words, np.diff(offsets)
    result = []
    for back in range(words):
        word = every[ends - 8 * (back + 1)]
        missing = np.clip(8 * (back + 1) - lengths, 0, 8)
        if missing.any():
            word = np.where(missing == 8, 0, (word >> (8 * np.minimum(missing, 7)).astype(np.uint64)))
        result.append(word.astype(np.uint64))
    return result


def _times(rows: pa.Table) -> npt.NDArray[np.int64]:
    column = rows["start_time"].combine_chunks()
    return np.asarray(column.view(pa.int64()).to_numpy(zero_copy_only=False))


def _us(time: datetime) -> int:
    return (time.astimezone(UTC) - _EPOCH) // _MICROSECOND


def _any_between(times: npt.NDArray[np.int64], low: int, high: int) -> bool:
    """Whether one of the sorted times lies in [low, high]."""
    first = int(np.searchsorted(times, low))
    return first < len(times) and int(times[first]) <= high
