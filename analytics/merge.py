"""Records of one request -> one row, by ``schema.PRECEDENCE``. Pure, whole columns at a time.

The records of the probe (engine core, front end) belong together when engine request id, start and instance are equal.
A stock row with the request id, start and instance of such a request stays a row of its own, marked `superseded`, so
that both can be joined; the probe's row counts. Where it is certain that the two are of one completion (one stock row,
one row of the probe, no child of n > 1, no mark on the stock row), its values take part in the merge as well and
``records`` says so; else only those that all completions of a request share.
Rows that were merged or judged before (with a mark that is not of times alone) are left as they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.analytics import judgement
from vllm_slo.analytics.cells import distinct
from vllm_slo.exporters.schema import PRECEDENCE, TEXT

Integers = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

WORDS = ("engine", "frontend", "edge", "stock")
"""Words of ``records`` in the order in which a row names them."""
SHARED = frozenset({"max_tokens", "temperature", "top_p"})
"""What the client asked of the whole request: equal in the stock rows of all its completions."""

_BITS = {word: 1 << place for place, word in enumerate(WORDS)}
_STOCK = _BITS["stock"]
_CHILD = "^[0-9]+_"
"""How the engine request id of a child of n > 1 begins."""
_LAST = len(WORDS)


@dataclass(frozen=True)
class Merged:
    """Rows, and how many records were left out because the same one came twice."""

    rows: pa.Table
    duplicates: int = 0


@dataclass(frozen=True)
class _Members:
    """Which row takes part in which merged row. ``limited``: only with its SHARED columns."""

    row: Integers
    group: Integers
    words: Integers
    limited: Mask

    def at(self, places: npt.NDArray[Any]) -> _Members:
        return _Members(self.row[places], self.group[places], self.words[places], self.limited[places])


def merge(requests: pa.Table) -> Merged:
    """Rows of ``requests``: those that are no open records of the probe in their order, then the merged ones.

    The same records in any order and in any chunks give the same rows. Rows without the probe come back untouched.
    """
    if "engine_request_id" not in requests.column_names or not requests.num_rows:
        return Merged(requests)
    rows = requests.combine_chunks()
    words = _words(rows)
    open_ = (words > 0) & (words != _STOCK) & _is(rows, "source", "probe") & judgement.undecided(rows)
    if not open_.any():
        return Merged(requests)
    members, duplicates = _records(rows, np.flatnonzero(open_), words)
    stock = np.flatnonzero((words == _STOCK) & _is(rows, "source", "stock"))
    superseded, members = _with_stock(rows, members, stock)
    merged = judgement.judged(_folded(rows, members))
    others = np.flatnonzero(~open_)
    if not len(others):
        return Merged(merged, duplicates)
    kept = judgement.marked(rows.take(pa.array(others)), np.isin(others, superseded), "superseded")
    return Merged(pa.concat_tables([kept, merged.select(kept.column_names)]), duplicates)


def words_text(bits: int) -> str:
    """Column ``records`` of a row made of these records."""
    return "+".join(word for word, bit in _BITS.items() if bits & bit)


def words_of(text: str | None) -> frozenset[str]:
    """The records that column ``records`` names."""
    return frozenset(text.split("+")) if text else frozenset()


def _records(rows: pa.Table, at: Integers, words: Integers) -> tuple[_Members, int]:
    """The probe's records grouped; of those that came twice the one with the lowest span id."""
    picked = rows.select(["engine_request_id", "start_time", "service_instance_id", "span_id"]).take(pa.array(at))
    engine = _codes(picked["engine_request_id"])
    alone = np.flatnonzero(engine < 0)
    engine[alone] = -1 - alone
    group, _ = distinct([engine, _int64(picked["start_time"]), _codes(picked["service_instance_id"])])
    members = _Members(at, group, words[at], np.zeros(len(at), dtype=bool))
    order = np.lexsort((_ranks(picked["span_id"]), members.words, group))
    ordered = members.at(order)
    again = np.zeros(len(order), dtype=bool)
    again[1:] = (ordered.group[1:] == ordered.group[:-1]) & (ordered.words[1:] == ordered.words[:-1])
    return ordered.at(~again), int(again.sum())


def _with_stock(rows: pa.Table, members: _Members, stock: Integers) -> tuple[Integers, _Members]:
    """The stock rows of requests that the probe reported, and the members with what may be taken from them."""
    reached = members.at((members.words & (_BITS["engine"] | _BITS["frontend"])) > 0)
    if not len(stock) or not len(reached.row):
        return stock[:0], members
    every = np.concatenate([reached.row, stock])
    picked = rows.select(["request_id", "start_time", "service_instance_id"]).take(pa.array(every))
    request = _codes(picked["request_id"])
    nameless = np.flatnonzero(request < 0)
    request[nameless] = -1 - nameless
    key, keys = distinct([request, _int64(picked["start_time"]), _codes(picked["service_instance_id"])])
    size = len(keys[0])
    ours, theirs = key[: len(reached.row)], key[len(reached.row) :]
    pairs, _ = distinct([ours, reached.group])
    first = np.unique(pairs, return_index=True)[1]
    group, its_key = reached.group[first], ours[first]
    groups_of_key = np.bincount(its_key, minlength=size)
    mine = groups_of_key[theirs] > 0
    superseded, theirs = stock[mine], theirs[mine]
    if not len(superseded):
        return superseded, members
    span = _ranks(rows["span_id"].take(pa.array(superseded)))
    order = np.lexsort((span, theirs))
    fresh = np.ones(len(order), dtype=bool)
    fresh[1:] = (theirs[order][1:] != theirs[order][:-1]) | (span[order][1:] != span[order][:-1])
    distinct_of_key = np.bincount(theirs[order][fresh], minlength=size)
    representative = np.full(size, -1, dtype=np.int64)
    representative[theirs[order][::-1]] = superseded[order][::-1]
    chosen = representative[its_key]
    there = chosen >= 0
    chosen, group, its_key = chosen[there], group[there], its_key[there]
    children = np.unique(reached.group[_matches(rows, "engine_request_id", _CHILD, reached.row)])
    certain = (groups_of_key[its_key] == 1) & (distinct_of_key[its_key] == 1) & ~np.isin(group, children)
    certain &= _valid(rows["quality"].take(pa.array(chosen)), absent=True)
    added = _Members(chosen, group, np.full(len(chosen), _STOCK, dtype=np.int64), ~certain)
    joined = [np.concatenate([a, b]) for a, b in zip(vars(members).values(), vars(added).values(), strict=True)]
    return superseded, _Members(*joined)


