"""Reads the rollups of a selection with as few rows as possible: whole days and hours first, minutes at the edges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, date, datetime, timedelta

import duckdb

from vllm_slo.analytics.reading import records
from vllm_slo.analytics.selection import Selection, literal

LEVELS: tuple[tuple[str, timedelta], ...] = (
    ("day", timedelta(days=1)),
    ("hour", timedelta(hours=1)),
    ("minute", timedelta(minutes=1)),
)
"""Coarsest first."""

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True)
class Stretch:
    """Rollups of one level that cover [``start``, ``end``)."""

    level: str
    start: datetime
    end: datetime


@dataclass(frozen=True)
class Kept:
    """First day of which retention has left everything: rows, minutes, hours. `date.min` where it took nothing."""

    rows: date = date.min
    minutes: date = date.min
    hours: date = date.min

    def width(self, moment: datetime) -> timedelta:
        """The length of the finest rollups at a moment."""
        day = moment.astimezone(UTC).date()
        widths = dict(LEVELS)
        return widths["minute" if day >= self.minutes else "hour" if day >= self.hours else "day"]

    def widened(self, selection: Selection) -> Selection:
        """The shortest selection around one whose ends are ends of rollups that are there."""
        start = selection.start - (selection.start - _EPOCH) % self.width(selection.start)
        end = selection.end + (_EPOCH - selection.end) % self.width(selection.end - timedelta(microseconds=1))
        return replace(selection, start=start, end=end)


def kept(connection: duckdb.DuckDBPyConnection) -> Kept:
    """What retention has left of the days that the coarsest rollups know."""
    first: dict[str, date] = dict(
        records(
            connection,
            "select level, min(day) from rollups group by level union all select 'rows', min(day) from requests",
        )
    )
    oldest = first.get("day") or date.min

    def since(what: str) -> date:
        found = first.get(what) or date.max
        return date.min if found <= oldest else found

    return Kept(since("rows"), since("minute"), since("hour"))


def cover(start: datetime, end: datetime, coarsest: timedelta = timedelta(days=1)) -> tuple[Stretch, ...]:
    """The fewest stretches, in order, that together cover a range of whole minutes; none coarser than ``coarsest``."""
    return tuple(_cover(start, end, [level for level in LEVELS if level[1] <= coarsest]))


def _cover(start: datetime, end: datetime, levels: list[tuple[str, timedelta]]) -> Iterator[Stretch]:
    if start >= end:
        return
    name, width = levels[0]
    if len(levels) == 1:
        yield Stretch(name, start, end)
        return
    first, last = start + (_EPOCH - start) % width, end - (end - _EPOCH) % width
    if first >= last:
        yield from _cover(start, end, levels[1:])
        return
    yield from _cover(start, first, levels[1:])
    yield Stretch(name, first, last)
    yield from _cover(last, end, levels[1:])


def rollups(selection: Selection, metrics: Sequence[str], columns: str, coarsest: timedelta = timedelta(days=1)) -> str:
    """SQL for ``columns`` of the rollup rows of a selection, one row a stored row.

    Each stretch is its own branch with plain comparisons, so that files and row groups outside it are skipped.
    """
    wanted = ", ".join(literal(metric) for metric in metrics)
    return " union all ".join(
        f"(select {columns} from rollups where level = '{part.level}' and {_days(part)} "
        f"and time >= {literal(part.start)} and time < {literal(part.end)} "
        f"and metric in ({wanted}) and {selection.dimensions()})"
        for part in cover(selection.start, selection.end, coarsest)
    )


def _days(part: Stretch) -> str:
    last = part.end - timedelta(microseconds=1)
    return f"day between date '{part.start.astimezone(UTC):%Y-%m-%d}' and date '{last.astimezone(UTC):%Y-%m-%d}'"
