"""Keeps the lake small and quick: merged files, summed rollups, retention, vacuum, log clean-up. Safe beside everybody.

Every change is one Delta transaction that names the files it replaces, so appends that happen meanwhile are untouched
and of two maintenance runs at once one fails whole and leaves its work to the next. Replaced files stay on disk for the
grace period, so a reader that holds an older list of files goes on undisturbed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta

import pyarrow as pa
from deltalake import DeltaTable

from vllm_slo.analytics import rollup
from vllm_slo.analytics.datafile import DataFile
from vllm_slo.analytics.lake import CommitConflict, Lake
from vllm_slo.analytics.parquet import SOURCES
from vllm_slo.analytics.settings import RetentionSettings

DEDUPLICATED = "requests"
"""Files of this table are left alone until the rollups of their transaction are in (see drain)."""


@dataclass(frozen=True)
class MaintenanceSettings:
    """When files are merged and how long replaced ones stay.

    A merge holds its files decoded in memory: about twelve times ``target_bytes``.
    Files are merged ``fan_in`` at a time with others of their size class (each class ``fan_in`` times as large as the
    one before), so a row is rewritten once a class: with commits of a few MB once, with tiny ones four times. The small
    files of a day that is over are merged whatever their number.
    """

    retention: RetentionSettings = field(default_factory=RetentionSettings)
    fan_in: int = 8
    smallest_class_bytes: int = 64 << 10
    target_bytes: int = 8 << 20
    grace: timedelta = timedelta(hours=1)
    tidy_interval: timedelta = timedelta(minutes=10)


@dataclass
class Report:
    """What one run did."""

    merges: int = 0
    files_merged: int = 0
    rows_merged: int = 0
    rollup_rows_summed: int = 0
    days_dropped: int = 0
    rows_dropped: int = 0
    files_vacuumed: int = 0
    tables_tidied: int = 0
    conflicts: int = 0
    bytes_over_limit: int = 0


class Maintenance:
    """Runs over the whole lake; call `run_once` every few seconds from one thread."""

    def __init__(self, lake: Lake, settings: MaintenanceSettings, now: Callable[[], datetime]) -> None:
        self._lake = lake
        self._settings = settings
        self._now = now
        self._tidied: datetime | None = None

    def run_once(self) -> Report:
        """One round: retention, merging, and now and then vacuum and log clean-up."""
        report = Report()
        now = self._now()
        self._drop_old(now.date(), report)
        self._drop_over_limit(now.date(), report)
        for table in self._lake.tables:
            self._merge(table, now.date(), report)
        if self._tidied is None or now - self._tidied >= self._settings.tidy_interval:
            for table in self._lake.tables:
                self._tidy(table, report)
            self._tidied = now
        return report

    def _drop_old(self, today: date, report: Report) -> None:
        for table in self._lake.tables:
            old: dict[tuple[tuple[str, str], ...], list[DataFile]] = {}
            for file in self._settled(table):
                limit = _days(self._settings.retention, table, file)
                if limit is not None and _day(file) < today - timedelta(days=limit):
                    old.setdefault(file.partition, []).append(file)
            for files in old.values():
                self._drop(table, files, report)

    def _drop_over_limit(self, today: date, report: Report) -> None:
        limit = self._settings.retention.total_bytes
        if limit is None:
            return
        over = sum(stats.size_bytes for stats in self._lake.table_stats().values()) - limit
        days: dict[tuple[date, str], list[DataFile]] = {}
        for table in ("requests", "spans"):
            for file in self._settled(table):
                if _day(file) < today:
                    days.setdefault((_day(file), table), []).append(file)
        for (_, table), files in sorted(days.items()):
            if over <= 0:
                return
            if self._drop(table, files, report):
                over -= sum(file.size_bytes for file in files)
        report.bytes_over_limit = max(0, over)

    def _drop(self, table: str, files: list[DataFile], report: Report) -> bool:
        try:
            self._lake.replace(table, files, None, same_rows=False)
        except CommitConflict:
            report.conflicts += 1
            return False
        report.days_dropped += 1
        report.rows_dropped += sum(file.rows for file in files)
        return True

    def _merge(self, table: str, today: date, report: Report) -> None:
        partitions: dict[tuple[tuple[str, str], ...], list[DataFile]] = {}
        for file in self._settled(table):
            partitions.setdefault(file.partition, []).append(file)
        for files in partitions.values():
            over = bool(self._lake.tables[table].partition_by) and _day(files[0]) < today
            for group in groups(files, self._settings, over=over):
                try:
                    self._merge_files(table, group, report)
                except CommitConflict:
                    report.conflicts += 1

    def _merge_files(self, table: str, files: Sequence[DataFile], report: Report) -> None:
        rows: pa.Table = self._lake.read(table, files, self._lake.filled(table, files), dictionaries=True)
        if table == "rollups":
            summed = rollup.merge(rows)
            report.rollup_rows_summed += rows.num_rows - summed.num_rows
            rows = summed
        sources = "\n".join(file.path for file in files)
        self._lake.replace(table, files, rows, metadata={SOURCES: sources}, same_rows=table != "rollups")
        del rows
        pa.default_memory_pool().release_unused()
        report.merges += 1
        report.files_merged += len(files)
        report.rows_merged += sum(file.rows for file in files)

    def _settled(self, table: str) -> list[DataFile]:
        """The live files whose transaction is complete in every table."""
        self._lake.refresh(table)
        files = self._lake.data_files(table)
        if table != DEDUPLICATED:
            return files
        applied = {app: self._lake.applied("rollups", app) for app in {f.writer[0] for f in files if f.writer}}
        return [f for f in files if f.writer is None or f.writer[1] <= _or(applied[f.writer[0]], -1)]

    def _tidy(self, table: str, report: Report) -> None:
        """Remove files that nobody may need any more and old log entries.

        Vacuum also removes files that no commit ever named (a writer died before its commit), once they are older
        than the grace period.
        """
        hours = math.ceil(self._settings.grace / timedelta(hours=1))

        def tidy(handle: DeltaTable) -> None:
            removed = handle.vacuum(hours, dry_run=True, enforce_retention_duration=False, full=True)
            if removed:
                handle.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
                handle.update_incremental()
            report.files_vacuumed += len(removed)
            handle.create_checkpoint()
            handle.cleanup_metadata()

        self._lake.with_handle(table, tidy)
        report.tables_tidied += 1


def groups(files: Iterable[DataFile], settings: MaintenanceSettings, *, over: bool) -> list[list[DataFile]]:
    """Which files of a partition to merge with each other, neighbours in time, up to the target size each.

    Those of one size class that are ``fan_in`` or more, or that fill the target.
    ``over``: the day is over, so every file below half the target is merged with its neighbours.
    """
    small = [file for file in files if file.size_bytes < settings.target_bytes // 2]
    if over:
        return [group for group in _runs(small, settings.target_bytes) if len(group) > 1]
    classes: dict[int, list[DataFile]] = {}
    for file in small:
        classes.setdefault(_size_class(file.size_bytes, settings), []).append(file)
    chosen = []
    for same in classes.values():
        runs = _runs(same, settings.target_bytes)
        chosen += [run for run in runs if len(run) >= settings.fan_in or (run is not runs[-1] and len(run) > 1)]
    return chosen


def _runs(files: Sequence[DataFile], target_bytes: int) -> list[list[DataFile]]:
    """The files in their order, cut where the sum passes the target."""
    runs: list[list[DataFile]] = [[]]
    size = 0
    for file in files:
        if size + file.size_bytes > target_bytes and runs[-1]:
            runs.append([])
            size = 0
        runs[-1].append(file)
        size += file.size_bytes
    return runs


def _size_class(size_bytes: int, settings: MaintenanceSettings) -> int:
    ratio = size_bytes / settings.smallest_class_bytes
    return max(0, math.floor(math.log(ratio, settings.fan_in)) + 1) if ratio > 0 else 0


def _day(file: DataFile) -> date:
    return date.fromisoformat(dict(file.partition)["day"])


def _days(retention: RetentionSettings, table: str, file: DataFile) -> int | None:
    if table == "rollups":
        return {
            "minute": retention.rollups_minute_days,
            "hour": retention.rollups_hour_days,
            "day": retention.rollups_day_days,
        }[dict(file.partition)["level"]]
    return {
        "requests": retention.requests_days,
        "spans": retention.spans_days,
        "engine_samples": retention.engine_samples_days,
    }.get(table)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
