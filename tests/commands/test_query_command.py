"""`vllm-slo query`: every form of output says exactly what the lake holds."""

from __future__ import annotations

import csv
import io
import json
import os
import pty
import resource
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner, Result

from vllm_slo.analytics.lake import Lake
from vllm_slo.commands.group import group

SQL = """
select * from (values
    (1, null, 'a,b', 0.1::decimal(18, 9), timestamptz '2026-11-30 12:00:00.5+02', date '2026-11-30', true, 1e300,
     '\\xAB'::blob),
    (2, 'null', '', -12345678.000000001::decimal(18, 9), null, null, false, 'nan'::double, null),
    (3, 'x"y', E'line\\nbreak', null, timestamptz '1969-12-31 23:59:59.999999+00', null, null, '-inf'::double,
     ''::blob)
) t(number, text, other, seconds, moment, day, flag, real, bytes) order by number
"""


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("query") / "lake"
    Lake.open(folder)
    return folder


def slo(lake: Path, *arguments: str | Path, stdin: str | None = None) -> Result:
    """One command line, in this process."""
    return CliRunner().invoke(group, ["--lake", str(lake), "query", *map(str, arguments)], input=stdin)


def printed(lake: Path, *arguments: str | Path) -> str:
    """What a query prints."""
    done = slo(lake, *arguments)
    assert done.exit_code == 0, done.exception
    return done.stdout


def test_csv_tells_null_from_empty_and_keeps_every_digit(lake: Path) -> None:
    text = printed(lake, "--format", "csv", SQL)
    assert text.splitlines()[:3] == [
        "number,text,other,seconds,moment,day,flag,real,bytes",
        '1,,"a,b",0.100000000,2026-11-30T10:00:00.500000Z,2026-11-30,true,1e+300,ab',
        '2,null,"",-12345678.000000001,,,false,NaN,',
    ]
    third = list(csv.reader(io.StringIO(text)))[3]
    assert third == ["3", 'x"y', "line\nbreak", "", "1969-12-31T23:59:59.999999Z", "", "", "-Infinity", ""]


def test_json_and_json_lines_are_the_same_rows_with_exact_decimals(lake: Path) -> None:
    def exact(text: str) -> Any:
        return json.loads(text, parse_float=Decimal)

    rows = exact(printed(lake, "--format", "json", SQL))
    assert rows == [exact(line) for line in printed(lake, "--format", "jsonl", SQL).splitlines()]
    assert rows[1]["seconds"] == Decimal("-12345678.000000001")
    assert [row["text"] for row in rows] == [None, "null", 'x"y']
    assert rows[2]["moment"] == "1969-12-31T23:59:59.999999Z"
    assert (rows[1]["real"], rows[0]["bytes"], rows[2]["bytes"]) == ("NaN", "ab", "")
    nested = exact(
        printed(lake, "--format", "json", "select {'a': [1.5::decimal(3, 1), null], 'b': {'c': date '2026-01-01'}} s")
    )
    assert nested == [{"s": {"a": [Decimal("1.5"), None], "b": {"c": "2026-01-01"}}}]


def test_no_rows_are_a_header_or_an_empty_list(lake: Path) -> None:
    assert printed(lake, "--format", "csv", "select 1 a where false") == "a\n"
    assert json.loads(printed(lake, "--format", "json", "select 1 a where false")) == []
    assert printed(lake, "--format", "jsonl", "select 1 a where false") == ""
    assert printed(lake, "select 1 a where false").split() == ["a"]


def test_a_table_shows_nulls_and_aligns_numbers(lake: Path) -> None:
    lines = printed(
        lake, "select * from (values (1, null, 'null'), (1000, 'b', 'c')) t(n, a, b) order by n"
    ).splitlines()
    assert [line.rstrip() for line in lines] == ["   n  a     b", '   1  null  "null"', "1000  b     c"]


def test_a_table_gives_a_terminal_no_commands(lake: Path) -> None:
    shown = printed(lake, "select E'\\x1b[2Jgone' a, chr(155) || '31m' b, E'two\\nlines' c")
    assert "\x1b" not in shown
    assert "\x9b" not in shown
    assert "\\x1b[2Jgone" in shown
    assert "lines" in shown


