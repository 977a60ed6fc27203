"""The generated parts of the documentation equal the tables in the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from receiving import receiving
from vllm_slo.exporters.receiver.metrics import COUNTERS, PREFIX, FsyncTimes, ReceiverCollector
from vllm_slo.exporters.vllm.doctor.checks import CHECKS, checks_table
from vllm_slo.exporters.vllm.names import names_table, series_table

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def receiver_table(tmp_path: Path) -> Callable[[], str]:
    """The series of a running receiver, as its registry shows them."""
    with receiving(tmp_path) as running:
        collector = ReceiverCollector(running.tally, running.spool, running.receiver.intake, FsyncTimes(), lambda: 1.0)
        families = list(collector.collect())
    labels = {PREFIX + counter.count: ", ".join(f"`{label}`" for label in counter.labels) for counter in COUNTERS}
    lines = ["| series | type | labels | says |", "|---|---|---|---|"]
    for family in families:
        exposed = family.name + ("_total" if family.type == "counter" else "")
        lines.append(f"| `{exposed}` | {family.type} | {labels.get(family.name, '')} | {family.documentation} |")
    return lambda: "\n".join(lines)


@pytest.mark.parametrize(
    ("page", "block"),
    [("vllm-versions.md", "names"), ("metrics.md", "series"), ("metrics.md", "receiver"), ("doctor.md", "checks")],
)
def test_the_page_holds_the_generated_table(
    page: str, block: str, receiver_table: Callable[[], str], request: pytest.FixtureRequest
) -> None:
    tables = {"names": names_table, "series": series_table, "checks": checks_table, "receiver": receiver_table}
    table = tables[block]()
    text = (DOCS / page).read_text()
    found = re.search(rf"(<!-- generated: {block} -->\n)(.*?)(<!-- end -->)", text, re.DOTALL)
    assert found is not None, f"{page} has no place for the table {block}"
    if request.config.getoption("--rewrite-golden"):
        (DOCS / page).write_text(text[: found.start(2)] + table + "\n" + text[found.end(2) :])
        return
    assert found[2] == table + "\n", f"run pytest --rewrite-golden {Path(__file__).name} and read the diff"


def test_every_check_has_a_name_of_its_own() -> None:
    ids = [check.id for check in CHECKS]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in ids)
