"""The page of versions says of the probe what its own table says."""

from __future__ import annotations

import re
from pathlib import Path

from vllm_slo.exporters.probe.versions import VERSIONS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "vllm-versions.md"
WORDS = {"source read": "hooks compared with the source", "tests run on it": "tested on real servers"}


def test_every_version_that_the_probe_knows_is_listed_as_what_it_is() -> None:
    section = PAGE.read_text().partition("## The probe")[2].partition("\n## ")[0]
    listed = {
        version: cells.split("|")[1].strip()
        for versions, cells in re.findall(r"^\| ([\d., ]+) \|(.*)$", section, re.MULTILINE)
        for version in versions.split(", ")
    }
    assert listed == {version.minor: WORDS[version.verified] for version in VERSIONS}
