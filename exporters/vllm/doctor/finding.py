"""A check, what it answers, and the finding that is shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from vllm_slo.exporters.vllm.doctor.subject import Subject

Severity = Literal["error", "warning", "note", "unknown", "ok"]
"""error: data will be missing or wrong. warning: part may be. note: good to know. unknown: nothing given tells."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note", "unknown", "ok")
Source = Literal["command", "environment", "metrics", "endpoint", "probe", "lake"]


@dataclass(frozen=True)
class Answer:
    """What one check found; ``cure`` is empty only when there is nothing to do."""

    severity: Severity
    found: str
    cure: str = ""


@dataclass(frozen=True)
class Check:
    """One thing that is looked at. ``sources`` names what it can be told from; any one of them is enough."""

    id: str
    looks_at: str
    why: str
    sources: tuple[Source, ...]
    examine: Callable[[Subject], tuple[Answer, ...]]


@dataclass(frozen=True)
class Finding:
    """An answer with its check: what is printed, and what ``--json`` holds."""

    id: str
    severity: Severity
    found: str
    why: str
    cure: str


def ok(found: str) -> tuple[Answer, ...]:
    """Nothing to do."""
    return (Answer("ok", found),)


def note(found: str, cure: str) -> tuple[Answer, ...]:
    """Good to know."""
    return (Answer("note", found, cure),)


def warning(found: str, cure: str) -> tuple[Answer, ...]:
    """Part of the data may be missing or wrong."""
    return (Answer("warning", found, cure),)


def error(found: str, cure: str) -> tuple[Answer, ...]:
    """Data will be missing or wrong."""
    return (Answer("error", found, cure),)


def unknown(found: str, cure: str) -> tuple[Answer, ...]:
    """The sources given cannot tell."""
    return (Answer("unknown", found, cure),)


def needs_command() -> tuple[Answer, ...]:
    """Only the command line tells."""
    return unknown("The command line was not given.", "Add --command 'vllm serve ...'.")


def needs_environment() -> tuple[Answer, ...]:
    """Only the server's environment tells."""
    return unknown(
        "The server's environment was not given.",
        "Add --env NAME=VALUE for each OTEL_* and VLLM_* variable of the server (--env none when none is set).",
    )


def needs_metrics() -> tuple[Answer, ...]:
    """Only the metrics page tells."""
    return unknown("No metrics page was read.", "Give the server's address: vllm-slo doctor http://HOST:PORT.")


def needs_probe() -> tuple[Answer, ...]:
    """Only the probe's own page, or the lake, tells."""
    return unknown(
        "Neither the probe's page nor the lake told of this server.",
        "Add --probe http://HOST:9464 (on the server's machine), or --instance NAME to look it up in the lake.",
    )