def _folded(rows: pa.Table, members: _Members) -> pa.Table:
    """One row a group, in the order of the first record of each: every column by its precedence."""
    size = int(members.group.max()) + 1
    first = np.full(size, rows.num_rows, dtype=np.int64)
    np.minimum.at(first, members.group, np.where(members.words == _STOCK, rows.num_rows, members.row))
    place = np.empty(size, dtype=np.int64)
    place[np.argsort(first, kind="stable")] = np.arange(size)
    members = replace(members, group=place[members.group])
    full = members.at(~members.limited)
    orders = {names: _in_order(full, names) for names in set(PRECEDENCE.values())}
    shared = {names: _in_order(members, names) for names in set(PRECEDENCE.values())}
    columns: dict[str, pa.Array] = {}
    for name in rows.column_names:
        names = PRECEDENCE.get(name, PRECEDENCE[""])
        columns[name] = _first_known(_array(rows[name]), *(shared if name in SHARED else orders)[names])
    bits = np.zeros(size, dtype=np.int64)
    np.bitwise_or.at(bits, full.group, full.words)
    texts = pa.array([words_text(value) for value in range(1 << len(WORDS))], TEXT)
    columns["records"] = texts.take(pa.array(bits))
    columns["source"] = pa.repeat(pa.scalar("probe", TEXT), size)
    return pa.Table.from_arrays([columns[name] for name in rows.column_names], schema=rows.schema)


def _in_order(members: _Members, names: tuple[str, ...]) -> tuple[Integers, Integers]:
    """Rows by group, the first in precedence first, and where each group begins."""
    rank = np.full(1 << len(WORDS), _LAST, dtype=np.int64)
    for place, word in reversed(list(enumerate(names))):
        rank[(np.arange(len(rank)) & _BITS[word]) > 0] = place
    order = np.lexsort((members.words, rank[members.words], members.group))
    group = members.group[order]
    return members.row[order], np.flatnonzero(np.concatenate([[True], group[1:] != group[:-1]]))


def _first_known(column: pa.Array, row: Integers, begin: Integers) -> pa.Array:
    """Of each group the first value that is not null."""
    if column.null_count == len(column):
        return pa.nulls(len(begin), column.type)
    if column.null_count == 0:
        return column.take(pa.array(row[begin]))
    there = np.where(_valid(column)[row], np.arange(len(row)), len(row))
    found = np.minimum.reduceat(there, begin)
    end = np.append(begin[1:], len(row))
    known = found < end
    return column.take(pa.array(row[np.where(known, found, 0)], mask=~known))


def _words(rows: pa.Table) -> Integers:
    """The records of each row as bits; 0 where ``records`` is null."""
    encoded = _array(rows["records"]).dictionary_encode()
    bits = [sum(_BITS.get(word, 0) for word in text.split("+")) for text in encoded.dictionary.to_pylist()]
    codes = pc.fill_null(encoded.indices, len(bits)).to_numpy(zero_copy_only=False)
    return np.asarray(np.array([*bits, 0], dtype=np.int64)[codes])


def _is(rows: pa.Table, column: str, text: str) -> Mask:
    return np.asarray(pc.fill_null(pc.equal(rows[column], text), False).to_numpy(), dtype=bool)


def _matches(rows: pa.Table, column: str, pattern: str, at: Integers) -> Mask:
    found = pc.match_substring_regex(_array(rows[column]).take(pa.array(at)), pattern)
    return np.asarray(pc.fill_null(found, False).to_numpy(zero_copy_only=False), dtype=bool)


def _valid(column: pa.Array | pa.ChunkedArray, *, absent: bool = False) -> Mask:
    array = _array(column)
    found = array.is_null() if absent else array.is_valid()
    return np.asarray(found.to_numpy(zero_copy_only=False), dtype=bool)


def _codes(column: pa.ChunkedArray) -> Integers:
    """A number for each value, -1 for null."""
    encoded = _array(column).dictionary_encode()
    return np.array(pc.fill_null(encoded.indices, -1).to_numpy(zero_copy_only=False), dtype=np.int64)


def _ranks(column: pa.ChunkedArray | pa.Array) -> Integers:
    """The place of each value among the distinct ones in order; null first."""
    encoded = _array(column).dictionary_encode()
    rank = np.empty(len(encoded.dictionary) + 1, dtype=np.int64)
    rank[pc.sort_indices(encoded.dictionary).to_numpy()] = np.arange(len(encoded.dictionary))
    rank[-1] = -1
    return np.asarray(rank[pc.fill_null(encoded.indices, len(rank) - 1).to_numpy(zero_copy_only=False)])


def _int64(column: pa.ChunkedArray) -> Integers:
    return np.asarray(_array(column).view(pa.int64()).to_numpy(zero_copy_only=False))


def _array(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    found = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found
