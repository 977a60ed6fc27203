"""Moments as people write them on a command line."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

import click

_AGO = re.compile(r"(?P<count>\d+(?:\.\d+)?)(?P<unit>[smhdw])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}


def moment(text: str, now: datetime) -> datetime:
    """The UTC moment: `now`, an age such as `90s`, `15m`, `6h`, `7d`, `2w`, or ISO 8601 (UTC unless it has an offset).

    Raises ValueError with what is allowed.
    """
    if text == "now":
        return now
    if age := _AGO.fullmatch(text):
        return now - timedelta(seconds=float(age["count"]) * _UNITS[age["unit"]])
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"'{text}' is no moment; write an age such as 15m, 6h or 7d, or a time such as 2026-11-30T12:00:00Z"
        ) from None
    return (found if found.tzinfo else found.replace(tzinfo=UTC)).astimezone(UTC)


class Moment(click.ParamType[datetime]):
    """A click option type that reads a ``moment``."""

    name = "moment"

    def convert(self, value: str | datetime, param: click.Parameter | None, ctx: click.Context | None) -> datetime:
        if isinstance(value, datetime):
            return value
        try:
            return moment(value, datetime.now(UTC))
        except ValueError as error:
            self.fail(str(error), param, ctx)
        except OverflowError:
            self.fail(f"'{value}' is out of range; write a time after the year 1", param, ctx)