def test_parquet_keeps_the_types(lake: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.parquet"
    done = slo(lake, "--format", "parquet", "--output", file, SQL)
    assert done.exit_code == 0, done.exception
    assert f"3 rows in {file}" in done.stderr
    table = pq.read_table(file)
    assert table["seconds"].to_pylist() == [Decimal("0.100000000"), Decimal("-12345678.000000001"), None]
    assert str(table.schema.field("seconds").type) == "decimal128(18, 9)"


def test_an_output_file_appears_whole_or_not_at_all(lake: Path, tmp_path: Path) -> None:
    file = tmp_path / "result.csv"
    assert slo(lake, "--format", "csv", "--output", file, "select 1 a").exit_code == 0
    assert file.read_text() == "a\n1\n"
    failed = slo(lake, "--format", "csv", "--output", file, "select error('x') from range(100000)")
    assert failed.exit_code == 1
    assert file.read_text() == "a\n1\n"
    assert list(tmp_path.iterdir()) == [file]
    nowhere = slo(lake, "--format", "csv", "--output", tmp_path / "absent" / "f", "select 1")
    assert "No such file or directory; give --output a file in a folder" in str(nowhere.exception)


def test_the_limit_counts_rows(lake: Path) -> None:
    assert printed(lake, "--format", "csv", "--limit", "3", "from range(10)") == "range\n0\n1\n2\n"
    assert len(printed(lake, "--format", "csv", "--limit", "0", "from range(100000)").splitlines()) == 100_001
    assert len(printed(lake, "from range(1000)").splitlines()) == 1001


def test_sql_is_read_from_standard_input(lake: Path) -> None:
    done = slo(lake, "--format", "csv", "-", stdin="select 7 as a\n")
    assert done.stdout == "a\n7\n"


def test_a_timeout_is_a_fault_with_its_cure(lake: Path) -> None:
    done = slo(lake, "--timeout", "0.3", "select sum(a.range * b.range) from range(9000000) a, range(9000000) b")
    assert done.exit_code == 1
    assert "ran longer than 0.3 s and was stopped" in str(done.exception)


def test_a_function_that_heeds_no_memory_limit_fails_and_takes_no_more(lake: Path) -> None:
    done = _alone(lake, "select len(range(3000000000))")
    assert done.returncode == 1
    assert done.stderr.startswith("vllm-slo: Out of Memory Error")


def test_a_function_that_heeds_no_interrupt_ends_the_process_and_leaves_no_draft(lake: Path, tmp_path: Path) -> None:
    began = time.monotonic()
    endless = "select length(lpad('x', 400000000, 'y')) from range(100)"
    done = _alone(lake, "--timeout", "0.1", "--format", "csv", "--output", str(tmp_path / "out.csv"), endless)
    assert done.returncode == 1
    assert "ran longer than 0.1 s" in done.stderr
    assert time.monotonic() - began < 20
    assert list(tmp_path.iterdir()) == []


def test_the_memory_bound_ends_with_the_query(lake: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_DATA)
    printed(lake, "select 1")
    assert resource.getrlimit(resource.RLIMIT_DATA) == before


def _alone(lake: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """One command line, in a process of its own."""
    command = [sys.executable, "-m", "vllm_slo", "--lake", str(lake), "query", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


def test_a_terminal_gets_one_column_a_line_when_the_row_is_too_wide(lake: Path) -> None:
    columns = ", ".join(f"{n} as a_rather_long_name_{n}" for n in range(10))
    shown = _on_a_terminal(lake, f"select {columns}, null as nothing")
    assert "row 1" in shown
    assert "a_rather_long_name_7" in shown
    assert "null" in shown
    many = _on_a_terminal(lake, "from range(1000)")
    assert "first 200 rows; --limit 0 shows all" in many


def _on_a_terminal(lake: Path, sql: str) -> str:
    """What a terminal of 80 columns shows."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "vllm_slo", "--lake", str(lake), "query", sql],
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "80", "TERM": "xterm"},
    ) as process:
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            if not part:
                break
            shown += part
        assert process.wait() == 0, shown
    os.close(ours)
    return shown.decode()


def test_the_program_runs_it_as_a_process_too(lake: Path) -> None:
    command = [sys.executable, "-m", "vllm_slo", "--lake", str(lake), "query", "--format", "csv", "select 1 as a"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "a\n1\n"
