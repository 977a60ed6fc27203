"""Drains a spool into a lake and dies, as by kill -9, right after a given number of commits; 0 lives to the end.

Arguments: lake, spool, commits. Prints what it committed.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.drain import Drain
from vllm_slo.analytics.lake import Lake
from vllm_slo.exporters.otlp import plain
from vllm_slo.exporters.otlp.decoded import DecodeSettings
from vllm_slo.exporters.otlp.lot import Lot, Tables
from vllm_slo.exporters.receiver.spool import Spool
from vllm_slo.exporters.receiver.tally import Tally
from vllm_slo.serving.draining import Committed, Draining


class FromDisk:
    """No rows in memory: everything is decoded from the spool."""

    settings = DecodeSettings()

    def __init__(self) -> None:
        self.sealed = threading.Event()

    def tables(self, number: int) -> Lot | None:
        return None


def main() -> None:
    """Drain until the spool is empty or the last commit was made."""
    place, folder, commits = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    lake = Lake.open(place)
    append = lake.append
    made = 0

    def dying(table: str, *arguments: Any, **options: Any) -> bool:
        nonlocal made
        done = append(table, *arguments, **options)
        made += 1
        print(table, flush=True)
        if made == commits:
            os._exit(9)
        return done

    lake.append = dying  # type: ignore[method-assign]
    spool = Spool.open(folder)
    drain = Drain(lake, Buckets())

    def commit(writer: str, number: int, tables: Tables) -> Committed:
        applied = drain.apply(writer, number, tables)
        return Committed(applied.duplicates, applied.replayed)

    draining = Draining(
        spool,
        FromDisk(),
        plain.decode,
        commit,
        Tally(),
        folder / "counters.json",
    )
    draining.start()
    while spool.sealed():
        time.sleep(0.01)
    draining.stop(5)
    spool.close()


if __name__ == "__main__":
    main()
