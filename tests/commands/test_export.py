"""`vllm-slo export`: a stock DuckDB, Parquet and CSV hold what queries see."""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from importing import rows
from vllm_slo.analytics.views import view_columns
from vllm_slo.commands.group import group
from vllm_slo.exporters.schema import REQUESTS, TABLES


def slo(lake: Path, *arguments: str | Path) -> Result:
    """One command line, in this process."""
    return CliRunner().invoke(group, ["--lake", str(lake), *map(str, arguments)])


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The lake of the demo."""
    folder = tmp_path_factory.mktemp("export") / "lake"
    assert slo(folder, "demo", "--no-app", "--lake", folder).exit_code == 0
    return folder


@pytest.mark.parametrize("attached", [False, True])
def test_a_stock_duckdb_sees_the_views_as_queries_do(attached: bool, lake: Path, tmp_path: Path) -> None:
    file = tmp_path / "lake.duckdb"
    done = slo(lake, "export", "--duckdb", file)
    assert done.exit_code == 0, done.exception
    assert "3024 requests, 0 spans, 178 engine_samples, 5 events" in done.stdout
    with duckdb.connect() if attached else duckdb.connect(str(file), read_only=True) as connection:
        prefix = ""
        if attached:
            connection.execute(f"attach '{file}' as colleague (read_only)")
            prefix = "colleague."
        connection.execute("set TimeZone = 'UTC'")
        for table in TABLES:
            found = connection.sql(f"from {prefix}{table.name} order by all").to_arrow_table()
            assert tuple(found.column_names) == view_columns(table)
            assert found.to_pylist() == rows(lake, f"from {table.name} order by all"), table.name


def test_an_older_duckdb_can_open_the_file(lake: Path, tmp_path: Path) -> None:
    file = tmp_path / "lake.duckdb"
    slo(lake, "export", "--duckdb", file)
    version = int.from_bytes(file.read_bytes()[12:20], "little")
    assert version <= 67, "storage of DuckDB 1.4; 2.0 writes 69 unless told otherwise"
    with duckdb.connect(str(file), read_only=True) as connection:
        ((view,),) = connection.execute("select sql from duckdb_views() where view_name = 'requests'").fetchall()
    for derived in REQUESTS.derived:
        assert f"AS {derived.name}" in view.replace('"', "")
        assert re.search(rf"CAST\(\W?{derived.name}\W? AS ", view), "other versions derive other types"


def test_parquet_and_csv_have_the_columns_and_rows_of_the_views(lake: Path, tmp_path: Path) -> None:
    done = slo(lake, "export", "--parquet", tmp_path / "p", "--csv", tmp_path / "c")
    assert done.exit_code == 0, done.exception
    for table in TABLES:
        expected = rows(lake, f"from {table.name} order by all")
        assert pq.read_table(tmp_path / "p" / f"{table.name}.parquet").column_names == list(view_columns(table))
        with (tmp_path / "c" / f"{table.name}.csv").open() as file:
            assert len(list(csv.DictReader(file))) == len(expected)
    with (tmp_path / "c" / "requests.csv").open() as file:
        found = {row["span_id"]: row for row in csv.DictReader(file)}
    for row in rows(lake, "from requests"):
        known = found[row["span_id"]]
        assert known["start_time"] == f"{row['start_time']:%Y-%m-%dT%H:%M:%S.%fZ}"
        assert known["queue_seconds"] == format(row["queue_seconds"], "f")
        assert known["tenant"] == ""


def test_since_and_until_cut_every_table_by_its_time(lake: Path, tmp_path: Path) -> None:
    between = ("--since", "2026-12-01T04:37:00Z", "--until", "2026-12-01T04:39:00Z")
    done = slo(lake, "export", "--duckdb", tmp_path / "cut", *between, "--json")
    assert done.exit_code == 0, done.exception
    (written,) = json.loads(done.stdout)
    for table in TABLES:
        where = f"{table.time_column} >= '2026-12-01 04:37:00+00' and {table.time_column} < '2026-12-01 04:39:00+00'"
        assert written["rows"][table.name] == len(rows(lake, f"from {table.name} where {where}"))
    assert 0 < written["rows"]["requests"] < 3024
    assert written["size_bytes"] == (tmp_path / "cut").stat().st_size
    with duckdb.connect(str(tmp_path / "cut"), read_only=True) as connection:
        about = dict(connection.execute("from export").fetchall())
    assert (about["since"], about["until"]) == ("2026-12-01T04:37:00.000000Z", "2026-12-01T04:39:00.000000Z")


@pytest.mark.parametrize("form", ["--duckdb", "--parquet", "--csv"])
def test_what_is_there_is_replaced_only_by_force(form: str, lake: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    assert slo(lake, "export", form, target).exit_code == 0
    refused = slo(lake, "export", form, target)
    assert refused.exit_code == 1
    assert "is there already; --force replaces it" in str(refused.exception)
    assert slo(lake, "export", form, target, "--force", "--until", "2000-01-01").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_wrong_calls_say_what_to_write(lake: Path, tmp_path: Path) -> None:
    nothing = slo(lake, "export")
    assert (nothing.exit_code, "give --duckdb FILE, --parquet DIR or --csv DIR" in nothing.stderr) == (2, True)
    backwards = slo(lake, "export", "--csv", tmp_path / "x", "--since", "1d", "--until", "2d")
    assert (backwards.exit_code, "is not after --since" in backwards.stderr) == (2, True)
    nowhere = slo(lake, "export", "--duckdb", tmp_path / "absent" / "file")
    assert "absent is not there; make it first" in str(nowhere.exception)


def test_the_program_runs_it_as_a_process_too(lake: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm_slo", "--lake", str(lake), "export", "--csv", str(tmp_path / "c")]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "c" / "events.csv").read_text().count("\n") == 6
