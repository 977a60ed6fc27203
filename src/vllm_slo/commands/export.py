"""`vllm-slo export`: the lake as files for notebooks and colleagues."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import click

from vllm_slo.commands.invocation import Invocation
from vllm_slo.commands.moments import Moment

PATH = click.Path(path_type=Path)


@click.command("export")
@click.option(
    "--duckdb", "database", metavar="FILE", type=PATH, help="Write one DuckDB database (DuckDB 1.4 and newer open it)."
)
@click.option("--parquet", metavar="DIR", type=PATH, help="Write a folder with one Parquet file a table.")
@click.option("--csv", metavar="DIR", type=PATH, help="Write a folder with one CSV file a table.")
@click.option("--since", type=Moment(), help="Rows from here on: ISO 8601, or an age such as 7d. [default: all]")
@click.option("--until", type=Moment(), help="Rows before here. [default: all]")
@click.option("--force", is_flag=True, help="Replace what is there.")
@click.option("--json", "as_json", is_flag=True, help="Print rows and sizes as JSON.")
@click.pass_obj
def export(
    invocation: Invocation,
    database: Path | None,
    parquet: Path | None,
    csv: Path | None,
    since: datetime | None,
    until: datetime | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the tables as a DuckDB database, Parquet or CSV.

    The files have the columns that queries see and need no vllm-slo to read. The database has views named as the
    tables: ids as hex text, derived columns, context bucket. Each file or folder appears whole or not at all.
    Of rollups, --since and --until mean the start of the minute, hour or day.

    \b
    vllm-slo export --duckdb lake.duckdb --since 7d
    duckdb lake.duckdb "from requests limit 3"
    """
    if since and until and until <= since:
        raise click.UsageError(f"--until {until.isoformat()} is not after --since {since.isoformat()}.")
    if database is None and parquet is None and csv is None:
        raise click.UsageError("Nothing to write; give --duckdb FILE, --parquet DIR or --csv DIR.")
    from vllm_slo.analytics.export import size_bytes, to_duckdb, to_folder

    lake = invocation.open_lake(create=False)
    buckets = invocation.config.bucket_settings()
    written: list[tuple[Path, dict[str, int]]] = []
    if database is not None:
        written.append((database, to_duckdb(lake, buckets, database, since, until, force=force)))
    for form, folder in (("parquet", parquet), ("csv", csv)):
        if folder is not None:
            written.append((folder, to_folder(lake, buckets, folder, form, since, until, force=force)))
    if as_json:
        click.echo(
            json.dumps([{"path": str(p), "rows": rows, "size_bytes": size_bytes(p)} for p, rows in written], indent=2)
        )
        return
    for path, rows in written:
        counts = ", ".join(f"{count} {table}" for table, count in rows.items())
        click.echo(f"{path}: {counts}; {size_bytes(path) / 1e6:.1f} MB")
