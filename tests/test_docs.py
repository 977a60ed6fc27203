"""The documentation says everything the code has, and nothing it points at is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import click
import pytest

from vllm_slo.exporters.schema import EVENT_KINDS, QUALITY_REASONS, ROLLUP_METRICS, SCHEMA_VERSION, TABLES, Table

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TABLES_PAGE = DOCS / "tables.md"
COMMANDS_PAGE = DOCS / "commands.md"


def tables_page() -> str:
    """docs/tables.md: every table, column and code word of the schema."""
    parts = [
        "# Tables",
        f"Schema version {SCHEMA_VERSION}. This page is generated from `exporters/schema.py`.",
        "Times are UTC. Durations are seconds, exact to the nanosecond (`decimal(18, 9)`); cast them with `::double` "
        "for arithmetic in floating point. Ids are bytes in the Parquet files and lower-case hex text in the views. "
        "Columns under *derived* exist in the views only.",
        *(_table(table) for table in TABLES),
        "## Quality reasons",
        "A row with a reason is kept and left out of statistics; the counts are in `vllm-slo status` and on the page.",
        _rows(("reason", "meaning"), ((f"`{name}`", text) for name, text in QUALITY_REASONS.items())),
        "## Kinds of event",
        ", ".join(f"`{kind}`" for kind in EVENT_KINDS),
        "## Metrics of rollups",
        _rows(("metric", "meaning"), ((f"`{name}`", text) for name, text in ROLLUP_METRICS.items())),
    ]
    return "\n\n".join(parts) + "\n"


def _table(table: Table) -> str:
    where = f"Partitioned by {', '.join(f'`{name}`' for name in table.partition_by)}. " if table.partition_by else ""
    stored = (
        (f"`{column.name}`", str(column.type), "" if column.required else "yes", column.description)
        for column in table.columns
    )
    parts = [f"## {table.name}", f"{table.description} {where}", _rows(("column", "type", "null", "meaning"), stored)]
    if table.derived:
        derived = ((f"`{column.name}`", f"`{column.sql}`", column.description) for column in table.derived)
        parts += ["Derived:", _rows(("column", "is", "meaning"), derived)]
    return "\n\n".join(part.rstrip() for part in parts)


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    cells = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def commands_page() -> str:
    """docs/commands.md: what every command prints for `--help`."""
    parts = [
        "# Commands",
        "This page is generated from the help texts. `./run cli COMMAND` runs a command in the environment that "
        "`./run` made; `pip install` puts `vllm-slo` itself on the path.",
        _help(),
        *(f"## {name}\n\n{_help(*name.split())}" for name in _commands()),
    ]
    return "\n\n".join(parts) + "\n"


def _help(*command: str) -> str:
    shown = subprocess.run(
        [sys.executable, "-m", "vllm_slo", *command, "--help"],
        env={**os.environ, "COLUMNS": "100"},
        capture_output=True,
        text=True,
        check=True,
    )
    return f"```\n{shown.stdout.rstrip()}\n```"


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout: the list of project files is unknown")
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def _pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def _commands() -> dict[str, click.Command]:
    """Every command by its full name: `query`, `event add`."""
    from vllm_slo.commands.group import group as everything

    found: dict[str, click.Command] = {}

    def walk(group: click.Group, prefix: str) -> None:
        for name, command in group.commands.items():
            if isinstance(command, click.Group):
                walk(command, f"{prefix}{name} ")
            else:
                found[f"{prefix}{name}"] = command

    walk(everything, "")
    return found


def test_the_page_of_tables_is_generated_from_the_schema(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-golden"):
        TABLES_PAGE.write_text(tables_page())
    assert TABLES_PAGE.read_text() == tables_page(), "run pytest --rewrite-golden tests/test_docs.py and read the diff"


def test_the_page_of_commands_is_generated_from_the_help_texts(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-golden"):
        COMMANDS_PAGE.write_text(commands_page())
    assert COMMANDS_PAGE.read_text() == commands_page(), "run pytest --rewrite-golden tests/test_docs.py"


def test_every_command_is_documented_with_an_example() -> None:
    prose = "\n".join(page.read_text() for page in _pages() if page != COMMANDS_PAGE)
    missing = [
        name for name in _commands() if not re.search(rf"(vllm-slo|\./run cli|\./run)( --lake \S+)? {name}\b", prose)
    ]
    assert not missing, f"no page shows these commands: {missing}"


def test_every_option_of_every_command_has_a_help_text() -> None:
    silent = [
        f"{name} {option.opts[0]}"
        for name, command in _commands().items()
        for option in command.params
        if isinstance(option, click.Option) and not option.help
    ]
    assert not silent


def test_every_relative_link_resolves() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in _tracked("*.md")
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if not re.match(r"[a-z]+:", target) and not _resolves(page, target)
    ]
    assert not broken


def _resolves(page: Path, target: str) -> bool:
    name, _, anchor = target.partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.exists():
        return False
    return not anchor or anchor in {_anchor(title) for title in re.findall(r"^#+ (.+)$", file.read_text(), re.M)}


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def test_every_page_of_the_documentation_is_reachable_from_its_index() -> None:
    index = (DOCS / "README.md").read_text()
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - {"README.md"}
    assert pages <= set(re.findall(r"\]\(([^)#\s]+)", index))


def test_every_file_that_the_architecture_names_exists() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text()
    names = set(re.findall(r"[\w./-]+\.py\b", page)) | set(re.findall(r"^ *(\w+/)", page, re.M))
    everything = [f"/{path.relative_to(ROOT)}" for path in _tracked()]
    folders = {f"/{part}/" for name in everything for part in name.split("/")[1:-1]}
    missing = {n for n in names if f"/{n}" not in folders and not any(each.endswith(f"/{n}") for each in everything)}
    assert not missing
