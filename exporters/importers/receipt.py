"""When imported rows count as received: at the latest end in their part of the file, so that the same file gives the
same rows whenever it is imported."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.exporters.otlp.lot import Tables
from vllm_slo.exporters.schema import DATE, TIME

EARLIEST = datetime(2015, 1, 1, tzinfo=UTC)
"""Earlier starts are implausible; as in the decoders."""


def settled(tables: Tables, now: datetime) -> Tables:
    """Decoded tables with `received_time` set to the latest end of their rows, those marked `clock_skew` aside.

    They must have been decoded as received at ``now``: what starts later than that is skewed by any measure.
    Tables without a receipt (samples, events) stay as they are.
    Without a row to go by, the receipt is ``now``.
    Rows whose own time is implausible are kept under the day of the receipt.
    """
    given = {name: table for name, table in tables.items() if "received_time" in table.column_names}
    ends = [pc.max(table["end_time"].filter(_sound(table))).as_py() for table in given.values() if table.num_rows]
    received = max((end for end in ends if end is not None), default=now)
    return {**tables, **{name: _received(table, received, now) for name, table in given.items()}}


def _sound(table: pa.Table) -> pa.ChunkedArray:
    return pc.fill_null(pc.not_equal(table["quality"], "clock_skew"), True)


def _received(table: pa.Table, received: datetime, now: datetime) -> pa.Table:
    start = table["start_time"]
    plausible = pc.and_(
        pc.greater_equal(start, pa.scalar(EARLIEST, TIME)),
        pc.less_equal(start, pa.scalar(now + timedelta(days=1), TIME)),
    )
    columns = {
        "received_time": pa.repeat(pa.scalar(received, TIME), table.num_rows),
        "day": pc.if_else(plausible, start.cast(DATE), pa.scalar(received.date(), DATE)),
    }
    for name, values in columns.items():
        place = table.schema.get_field_index(name)
        table = table.set_column(place, table.schema.field(name), values)
    return table
