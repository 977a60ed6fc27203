"""`vllm-slo import`: files into the lake."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import click

from vllm_slo.commands.invocation import Invocation
from vllm_slo.exporters.errors import SloError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from vllm_slo.commands.loading import File, Outcome

STDIN = Path("-")


class NothingImported(SloError):
    """An import of which nothing could be read."""


@click.command("import")
@click.argument("files", metavar="FILE|DIR|-...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--strict", is_flag=True, help="Exit with 1 when anything was refused.")
@click.option(
    "--timezone",
    "zone",
    metavar="NAME",
    default="UTC",
    show_default=True,
    help="Time zone of the client that wrote a `vllm bench serve` result, such as Europe/Berlin.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what became of each file as JSON.")
@click.pass_obj
def import_(invocation: Invocation, files: tuple[Path, ...], strict: bool, zone: str, as_json: bool) -> None:
    """Load telemetry that was kept in files.

    `-` reads standard input, a folder means every file below it. The form is found in the content: OTLP protobuf,
    OTLP JSON, JSON Lines or length-delimited protobuf of the OpenTelemetry Collector's file exporter, Parquet of a
    lake or of `vllm-slo export`, and results of `vllm bench serve --save-result --save-detailed`; each plain or gzip.

    An import can be repeated or interrupted at any time: what is in the lake already is not added again.
    Rows count as received at the latest end in their part of the file.
    """
    outcomes = list(_load_all(invocation, files, _zone(zone)))
    refused = sum(sum(outcome.refused.values()) for outcome in outcomes)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=2))
    else:
        _print(outcomes)
    if refused and not any(outcome.read for outcome in outcomes):
        raise NothingImported("nothing could be read; the reasons are above")
    if not outcomes:
        raise NothingImported("no file found; name a file, or a folder with files in it")
    if refused and strict:
        raise NothingImported(f"{refused} refused, and --strict allows none")


def _load_all(invocation: Invocation, files: tuple[Path, ...], zone: ZoneInfo) -> Iterator[Outcome]:
    from datetime import UTC, datetime

    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    from vllm_slo.analytics.drain import Drain
    from vllm_slo.commands.loading import Loading, together

    lake = invocation.open_lake(create=True)
    config = invocation.config
    loading = Loading(lake, Drain(lake, config.bucket_settings()), config.decode_settings(), datetime.now(UTC), zone)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with contextlib.ExitStack() as cleaning:
        found = [file for path in files for file in _expand(path, cleaning)]
        total = sum(file.path.stat().st_size for file in found)
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("importing", total=total)
            before = 0
            for group in together(found):
                progress.update(task, description=group[0].name[-40:])
                yield loading.load(group, partial(_advance, progress, task, before))
                before += sum(file.path.stat().st_size for file in group)


def _advance(progress: Progress, task: TaskID, before: int, at: int) -> None:
    progress.update(task, completed=before + at)


def _expand(file: Path, cleaning: contextlib.ExitStack) -> Iterator[File]:
    """Every file meant, in a fixed order; standard input as a temporary file."""
    from vllm_slo.commands.loading import File

    if file == STDIN:
        copy = Path(cleaning.enter_context(tempfile.TemporaryDirectory(prefix="vllm-slo-"))) / "stdin"
        with copy.open("wb") as kept:
            shutil.copyfileobj(sys.stdin.buffer, kept)
        yield File(copy, "standard input")
    elif not file.exists():
        raise SloError(f"{file}: no such file or folder; name one that is there, or - for standard input")
    elif not file.is_dir():
        yield File(file, str(file))
    elif (file / "requests" / "_delta_log").is_dir():
        from vllm_slo.analytics.lake import Lake

        other = Lake.open(file, create=False)
        for table in ("events", "engine_samples", "spans", "requests"):
            yield from (File(Path(path), path) for path in other.files(table))
    else:
        for path in sorted(file.rglob("*")):
            inside = path.relative_to(file).parts
            if path.is_file() and not any(part.startswith((".", "_")) for part in inside):
                yield File(path, str(path))


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise click.BadParameter(
            f"'{name}' is no time zone; write a name such as Europe/Berlin", param_hint="--timezone"
        ) from None


def _print(outcomes: list[Outcome]) -> None:
    from vllm_slo.commands.rendering import write_counts

    rows = []
    for o in outcomes:
        name = o.files[0] if len(o.files) == 1 else f"{o.files[0]} and {len(o.files) - 1} more"
        known = f"{o.duplicates}" + (f" and {o.resumed} parts" if o.resumed else "")
        counts = (o.requests, o.spans, o.engine_samples, o.events, known, sum(o.refused.values()))
        rows.append((name, *map(str, counts)))
    write_counts(("loaded", "requests", "spans", "samples", "events", "known", "refused"), rows, sys.stdout)
    for outcome in outcomes:
        for reason, count in outcome.refused.items():
            click.echo(f"warning: {count} refused as {reason}; first: {outcome.first[reason]}", err=True)
        for table, count in outcome.passed_over.items():
            click.echo(f"{count} rows of {table} passed over: they are made from requests", err=True)
        for pattern, count in outcome.dropped_attributes.items():
            click.echo(f"{count} attributes {pattern} dropped: they carry prompt text", err=True)
