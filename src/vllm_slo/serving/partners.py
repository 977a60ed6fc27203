"""Which records of one request are still on their way, and those that a later segment holds. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.exporters.otlp.lot import Lot, concatenated
from vllm_slo.exporters.records import PROBE_VERSION

Request = tuple[str, int]
"""Request id and start in epoch microseconds: clients may use an id again."""

_NO_IDS = pa.array([], pa.string())
_LOOKED_AT = ("request_id", "start_time", "source", "records", "engine_request_id", "resource_attributes")


def request_ids(requests: pa.Table) -> pa.Array:
    """The distinct request ids of rows of ``requests``."""
    if not requests.num_rows:
        return _NO_IDS
    return pc.drop_null(pc.unique(requests["request_id"]))


def requests_of(rows: pa.Table) -> list[Request]:
    """Each row's request; rows without a request id are of none."""
    times = _array(rows["start_time"]).view(pa.int64()).to_pylist()
    pairs = zip(rows["request_id"].to_pylist(), times, strict=True)
    return [(request_id, time) for request_id, time in pairs if request_id is not None]


def incomplete(requests: pa.Table) -> pa.Table:
    """Request ids and start times of the rows of whose request a record may still be on its way.

    The engine core and the front end each send one for a request that reached the engine; a stock row of a server with
    the probe waits for both.
    """
    rows = requests.select([name for name in _LOOKED_AT if name in requests.column_names])
    of_probe = pc.equal(rows["source"], "probe")
    probe = rows.filter(of_probe)
    found = []
    if "engine_request_id" in rows.column_names:
        engine = probe.filter(pc.match_substring(probe["records"], "engine"))
        front = probe.filter(pc.match_substring(probe["records"], "frontend"))
        found.append(_outside(engine, front, "engine_request_id"))
        found.append(_outside(front, engine, "engine_request_id"))
    stock = rows.filter(
        pc.and_kleene(pc.invert(of_probe), pc.match_substring(rows["resource_attributes"], f'"{PROBE_VERSION}"'))
    )
    found.append(_outside(stock, probe, "request_id"))
    return pa.concat_tables(found)


def split(lot: Lot, ids: pa.Array) -> tuple[pa.Table | None, Lot]:
    """The lot's rows of ``requests`` with one of the request ids, null for none, and the lot without them."""
    if not lot.requests.num_rows:
        return None, lot
    mine = pc.is_in(lot.requests["request_id"], value_set=ids)
    if not pc.any(mine).as_py():
        return None, lot
    rest = {**lot.tables, "requests": lot.requests.filter(pc.invert(mine))}
    return lot.requests.filter(mine), Lot(rest, lot.probe)


def with_partners(lot: Lot, taken: Iterable[pa.Table]) -> Lot:
    """The lot with further rows of ``requests``."""
    return Lot({**lot.tables, "requests": concatenated([lot.requests, *taken])}, lot.probe)


def _outside(rows: pa.Table, others: pa.Table, column: str) -> pa.Table:
    """Of the rows whose value of the column no other row has."""
    alone = pc.invert(pc.is_in(rows[column], value_set=_array(others[column].drop_null())))
    known = pc.and_(rows[column].is_valid(), rows["request_id"].is_valid())
    return rows.select(["request_id", "start_time"]).filter(pc.and_(alone, known))


def _array(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found
