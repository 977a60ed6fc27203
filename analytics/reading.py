"""The one way in which statistics read the views."""

from __future__ import annotations

from typing import Any

import duckdb

from vllm_slo.analytics.query import QueryError, explain


def records(connection: duckdb.DuckDBPyConnection, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a query as Python values; QueryError, caused by DuckDB's error, where that fails.

    A cursor of its own lets several threads share one connection.
    """
    try:
        with connection.cursor() as cursor:
            return cursor.execute(sql).fetchall()
    except duckdb.Error as error:
        raise QueryError(explain(str(error))) from error
