"""Which SQL a reader may run: one SELECT that only reads, or EXPLAIN of one.

DuckDB lets a SELECT write (`WITH x AS (COPY ... TO ...)`) and lets a table function run any SQL it is handed
(`json_execute_serialized_sql`), so the type of the statement says too little: its parse tree is searched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import duckdb

from vllm_slo.exporters.errors import SloError

READING_NODES = frozenset({"SELECT_NODE", "SET_OPERATION_NODE", "RECURSIVE_CTE_NODE", "CTE_NODE"})
"""Query nodes of DuckDB's parse tree that only read; others are COPY_QUERY_NODE, INSERT_QUERY_NODE and their like."""

TABLE_FUNCTIONS = frozenset(
    {
        "duckdb_columns",
        "duckdb_functions",
        "duckdb_settings",
        "duckdb_types",
        "duckdb_views",
        "generate_series",
        "histogram",
        "histogram_values",
        "json_each",
        "json_tree",
        "pragma_show",
        "pragma_table_info",
        "pragma_version",
        "range",
        "repeat",
        "summary",
        "unnest",
    }
)
"""Table functions that neither read files nor run SQL given as text."""

_EXPLAIN = re.compile(r"\s*explain\b(\s+analyze\b)?(\s*\(\s*(?:analyze|format)\b[\w\s,]*\))?", re.IGNORECASE)
"""The start of an EXPLAIN. Its options are words only: a quote or a comment among them could hide where they end, and
with it the statement that DuckDB runs."""


class StatementError(SloError):
    """SQL that a reader may not run, or that DuckDB cannot run."""


def check(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    """Raise StatementError unless ``sql`` is one statement that only reads.

    EXPLAIN and EXPLAIN ANALYZE are judged by what they explain.
    Syntax errors are left to DuckDB, whose message shows the place.
    """
    try:
        kind = _kind(connection, sql)
    except duckdb.ParserException:
        return
    if kind == duckdb.StatementType.EXPLAIN:
        prefix = _EXPLAIN.match(sql)
        sql = sql[prefix.end() :] if prefix else ""
        try:
            kind = _kind(connection, sql)
        except (duckdb.ParserException, StatementError):
            raise StatementError(
                "this form of EXPLAIN is not read; write EXPLAIN SELECT ... or EXPLAIN (ANALYZE, FORMAT json) SELECT "
                "... without a comment before SELECT"
            ) from None
    if kind != duckdb.StatementType.SELECT:
        hint = "; write PIVOT ... ON column IN (values)" if kind == duckdb.StatementType.MULTI else ""
        raise StatementError(f"{kind.name} is not allowed: the lake is only read here, with SELECT or EXPLAIN{hint}")
    _check_tree(connection, sql)


def _kind(connection: duckdb.DuckDBPyConnection, sql: str) -> duckdb.StatementType:
    statements = connection.extract_statements(sql)
    if len(statements) != 1:
        raise StatementError(f"found {len(statements)} SQL statements; write exactly one")
    return statements[0].type


def _check_tree(connection: duckdb.DuckDBPyConnection, sql: str) -> None:
    ((text,),) = connection.execute("select json_serialize_sql(?)", [sql]).fetchall()
    try:
        tree = json.loads(text)
    except RecursionError:
        raise StatementError("the statement is nested too deep to be looked through; write it flatter") from None
    if tree.get("error"):
        raise StatementError(
            f"DuckDB cannot show what this statement does, so it is not run: {tree.get('error_message')}"
        )
    for node in _nodes(tree["statements"]):
        kind = str(node.get("type", ""))
        if kind.endswith("_NODE") and kind not in READING_NODES:
            action = kind.removesuffix("_NODE").removesuffix("_QUERY")
            raise StatementError(f"{action} inside a SELECT is not allowed: the lake is only read here")
        if kind == "TABLE_FUNCTION":
            name = str(node["function"].get("function_name", "")).lower()
            if name not in TABLE_FUNCTIONS:
                raise StatementError(
                    f"the table function {name} is not available here: queries read the views of the lake and no other "
                    f"files or addresses; allowed are {', '.join(sorted(TABLE_FUNCTIONS))}"
                )


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            yield item
            pending.extend(item.values())
        elif isinstance(item, list):
            pending.extend(item)
