"""Checks of the command line's options and of what it hides."""

from __future__ import annotations

from vllm_slo.exporters.vllm.doctor.finding import (
    Answer,
    Severity,
    needs_command,
    needs_environment,
    note,
    ok,
    warning,
)
from vllm_slo.exporters.vllm.doctor.flags import FLAGS_VERSION, RETIRED, known
from vllm_slo.exporters.vllm.doctor.subject import Subject


def retired(subject: Subject) -> tuple[Answer, ...]:
    """Options that vLLM never had, or has no more."""
    if subject.command is None:
        return needs_command()
    said = {"never": "never existed in vLLM", "removed": f"was removed: vLLM {FLAGS_VERSION} does not start with it"}
    answers = [
        Answer(_severity(subject), f"--{name} {said[RETIRED[name].history]}.", RETIRED[name].instead)
        for name in subject.command.strangers
        if name in RETIRED
    ]
    return tuple(answers) or ok("None of them.")


def strangers(subject: Subject) -> tuple[Answer, ...]:
    """Options that no list has."""
    if subject.command is None:
        return needs_command()
    answers: list[Answer] = []
    for name in subject.command.strangers:
        if name in RETIRED:
            continue
        near = known().nearest(name)
        cure = f"Nearest: {', '.join(f'--{flag}' for flag in near)}." if near else "Remove it, or check its spelling."
        answers.append(Answer(_severity(subject), f"--{name} is no option of vLLM {FLAGS_VERSION}.", cure))
    return tuple(answers) or ok(f"Every option exists in {FLAGS_VERSION}.")


def config_file(subject: Subject) -> tuple[Answer, ...]:
    """Options that are elsewhere."""
    if subject.command is None:
        return needs_command()
    path = subject.command.value("config")
    if path is None:
        return ok("--config is not given.")
    return warning(
        f"--config {path}: the options in that file were not read, so other findings may be wrong.",
        "Write them out in --command.",
    )


def plugins(subject: Subject) -> tuple[Answer, ...]:
    """The list of plug-ins that may load."""
    if subject.env is None:
        return needs_environment()
    if "VLLM_PLUGINS" not in subject.env:
        return ok("VLLM_PLUGINS is not set: every installed plug-in loads, endpoint plug-ins aside.")
    allowed = subject.env["VLLM_PLUGINS"] or "nothing"
    return note(
        f"VLLM_PLUGINS={allowed}: other plug-ins (stat loggers, general ones) do not load, without an error.",
        "Add the names of the plug-ins you want to VLLM_PLUGINS, or unset it.",
    )


def _severity(subject: Subject) -> Severity:
    """An error, unless the server is known to be another version, which may have the option."""
    version = subject.vllm_version
    return "error" if version is None or version.removeprefix("v").startswith(f"{FLAGS_VERSION}.") else "warning"
