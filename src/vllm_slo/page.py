"""The script that Streamlit runs: configuration and environment -> the app's settings -> the page."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from vllm_slo.analytics.health import ReceiverState
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.query import Reader
from vllm_slo.config import Config, find
from vllm_slo.dashboards.app import AppSettings, run
from vllm_slo.exporters.receiver import segment, tally

LAKE_VARIABLE = "VLLM_SLO_LAKE"
SPOOL_VARIABLE = "VLLM_SLO_SPOOL"
# Where `up` keeps the receiver's counts, in the spool folder. (Streamlit would show a bare string here on the page.)
COUNTERS_FILE = "counters.json"


def settings(config: Config, lake: str, spool: str | None = None) -> AppSettings:
    """What the app needs, from the configuration, the place of the lake, and the spool where it is not in the lake."""
    folder = Path(spool) if spool else None if "://" in lake else Path(lake) / "spool"
    return AppSettings(
        lake=lake,
        buckets=config.bucket_settings().names,
        open_reader=partial(_open_reader, config, lake),
        receiver=partial(receiver_state, folder) if folder else ReceiverState,
    )


def receiver_state(spool: Path) -> ReceiverState:
    """What the files of a spool folder tell; all zero where there is none."""
    try:
        counted_at = datetime.fromtimestamp((spool / COUNTERS_FILE).stat().st_mtime, UTC)
    except OSError:
        return ReceiverState()
    counts = tally.Tally.load(spool / COUNTERS_FILE).counts()
    waiting = sorted(_waiting(spool))
    refused: dict[str, int] = {}
    for label, count in counts.get(tally.SPANS_REFUSED, {}).items():
        refused[label.rpartition("/")[2]] = refused.get(label.rpartition("/")[2], 0) + count
    return ReceiverState(
        counted_at=counted_at,
        waiting_bytes=sum(size for _, size in waiting),
        waiting_since=datetime.fromtimestamp(waiting[0][0], UTC) if waiting else None,
        accepted=sum(counts.get(tally.SPANS_ACCEPTED, {}).values()),
        duplicates=sum(counts.get(tally.SPANS_DUPLICATE, {}).values()),
        refused=refused,
        quarantined_segments=sum(counts.get(tally.SEGMENTS_QUARANTINED, {}).values()),
    )


def _waiting(spool: Path) -> list[tuple[float, int]]:
    """Time of the last write and size of each segment that holds records; one that vanishes meanwhile is skipped."""
    found = []
    for file in spool.glob("*.seg"):
        try:
            status = file.stat()
        except OSError:
            continue
        if status.st_size > segment.HEADER_BYTES:
            found.append((status.st_mtime, status.st_size))
    return found


def _open_reader(config: Config, lake: str) -> Reader:
    return Reader(Lake.open(lake, create=False), config.bucket_settings(), config.query_settings())


def main() -> None:
    """Draw the page of the lake that the environment or the configuration names."""
    config = find()
    lake = os.environ.get(LAKE_VARIABLE) or config.lake
    spool = os.environ.get(SPOOL_VARIABLE)
    run(settings(config, lake if "://" in lake else str(Path(lake).absolute()), spool))


if __name__ == "__main__":
    main()
