"""Which records of one request are still on their way, and those that a later segment holds. Pure."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.exporters.otlp.lot import Lot, concatenated
from vllm_slo.exporters.records import PROBE_VERSION

NO_IDS = pa.array([], pa.string())


def request_ids(requests: pa.Table) -> pa.Array:
    """The distinct request ids of rows of ``requests``."""
    if not requests.num_rows:
        return NO_IDS
    return pc.drop_null(pc.unique(requests["request_id"]))


def incomplete(requests: pa.Table, drained: pa.Array = NO_IDS) -> pa.Array:
    """The ids of the requests of which a record may still be on its way.

    The engine core and the front end each send one for a request that reached the engine; a stock row of a server with
    the probe waits for both. Requests in ``drained`` (ids of requests that were drained) wait for nobody.
    """
    rows = requests.filter(pc.invert(pc.is_in(requests["request_id"], value_set=drained)))
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
    return pc.unique(pa.concat_arrays([_array(ids) for ids in found]))


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


def _outside(rows: pa.Table, others: pa.Table, column: str) -> pa.ChunkedArray:
    """Request ids of the rows whose value of the column no other row has."""
    alone = pc.invert(pc.is_in(rows[column], value_set=_array(others[column].drop_null())))
    return rows["request_id"].filter(pc.and_(alone, rows[column].is_valid())).drop_null()


def _array(column: pa.ChunkedArray) -> pa.Array:
    found = column.combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found
