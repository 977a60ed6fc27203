"""Which requests a question is about: a range of time and, where wanted, models, shards, buckets, and who reported."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from vllm_slo.exporters.errors import SloError

MINUTE = timedelta(minutes=1)


class SelectionError(SloError):
    """A range of time that cannot be asked for."""


@dataclass(frozen=True)
class Selection:
    """Requests that arrived in [``start``, ``end``), both on whole minutes so that rows and rollups see the same ones.

    ``models``, ``shards`` and ``buckets``: the values wanted, None among them for rows without one; None for all.
    ``sources``: whose rows (`stock`, `probe`, `client`); a client's row and a server's row of one request are two rows,
    so counting both doubles it.
    """

    start: datetime
    end: datetime
    models: tuple[str | None, ...] | None = None
    shards: tuple[str | None, ...] | None = None
    buckets: tuple[str | None, ...] | None = None
    sources: tuple[str | None, ...] | None = None

    def __post_init__(self) -> None:
        for name, moment in (("start", self.start), ("end", self.end)):
            if moment.tzinfo is None or moment.second or moment.microsecond:
                raise SelectionError(
                    f"{name} {moment.isoformat()} is not a whole minute with a time zone; use Selection.around"
                )
        if self.end <= self.start:
            raise SelectionError(
                f"the range ends at {self.end.isoformat()}, not after its start {self.start.isoformat()}"
            )

    @classmethod
    def around(
        cls,
        start: datetime,
        end: datetime,
        models: Sequence[str | None] | None = None,
        shards: Sequence[str | None] | None = None,
        buckets: Sequence[str | None] | None = None,
        sources: Sequence[str | None] | None = None,
    ) -> Selection:
        """The selection over the whole minutes that contain ``start`` to ``end``; an empty range becomes one minute."""
        first = start.astimezone(UTC).replace(second=0, microsecond=0)
        last = end.astimezone(UTC)
        if last != last.replace(second=0, microsecond=0):
            last = last.replace(second=0, microsecond=0) + MINUTE
        kept = (tuple(values) if values is not None else None for values in (models, shards, buckets, sources))
        return cls(first, max(last, first + MINUTE), *kept)

    def within(self, time_column: str) -> str:
        """SQL: the time column lies in the range."""
        return f"{time_column} >= {literal(self.start)} and {time_column} < {literal(self.end)}"

    def engines(self) -> str:
        """SQL: model and shard are among those wanted; all that an engine sample can be asked for."""
        return f"{_among('model', self.models)} and {_among('shard', self.shards)}"

    def dimensions(self) -> str:
        """SQL: model, shard, bucket and source are among those wanted."""
        return f"{self.engines()} and {_among('bucket', self.buckets)} and {_among('source', self.sources)}"

    def requests(self) -> str:
        """SQL condition over the view `requests`, rows left out by quality included."""
        return f"{self.within('start_time')} and {self.dimensions()}"


def literal(value: str | datetime) -> str:
    """A SQL literal."""
    if isinstance(value, datetime):
        return f"timestamptz '{value.astimezone(UTC):%Y-%m-%d %H:%M:%S.%f}+00'"
    return "'" + value.replace("'", "''") + "'"


def _among(column: str, values: tuple[str | None, ...] | None) -> str:
    if values is None:
        return "true"
    named = [literal(value) for value in values if value is not None]
    tests = [f"{column} in ({', '.join(named)})"] if len(named) > 1 else [f"{column} = {value}" for value in named]
    tests += [f"{column} is null"] if None in values else []
    return f"({' or '.join(tests)})" if tests else "false"
