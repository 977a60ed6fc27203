"""The script that Streamlit runs: configuration and environment -> the app's settings -> the page."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from vllm_slo.analytics.health import ReceiverState
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.query import Reader
from vllm_slo.config import Config, find
from vllm_slo.dashboards.app import AppSettings, run
from vllm_slo.exporters.receiver import tally
from vllm_slo.exporters.receiver.state import look

LAKE_VARIABLE = "VLLM_SLO_LAKE"
SPOOL_VARIABLE = "VLLM_SLO_SPOOL"


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
    found = look(spool)
    if found.counted_time is None:
        return ReceiverState()
    refused: dict[str, int] = {}
    for label, count in found.counts.get(tally.SPANS_REFUSED, {}).items():
        reason = label.rpartition("/")[2]
        refused[reason] = refused.get(reason, 0) + count
    return ReceiverState(
        counted_at=found.counted_time,
        waiting_bytes=found.waiting_bytes,
        waiting_since=found.waiting_since,
        accepted=sum(found.counts.get(tally.SPANS_ACCEPTED, {}).values()),
        duplicates=sum(found.counts.get(tally.SPANS_DUPLICATE, {}).values()),
        refused=refused,
        quarantined_segments=sum(found.counts.get(tally.SEGMENTS_QUARANTINED, {}).values()),
    )


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
