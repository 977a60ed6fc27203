"""SQL of the views that readers see: the stored columns with ids as text, the derived ones, and the context bucket."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from vllm_slo.analytics.buckets import Buckets
from vllm_slo.exporters.schema import BYTES, REQUESTS, Table


def view_sql(table: Table, source: str, buckets: Buckets) -> str:
    """A SELECT over ``source`` (anything FROM takes) that gives the view of ``table``.

    Columns come in the order of the schema, then the derived ones; `requests` ends with `bucket`.
    Every expression is computed only where a query asks for its column.
    """
    columns = [
        f"lower(hex({column.name})) as {column.name}" if column.type == BYTES else column.name
        for column in table.columns
    ]
    columns += [f"{derived.sql} as {derived.name}" for derived in table.derived]
    if table is REQUESTS:
        columns.append(f"{buckets.sql('prompt_tokens')} as bucket")
    return f"select {', '.join(columns)} from {source}"


def view_columns(table: Table) -> tuple[str, ...]:
    """Names of the columns that the view of ``table`` has."""
    names = (*(c.name for c in table.columns), *(d.name for d in table.derived))
    return (*names, "bucket") if table is REQUESTS else names


def files_sql(table: Table, files: Sequence[str]) -> str:
    """A FROM item over the Parquet ``files`` of ``table``, partition columns from their folders.

    No files: a typed item without rows.
    Once the schema has had a second version, older files lack columns: then files are matched by name and what none
    of them has is null. That costs reading every footer at each query, so it is left out while no column is newer.
    """
    if not files:
        return f"({empty_sql(table)})"
    types = ", ".join(f"'{name}': {sql_type(table.schema.field(name).type)}" for name in table.partition_by)
    hive = f"hive_partitioning = true, hive_types = {{{types}}}" if types else "hive_partitioning = false"
    names = ", ".join(quoted(file) for file in files)
    if all(column.since == 1 for column in table.columns):
        return f"read_parquet([{names}], {hive})"
    return f"({empty_sql(table)} union all by name from read_parquet([{names}], {hive}, union_by_name = true))"


def empty_sql(table: Table) -> str:
    """A SELECT with the stored columns of ``table`` and no rows."""
    columns = ", ".join(f"null::{sql_type(field.type)} as {field.name}" for field in table.schema)
    return f"select {columns} where false"


def sql_type(kind: pa.DataType) -> str:
    """DuckDB's name of an Arrow type of the schema."""
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision}, {kind.scale})"
    return _SQL_TYPES[str(kind)]


def quoted(text: str) -> str:
    """``text`` as a SQL string literal."""
    return "'" + text.replace("'", "''") + "'"


_SQL_TYPES = {
    "timestamp[us, tz=UTC]": "timestamptz",
    "int64": "bigint",
    "int16": "smallint",
    "double": "double",
    "string": "varchar",
    "binary": "blob",
    "date32[day]": "date",
    "bool": "boolean",
}
