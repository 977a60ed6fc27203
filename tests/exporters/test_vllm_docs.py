"""The generated parts of the documentation equal the tables in the code."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from receiving import receiving
from vllm_slo.exporters.receiver.metrics import COUNTERS, PREFIX, FsyncTimes, ReceiverCollector
from vllm_slo.exporters.vllm.doctor.checks import CHECKS, checks_table
from vllm_slo.exporters.vllm.names import names_table, series_table
from vllm_slo.exporters.vllm.scrape_health import ScrapeCollector

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def receiver_table(tmp_path: Path) -> Callable[[], str]:
    """The series of a running receiver, as its registry shows them."""
    with receiving(tmp_path) as running:
        collector = ReceiverCollector(running.tally, running.spool, running.receiver.intake, FsyncTimes(), lambda: 1.0)
        families = list(collector.collect())
    return lambda: table(families, {PREFIX + counter.count: counter.labels for counter in COUNTERS})


def scrape_table() -> str:
    """The series of the scraping, as ``up`` shows them."""
    families = list(ScrapeCollector([]).collect())
    return table(families, {family.name: tuple(getattr(family, "_labelnames", ())) for family in families})


def table(families: list[Metric], labels: dict[str, tuple[str, ...]]) -> str:
    lines = ["| series | type | labels | says |", "|---|---|---|---|"]
    for family in families:
        exposed = family.name + ("_total" if family.type == "counter" else "")
        named = ", ".join(f"`{label}`" for label in labels.get(family.name, ()))
        lines.append(f"| `{exposed}` | {family.type} | {named} | {family.documentation} |")
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("page", "block"),
    [
        ("vllm-versions.md", "names"),
        ("metrics.md", "series"),
        ("metrics.md", "receiver"),
        ("metrics.md", "scrape"),
        ("doctor.md", "checks"),
    ],
)
def test_the_page_holds_the_generated_table(
    page: str, block: str, receiver_table: Callable[[], str], request: pytest.FixtureRequest
) -> None:
    tables = {"names": names_table, "series": series_table, "checks": checks_table, "receiver": receiver_table}
    tables["scrape"] = scrape_table
    expected = tables[block]()
    text = (DOCS / page).read_text()
    found = re.search(rf"(<!-- generated: {block} -->\n)(.*?)(<!-- end -->)", text, re.DOTALL)
    assert found is not None, f"{page} has no place for the table {block}"
    if request.config.getoption("--rewrite-golden"):
        (DOCS / page).write_text(text[: found.start(2)] + expected + "\n" + text[found.end(2) :])
        return
    assert found[2] == expected + "\n", f"run pytest --rewrite-golden {Path(__file__).name} and read the diff"


def test_every_check_has_a_name_of_its_own() -> None:
    ids = [check.id for check in CHECKS]
    assert len(ids) == len(set(ids))
    assert all(re.fullmatch(r"[a-z]+(-[a-z]+)*", name) for name in ids)
