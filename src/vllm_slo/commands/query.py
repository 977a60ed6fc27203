"""`vllm-slo query`: SQL over the lake."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from vllm_slo.commands.invocation import Invocation
from vllm_slo.exporters.errors import SloError

if TYPE_CHECKING:
    import pyarrow as pa

FORMATS = ("table", "csv", "json", "jsonl", "parquet")
TABLE_ROWS = 200
GRACE_SECONDS = 5.0
"""A query that does not heed its timeout for so long (one call of a function on a huge value) ends the process."""
BESIDE_BYTES = 1 << 30
"""Memory that the process may take beside DuckDB's limit, which some functions (`range`, `repeat`) do not heed."""


@click.command("query")
@click.argument("sql", metavar="SQL|-")
@click.option(
    "--format", "form", type=click.Choice(FORMATS), default="table", show_default=True, help="Form of the result."
)
@click.option(
    "--output", metavar="FILE", type=click.Path(dir_okay=False, path_type=Path), help="Write here, whole or not at all."
)
@click.option(
    "--timeout",
    metavar="SECONDS",
    type=click.FloatRange(min=0, min_open=True),
    help="Stop the query after this long. [default: query.timeout_seconds of the configuration]",
)
@click.option(
    "--limit",
    metavar="ROWS",
    type=click.IntRange(min=0),
    help=f"Rows at most, 0 for all. [default: {TABLE_ROWS} for tables on a terminal, else all]",
)
@click.pass_obj
def query(
    invocation: Invocation, sql: str, form: str, output: Path | None, timeout: float | None, limit: int | None
) -> None:
    """Run one SELECT over the lake; `-` reads it from standard input.

    The views are requests, spans, engine_samples, events and rollups. Any number of queries may run while the receiver
    writes. A query reads the lake and nothing else: no other file, no network.

    \b
    vllm-slo query "select shard, bucket, count(*), quantile_cont(time_to_first_token_seconds, 0.99)
                    from requests where quality is null group by all order by all"
    """
    from vllm_slo.analytics.query import stream

    if form == "parquet" and output is None and sys.stdout.isatty():
        raise click.UsageError("Parquet is not text; add --output FILE.")
    text = sys.stdin.read() if sql == "-" else sql
    reader = invocation.reader()
    most = limit or None
    if limit is None and form == "table" and output is None and sys.stdout.isatty():
        most = TABLE_ROWS
    seconds = timeout or reader.settings.timeout_seconds
    cursor = reader.cursor()
    at_most = None if most is None else most + 1
    with (
        _memory_bounded(invocation.config.query_memory_bytes() + BESIDE_BYTES),
        _ended_at_last(seconds, output),
        _interrupted_by_signals(cursor.interrupt),
        stream(cursor, text, seconds, limit=at_most) as result,
    ):
        rows, more = _write(result, form, output, most)
    if more and limit is None:
        click.echo(f"first {rows} rows; --limit 0 shows all", err=True)
    elif output is not None:
        click.echo(f"{rows} rows in {output}", err=True)


@contextmanager
def _memory_bounded(more: int) -> Iterator[None]:
    """Let the process allocate at most so many bytes more; where the system has no such limit, as many as it likes."""
    try:
        import resource

        used = int(Path("/proc/self/statm").read_text().split()[5]) * resource.getpagesize()
    except (ImportError, OSError):
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + more if before[1] == resource.RLIM_INFINITY else min(used + more, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    except MemoryError as error:
        raise SloError(
            f"the result needs more than {more / 1e9:.1f} GB of memory; ask for less, or raise query.memory_limit"
        ) from error
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


@contextmanager
def _ended_at_last(seconds: float, output: Path | None) -> Iterator[None]:
    """End the process when a query goes on long after it was told to stop."""

    def end() -> None:
        if output is not None:
            _draft_of(output).unlink(missing_ok=True)
        click.echo(
            f"vllm-slo: the query ran longer than {seconds:g} s and could not be stopped; ask for less", err=True
        )
        os._exit(1)

    timer = threading.Timer(seconds + GRACE_SECONDS, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def _interrupted_by_signals(interrupt: Callable[[], None]) -> Iterator[None]:
    """Call ``interrupt`` as soon as a signal arrives.

    Python runs signal handlers between its own instructions, so none would run before a long query has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)

    def watch() -> None:
        if ours.recv(1):
            interrupt()

    watcher = threading.Thread(target=watch, daemon=True)
    before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        theirs.close()
        watcher.join()
        ours.close()


def _write(result: pa.RecordBatchReader, form: str, output: Path | None, most: int | None) -> tuple[int, bool]:
    """(rows written, whether there were more)."""
    import pyarrow.parquet as pq

    from vllm_slo.commands.rendering import WRITERS, write_table

    seen = 0

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal seen
        for batch in result:
            kept = batch if most is None else batch.slice(0, max(most - seen, 0))
            seen += batch.num_rows
            yield kept

    if form == "parquet":
        with _binary(output) as target, pq.ParquetWriter(target, result.schema, compression="zstd") as writer:
            for batch in batches():
                writer.write_batch(batch)
    else:
        with _text(output) as out:
            if form == "table":
                terminal = output is None and sys.stdout.isatty()
                write_table(result.schema, batches(), out, _terminal_width() if terminal else None)
            else:
                WRITERS[form](result.schema, batches(), out)
    return (seen, False) if most is None else (min(seen, most), seen > most)


def _terminal_width() -> int:
    import shutil

    return shutil.get_terminal_size().columns


@contextmanager
def _text(output: Path | None) -> Iterator[TextIO]:
    if output is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    with _draft(output) as draft, draft.open("w", encoding="utf-8", newline="") as file:
        yield file


@contextmanager
def _binary(output: Path | None) -> Iterator[object]:
    if output is None:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with _draft(output) as draft, draft.open("wb") as file:
        yield file


@contextmanager
def _draft(output: Path) -> Iterator[Path]:
    """A file beside ``output`` that takes its place when the block ends well, and goes when it does not."""
    draft = _draft_of(output)
    try:
        yield draft
        os.replace(draft, output)
    except OSError as error:
        raise SloError(f"{output}: {error.strerror}; give --output a file in a folder that can be written") from error
    finally:
        draft.unlink(missing_ok=True)


def _draft_of(output: Path) -> Path:
    return output.with_name(f".{output.name}.{os.getpid()}.draft")
