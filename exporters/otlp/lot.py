"""Rows of several tables on their way to the lake."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import pyarrow as pa

from vllm_slo.exporters.schema import REQUESTS, SPANS

STOCK_REQUESTS = pa.schema(
    [REQUESTS.schema.field(c.name) for c in REQUESTS.columns if c.since == 1 or c.name == "records"]
)
"""What a stock span fills; a table of stock rows alone has no others of the columns of ``schema.REQUESTS``."""

Tables = Mapping[str, pa.Table]
"""Name of a table of the schema -> rows in its columns, in order. Columns newer than version 1 may be absent: null."""

_NO_REQUESTS = STOCK_REQUESTS.empty_table()
_NO_SPANS = SPANS.schema.empty_table()


@dataclass(frozen=True)
class Lot:
    """Rows that belong together, by table; a table without rows may be absent.

    ``probe``: some come from a server with the probe, so further records of the same requests may be on their way.
    """

    tables: Tables
    probe: bool = False

    @property
    def requests(self) -> pa.Table:
        """Rows of ``requests``."""
        return self.tables.get("requests", _NO_REQUESTS)

    @property
    def spans(self) -> pa.Table:
        """Rows of ``spans``."""
        return self.tables.get("spans", _NO_SPANS)

    @property
    def rows(self) -> int:
        """Rows of all tables."""
        return sum(int(table.num_rows) for table in self.tables.values())

    @classmethod
    def joined(cls, parts: Iterable[Lot]) -> Lot:
        """All rows of several lots, in order."""
        given = list(parts)
        if len(given) == 1:
            return given[0]
        names = dict.fromkeys(name for part in given for name in part.tables)
        return cls(
            {name: concatenated([part.tables[name] for part in given if name in part.tables]) for name in names},
            any(part.probe for part in given),
        )


def concatenated(tables: list[pa.Table]) -> pa.Table:
    """The rows of all tables; a column that one of them lacks is null there."""
    widest = max(tables, key=lambda table: table.num_columns)
    if any(table.num_columns != widest.num_columns for table in tables):
        tables = [widest.schema.empty_table(), *tables]
        return pa.concat_tables(tables, promote_options="default")
    return pa.concat_tables(tables)
