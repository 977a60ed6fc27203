"""The command line as its users run it: a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def vllm_slo(lake: Path, *arguments: str, timeout: float = 180) -> str:
    """What `vllm-slo --lake LAKE ARGUMENTS` prints; fails with its errors when it does not exit 0."""
    command = [sys.executable, "-m", "vllm_slo", "--lake", str(lake), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, f"{arguments[0]} exited {done.returncode}: {done.stderr[-3000:]}"
    return done.stdout


def query(lake: Path, sql: str) -> list[dict[str, Any]]:
    """Rows of a query, numbers as numbers."""
    rows = json.loads(vllm_slo(lake, "query", "--format", "json", sql))
    assert isinstance(rows, list)
    return rows


def import_files(lake: Path, files: Sequence[Path]) -> None:
    """Imports recordings."""
    vllm_slo(lake, "import", *(str(file) for file in files))
