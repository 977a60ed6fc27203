"""What a spool folder shows from outside, without taking its lock: what waits, what was counted, who owns it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_slo.exporters.receiver.segment import HEADER_BYTES
from vllm_slo.exporters.receiver.tally import Tally

COUNTERS_FILE = "counters.json"
SCRAPING_FILE = "scraping.json"
"""How the scraping of the process that owns the folder goes; absent when it scrapes nothing."""


@dataclass(frozen=True)
class SpoolState:
    """State of one spool folder; all zero where no receiver ever ran.

    ``waiting_since`` is the last write to the oldest segment that the lake does not have yet.
    ``owner`` is the process that holds the folder, None when none does.
    ``counts`` are the receiver's, saved at ``counted_time``: {count: {label: number}}.
    ``scraping`` is the document of ``scrape_health``, None when nothing is scraped.
    """

    folder: str
    waiting_segments: int = 0
    waiting_bytes: int = 0
    waiting_since: datetime | None = None
    owner: int | None = None
    counted_time: datetime | None = None
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    quarantined: dict[str, str] = field(default_factory=dict)
    scraping: dict[str, Any] | None = None


def look(folder: Path, quarantine: Path | None = None) -> SpoolState:
    """The state of a spool folder and of the quarantine beside it (segment -> reason). Files may go while it looks."""
    waiting = []
    for path in folder.glob("*.seg"):
        try:
            found = path.stat()
        except FileNotFoundError:
            continue
        if found.st_size > HEADER_BYTES:
            waiting.append(found)
    counters = folder / COUNTERS_FILE
    return SpoolState(
        folder=str(folder),
        waiting_segments=len(waiting),
        waiting_bytes=sum(found.st_size for found in waiting),
        waiting_since=min((_time(found.st_mtime) for found in waiting), default=None),
        owner=_owner(folder / "lock"),
        counted_time=_time(counters.stat().st_mtime) if counters.is_file() else None,
        counts=Tally.load(counters).counts(),
        quarantined=_quarantined(quarantine or folder.parent / "quarantine"),
        scraping=_scraping(folder / SCRAPING_FILE),
    )


def _scraping(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and isinstance(found.get("targets"), list) else None


def _time(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def _owner(lock: Path) -> int | None:
    """The process named in the lock file, while it lives."""
    try:
        number = int(lock.read_text(encoding="ascii"))
        os.kill(number, 0)
    except PermissionError:
        return number
    except (OSError, ValueError):
        return None
    return number


def _quarantined(folder: Path) -> dict[str, str]:
    reasons = {}
    for path in sorted(folder.glob("*.seg")):
        reason = path.with_suffix(".reason.txt")
        reasons[path.name] = reason.read_text(encoding="utf-8").strip() if reason.is_file() else "unknown"
    return reasons
