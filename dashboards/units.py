"""Figures as people read them: milliseconds, seconds, percent, thousands. Only pictures use these units."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

MINUS = "−"


def seconds_text(seconds: float) -> str:
    """A duration with three significant digits in ms or s.

    >>> [seconds_text(x) for x in (0, 0.0000412, 0.0421, 0.999, 0.9999, 14.62, 131.4, -0.0011)]
    ['0 ms', '0.041 ms', '42.1 ms', '999 ms', '1.00 s', '14.6 s', '131 s', '−1.10 ms']
    """
    if seconds < 0:
        return MINUS + seconds_text(-seconds)
    if seconds == 0:
        return "0 ms"
    if seconds < 0.9995:
        milliseconds = seconds * 1000
        return f"{milliseconds:.3f} ms" if milliseconds < 0.9995 else f"{_three_digits(milliseconds)} ms"
    return f"{_three_digits(seconds)} s"


def _three_digits(value: float) -> str:
    for digits, limit in ((2, 9.995), (1, 99.95)):
        if value < limit:
            return f"{value:.{digits}f}"
    return f"{value:,.0f}"


def count_text(count: int) -> str:
    """A whole number with thousands separated."""
    return f"{count:,}"


def percent_text(ratio: float) -> str:
    """A ratio as percent, never rounded to 0 % or 100 % unless it is.

    >>> [percent_text(x) for x in (0, 0.00001, 0.0123, 0.5, 0.99999, 1, -0.002)]
    ['0 %', '<0.1 %', '1.2 %', '50.0 %', '>99.9 %', '100 %', '−0.2 %']
    """
    if ratio < 0:
        return f">{MINUS}0.1 %" if ratio > -0.0005 else MINUS + percent_text(-ratio)
    if ratio in (0, 1):
        return f"{ratio:.0f} ".replace("1 ", "100 ") + "%"
    if 0 < ratio < 0.0005:
        return "<0.1 %"
    if 0.9995 < ratio < 1:
        return ">99.9 %"
    return f"{ratio * 100:.1f} %"


def bytes_text(size: int) -> str:
    """A size in binary units.

    >>> [bytes_text(x) for x in (0, 900, 1536, 5 * 1024**3)]
    ['0 B', '900 B', '1.5 KiB', '5.0 GiB']
    """
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"


def age_text(age: timedelta) -> str:
    """How long ago, in the largest unit that gives at least two of it.

    >>> [age_text(timedelta(seconds=s)) for s in (3, 150, 7300, 200000)]
    ['3 s', '2 min', '2 h', '2 d']
    """
    seconds = max(age.total_seconds(), 0)
    for unit, width in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * width:
            return f"{seconds // width:.0f} {unit}"
    return f"{seconds:.0f} s"


def step_text(step: timedelta) -> str:
    """The width of a step.

    >>> [step_text(timedelta(seconds=s)) for s in (10, 60, 1800, 7200, 86400)]
    ['10 s', '1 min', '30 min', '2 h', '1 d']
    """
    seconds = step.total_seconds()
    for unit, width in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= width and seconds % width == 0:
            return f"{seconds / width:.0f} {unit}"
    return f"{seconds:g} s"


def range_text(start: datetime, end: datetime) -> str:
    """A range of time in UTC, the date once where it is the same."""
    first, last = start.astimezone(UTC), end.astimezone(UTC)
    until = f"{last:%H:%M}" if first.date() == last.date() else f"{last:%-d %b %Y %H:%M}"
    return f"{first:%-d %b %Y %H:%M} – {until} UTC"


def quantile_text(quantile: float) -> str:
    """P50, P99, P99.9."""
    return f"P{quantile * 100:g}"
