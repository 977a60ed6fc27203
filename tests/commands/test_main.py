"""The program as a whole: its help, its exit codes, what it says when something is wrong."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import psutil
import pytest

from vllm_slo import __main__ as program
from vllm_slo.commands.group import COMMANDS, group
from vllm_slo.commands.invocation import Invocation

HEAVY = ("duckdb", "deltalake", "pyarrow", "numpy", "pydantic", "streamlit", "grpc", "rich", "yaml")


def run(*arguments: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The program as a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "vllm_slo", *arguments],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, **environment},
        timeout=120,
        check=False,
    )


def test_help_names_every_command_in_order_and_loads_no_heavy_library(tmp_path: Path) -> None:
    done = run("--help", folder=tmp_path)
    assert done.returncode == 0
    assert re.findall(r"^  ([a-z-]+) {2,}\S", done.stdout.partition("Commands:")[2], re.MULTILINE) == [
        command.name for command in COMMANDS
    ]
    code = "import sys; import vllm_slo.commands.group; print(*(m.partition('.')[0] for m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not set(HEAVY) & set(loaded)


def test_a_configuration_is_read_without_a_library_of_the_lake() -> None:
    code = "import sys; import vllm_slo.config; print(*(m.partition('.')[0] for m in sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"duckdb", "deltalake", "pyarrow", "numpy", "pandas", "grpc", "rich"} & set(loaded)


def test_help_takes_less_than_three_tenths_of_a_second_of_processor_time(tmp_path: Path) -> None:
    def seconds() -> float:
        before = os.times()
        run("--help", folder=tmp_path)
        after = os.times()
        return (after.children_user - before.children_user) + (after.children_system - before.children_system)

    assert min(seconds() for _ in range(3)) < 0.3


def test_every_command_has_help_that_runs(tmp_path: Path) -> None:
    for command in COMMANDS:
        assert command.name
        context = click.Context(command, info_name=command.name, parent=click.Context(group))
        assert command.get_help(context).startswith("Usage:")


def test_the_version_is_that_of_the_package(tmp_path: Path) -> None:
    from vllm_slo import __version__

    assert run("--version", folder=tmp_path).stdout.strip().endswith(__version__)


def test_a_fault_is_one_message_and_exit_code_1(tmp_path: Path) -> None:
    done = run("query", "select 1", folder=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert re.fullmatch(r"vllm-slo: \S+/lake: there is no lake here; .*\n", done.stderr)


def test_wrong_usage_is_exit_code_2(tmp_path: Path) -> None:
    for arguments in (("query",), ("nonsense",), ("event", "add"), ("query", "--format", "xml", "select 1")):
        assert run(*arguments, folder=tmp_path).returncode == 2


def test_faults_of_the_configuration_stop_every_command(tmp_path: Path) -> None:
    (tmp_path / "vllm-slo.yaml").write_text("bukets: {a: 1}\napp: {port: x}\n")
    done = run("status", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines() == [
        'vllm-slo: vllm-slo.yaml: app.port: found "x", which is not a whole number; write 8501',
        "vllm-slo.yaml: bukets: found an unknown key, which is not a setting; write buckets",
    ]


def test_an_interrupt_is_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(self: Invocation) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Invocation, "reader", interrupt)
    assert program.run(["query", "select 1"]) == 130
    assert capsys.readouterr().err.strip() == "vllm-slo: interrupted"


def test_control_c_stops_a_long_query_at_once(tmp_path: Path) -> None:
    lake = tmp_path / "lake"
    (tmp_path / "none").write_bytes(b"")
    assert run("--lake", str(lake), "import", "none", folder=tmp_path).returncode == 0
    sql = "select sum(a.range * b.range) from range(100000000) a, range(100000000) b"
    command = [sys.executable, "-m", "vllm_slo", "--lake", str(lake), "query", sql]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        busy = psutil.Process(process.pid)
        while busy.cpu_times().user < 3:  # importing takes less, so the query runs
            time.sleep(0.05)
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        try:
            _, error = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
    assert time.monotonic() - began < 5
    assert process.returncode == 130, error
    assert "Traceback" not in error


def test_an_internal_error_says_how_to_see_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Invocation) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(Invocation, "reader", fail)
    monkeypatch.delenv(program.DEBUG, raising=False)
    assert program.run(["query", "select 1"]) == 1
    expected = "vllm-slo: internal error: ZeroDivisionError: a bug; VLLM_SLO_DEBUG=1 shows the traceback\n"
    assert capsys.readouterr().err == expected
    monkeypatch.setenv(program.DEBUG, "1")
    assert program.run(["query", "select 1"]) == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [("click", ["--help"], "server"), ("pyarrow", ["status"], "server"), ("streamlit", ["demo"], "app")],
)
def test_a_missing_extra_is_named(module: str, arguments: list[str], extra: str, tmp_path: Path) -> None:
    code = (
        "import sys, importlib.abc, importlib.util\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {module!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "find = importlib.util.find_spec\n"
        f"importlib.util.find_spec = lambda name, package=None: None if name == {module!r} else find(name, package)\n"
        "from vllm_slo.__main__ import run\n"
        f"sys.exit(run({arguments!r}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 1
    wanted = f"vllm-slo: this needs the module '{module}', which is not installed: pip install 'vllm-slo[{extra}]'"
    assert done.stderr.strip().splitlines()[-1] == wanted


def test_the_lake_is_the_option_then_the_variable_then_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VLLM_SLO_CONFIG", raising=False)
    assert Invocation().lake_location == str(tmp_path / "lake")
    (tmp_path / "vllm-slo.yaml").write_text("lake: configured\n")
    assert Invocation().lake_location == str(tmp_path / "configured")
    assert Invocation(lake_option="given").lake_location == str(tmp_path / "given")
    assert Invocation(lake_option="s3://bucket/lake").lake_location == "s3://bucket/lake"
    done = run("status", folder=tmp_path, VLLM_SLO_LAKE="of-the-variable")
    assert f"{tmp_path}/of-the-variable: there is no lake" in done.stderr
    done = run("--lake", "of-the-option", "status", folder=tmp_path, VLLM_SLO_LAKE="of-the-variable")
    assert f"{tmp_path}/of-the-option: there is no lake" in done.stderr


def test_a_reader_that_goes_away_is_no_fault(tmp_path: Path) -> None:
    (tmp_path / "none").write_bytes(b"")
    assert run("import", "none", folder=tmp_path).returncode == 0
    command = f"{sys.executable} -m vllm_slo query --format csv 'from range(3000000)' | head -1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.stdout == "range\n"
    assert done.stderr == ""
