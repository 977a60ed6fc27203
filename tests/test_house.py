"""Rules of the house that no linter knows."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import requires
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("exporters", "analytics", "alerts", "dashboards")


def _tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the list of project files is unknown")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def _texts() -> list[tuple[str, str]]:
    texts = []
    for path in _tracked():
        raw = path.read_bytes()
        if b"\0" not in raw[:8000]:
            texts.append((str(path.relative_to(ROOT)), raw.decode()))
    return texts


def _lines_with(pattern: str) -> list[str]:
    here = str(Path(__file__).relative_to(ROOT))
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for name, text in _texts()
        if name != here
        for number, line in enumerate(text.splitlines(), 1)
        if re.search(pattern, line)
    ]


def test_no_file_names_a_path_of_the_machine_it_was_written_on() -> None:
    assert not _lines_with(r"(?<![\w.])/(home/\w+|root|Users/\w+|work|tmp/\w+)/")


def test_the_lock_pins_every_package_by_hash_and_names_no_registry() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert not re.search(r"https?://|--(extra-)?index-url|--find-links|file:", lock)
    pins = re.findall(r"^(\S+?)==\S+(?: ; [^\\]+)? \\\n    --hash=sha256:[0-9a-f]{64}", lock, re.M)
    lines = [line for line in lock.splitlines() if line and not line.startswith((" ", "#"))]
    assert len(pins) == len(lines)
    needed = {re.split(r"[^\w.-]", need)[0].lower().replace("_", "-") for need in requires("vllm-slo") or ()}
    assert needed - {"vllm-slo"} <= set(pins)


def test_a_wheel_holds_every_module_of_the_four_parts(tmp_path: Path) -> None:
    tree, wheels = tmp_path / "tree", tmp_path / "wheels"
    for path in _tracked():
        copy = tree / path.relative_to(ROOT)
        if copy.parts[len(tree.parts)] in (*PARTS, "src") or copy.parent == tree:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(path, copy)
    for part in PARTS:
        (tree / "src" / "vllm_slo" / part).symlink_to(f"../../{part}")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", wheels, tree]
    built = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-2000:]
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    modules = {f"vllm_slo/{path.relative_to(tree)}" for part in PARTS for path in (tree / part).rglob("*.py")}
    assert len(modules) > len(PARTS)
    assert modules <= packed
    assert "vllm_slo/py.typed" in packed


def test_each_part_is_a_relative_link_so_that_one_module_has_one_name() -> None:
    for part in PARTS:
        link = ROOT / "src" / "vllm_slo" / part
        assert link.is_symlink()
        assert link.readlink() == Path("../..") / part


HEAVY = ("duckdb", "deltalake", "streamlit", "plotly", "pandas", "polars", "grpc", "uvicorn")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("vllm_slo", (*HEAVY, "pyarrow", "numpy", "opentelemetry", "prometheus_client")),
        ("vllm_slo.exporters.vllm", (*HEAVY, "pyarrow")),
        ("vllm_slo.exporters.schema", HEAVY),
        ("vllm_slo.__main__", HEAVY),
    ],
)
def test_importing_a_module_loads_only_what_its_place_allows(module: str, absent: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print(' '.join(sorted(set(sys.modules) & set({absent!r}))))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not loaded


def test_no_module_is_a_drawer_for_everything() -> None:
    names = {path.name for path in _tracked()}
    assert not names & {"utils.py", "helpers.py", "common.py", "misc.py", "manager.py", "base.py"}


def test_the_run_script_explains_itself_and_refuses_what_it_does_not_know() -> None:
    shown = subprocess.run([ROOT / "run", "help"], capture_output=True, text=True, check=True).stdout
    for command in ("demo", "up", "cli", "lint", "test"):
        assert f"./run {command}" in shown
    unknown = subprocess.run([ROOT / "run", "dance"], capture_output=True, text=True, check=False)
    assert unknown.returncode == 1
    assert "unknown command 'dance'" in unknown.stderr
