"""`vllm-slo status`: how lake and receiver are, whether anything runs or not."""

from __future__ import annotations

import dataclasses
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vllm_slo.commands.invocation import Invocation

if TYPE_CHECKING:
    from vllm_slo.analytics.coverage import Coverage
    from vllm_slo.analytics.instances import Instance
    from vllm_slo.analytics.query import Reader
    from vllm_slo.analytics.silence import Silence

_QUALITY_SQL = """
select coalesce(quality, 'counts') as reason, count(*)::bigint as all_time,
       (count(*) filter (where start_time >= $1))::bigint as last_day
from requests group by quality order by (quality is null) desc, 2 desc, 1
"""
_LAST_SQL = "select max(end_time) from requests where quality is null"
_COVERED = timedelta(days=1)


@click.command("status")
@click.option(
    "--spool", metavar="FOLDER", type=click.Path(path_type=Path), help="The receiver's spool. [default: LAKE/spool]"
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object.")
@click.pass_obj
def status(invocation: Invocation, spool: Path | None, as_json: bool) -> None:
    """Show how lake and receiver are: tables, quality, servers, coverage, spool.

    Also what was refused and what is in quarantine. Reads without locking anything: it works beside a running receiver
    and without one.
    """
    report = _report(invocation, spool, datetime.now(UTC))
    if as_json:
        click.echo(json.dumps(report, indent=2, default=_plain))
    else:
        _print(report)


def _report(invocation: Invocation, spool: Path | None, now: datetime) -> dict[str, Any]:
    from vllm_slo.analytics.instances import PARTS
    from vllm_slo.exporters.receiver.state import look
    from vllm_slo.exporters.schema import SCHEMA_VERSION

    reader = invocation.reader()
    lake = reader.lake
    folder = spool or (Path(lake.path) / "spool" if lake.is_local else None)
    ((last,),) = _rows(reader, _LAST_SQL)
    servers, covered, silent = _newest_day(reader)
    return {
        "lake": lake.path,
        "schema_version": SCHEMA_VERSION,
        "time": now,
        "tables": {name: dataclasses.asdict(stats) for name, stats in lake.table_stats().items()},
        "last_request_end": last,
        "quality": [
            {"reason": reason, "all_time": total, "last_day": day}
            for reason, total, day in _rows(reader, _QUALITY_SQL, [now - timedelta(days=1)])
        ],
        "servers": [
            dataclasses.asdict(each)
            | {"level": each.level, "running": each.running, "parts": dict(zip(PARTS, each.parts, strict=True))}
            for each in servers
        ],
        "coverage": [dataclasses.asdict(each) | {"covered": each.covered} for each in covered],
        "missing_since": [dataclasses.asdict(each) for each in silent],
        "spool": dataclasses.asdict(look(folder)) if folder else None,
    }


def _newest_day(
    reader: Reader,
) -> tuple[tuple[Instance, ...], tuple[Coverage, ...], tuple[Silence, ...]]:
    """Servers and their coverage over the newest day of the data, and what vLLM alone knows of since then."""
    from vllm_slo.analytics.coverage import coverage
    from vllm_slo.analytics.extent import extent
    from vllm_slo.analytics.instances import newest_day
    from vllm_slo.analytics.selection import Selection
    from vllm_slo.analytics.silence import silence

    connection = reader.cursor()
    known, servers = extent(connection), newest_day(connection)
    if known is None:
        return servers, (), silence(connection, None)
    day = Selection.around(max(known.start, known.end - _COVERED), known.end)
    return servers, coverage(connection, day), silence(connection, known.end)


def _rows(reader: Reader, sql: str, parameters: list[object] | None = None) -> list[tuple[Any, ...]]:
    table = reader.run(sql, parameters or [])
    return list(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _print(report: dict[str, Any]) -> None:
    from vllm_slo.commands.rendering import write_counts

    now: datetime = report["time"]
    click.echo(f"lake {report['lake']}  (schema version {report['schema_version']})")
    tables = [
        (name, f"{s['rows']:,}", f"{s['files']:,}", _size(s["size_bytes"]), _ago(s["last_commit"], now))
        for name, s in report["tables"].items()
    ]
    write_counts(("table", "rows", "files", "size", "last commit"), tables, sys.stdout)
    click.echo(f"newest request ended {_ago(report['last_request_end'], now)}\n")
    quality = [(q["reason"], f"{q['all_time']:,}", f"{q['last_day']:,}") for q in report["quality"]]
    write_counts(("requests by quality", "all", "last 24 h"), quality or [("none yet", "0", "0")], sys.stdout)
    click.echo()
    _print_servers(report["servers"], now)
    _print_coverage(report["coverage"])
    for each in report["missing_since"]:
        click.echo(
            f"spans are missing: {each['instance']} finished {each['missing']:,} requests since "
            f"{each['since']:%Y-%m-%d %H:%M:%S} UTC that are not in the lake; `vllm-slo doctor` on its address and "
            "start line finds why\n"
        )
    _print_spool(report["spool"], now)


def _print_servers(servers: list[dict[str, Any]], now: datetime) -> None:
    """What each server runs, and how the probe's records came together."""
    from vllm_slo.commands.rendering import write_counts

    if not servers:
        return
    levels = [
        (each["name"] or "(no instance)", _level(each), _ago(each["last_seen"], now), f"{each['rows']:,}")
        for each in servers
    ]
    write_counts(("server, newest day of the data", "level", "last seen", "requests"), levels, sys.stdout)
    probed = [each for each in servers if each["level"] == "probe"]
    if probed:
        columns = ("merged", "alone", "late", "superseded")
        figures = [
            (
                each["name"] or "(no instance)",
                *(f"{each[column]:,}" for column in columns),
                *("unknown" if each[column] is None else f"{each[column]:,.0f}" for column in ("dropped", "errors")),
            )
            for each in probed
        ]
        head = ("probe records of", *columns, "dropped by the probe", "errors in it")
        write_counts(head, figures, sys.stdout)
    click.echo()


def _level(server: dict[str, Any]) -> str:
    """`stock`, or the probe's version and the parts that were seen, `-edge` for one that was not, and its silence."""
    if server["level"] == "stock":
        return "stock"
    parts = " ".join(part if part in server["running"] else f"-{part}" for part in server["parts"])
    silent = f"; silent since {server['silent_since']:%H:%M:%S} UTC" if server["silent_since"] else ""
    return f"probe {server['version'] or '(version unknown)'}: {parts}{silent}"


def _print_coverage(coverage: list[dict[str, Any]]) -> None:
    """Requests of the lake against vLLM's own counters, and those that the probe alone saw."""
    from vllm_slo.commands.rendering import write_counts

    if not coverage:
        return
    covered = [
        (
            each["instance"],
            f"{each['received']:,}",
            "unknown" if each["covered"] is None else f"{each['finished']:,}",
            ", ".join(f"{count:,} {reason}" for reason, count in each["uncounted"].items()) or "none seen",
        )
        for each in coverage
    ]
    head = ("instance, newest day of the data", "spans received", "finished in vLLM", "ended uncounted by vLLM")
    write_counts(head, covered, sys.stdout)
    for each in coverage:
        if each["reason"] is not None:
            click.echo(f"{each['instance']} is unknown: {each['reason']}")
    click.echo()


def _print_scraping(scraping: dict[str, Any] | None, now: datetime) -> None:
    from vllm_slo.commands.rendering import write_counts

    if scraping is None:
        return
    rows = [
        (each["instance"], f"{each['successes']:,}", f"{each['failures']:,}", _ago(_moment(each["last_success"]), now))
        for each in scraping["targets"]
    ]
    write_counts(("scraped instance", "pages read", "failed", "last read"), rows, sys.stdout)
    for each in scraping["targets"]:
        if each["failing"]:
            click.echo(f"{each['url']} cannot be read: {each['last_error']}")
        elif each["warning"]:
            click.echo(f"{each['url']}: {each['warning']}")
    if scraping["store_error"]:
        click.echo(f"engine samples cannot be stored and wait in memory: {scraping['store_error']}")
    if scraping["rows_dropped"]:
        click.echo(f"{scraping['rows_dropped']:,} engine samples were given up because the lake took none for too long")
    click.echo()


def _print_spool(spool: dict[str, Any] | None, now: datetime) -> None:
    from vllm_slo.commands.rendering import write_counts

    if spool is None:
        click.echo("spool: not in a lake at a URL; name it with --spool")
        return
    owner = f"receiver runs (process {spool['owner']})" if spool["owner"] else "no receiver runs"
    waiting = f"{spool['waiting_segments']} segments, {_size(spool['waiting_bytes'])} wait"
    since = f", the oldest written {_ago(spool['waiting_since'], now)}" if spool["waiting_since"] else ""
    _print_scraping(spool["scraping"], now)
    click.echo(f"spool {spool['folder']}: {owner}; {waiting}{since}")
    counts = [
        (f"{name.replace('_', ' ')} {label}".strip(), f"{count:,}")
        for name, labels in spool["counts"].items()
        for label, count in labels.items()
    ]
    if counts:
        write_counts((f"counted until {_ago(spool['counted_time'], now)}", "since the first start"), counts, sys.stdout)
    for segment, reason in spool["quarantined"].items():
        click.echo(f"quarantined {segment}: {reason}")


def _size(count: int) -> str:
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def _ago(moment: datetime | None, now: datetime) -> str:
    if moment is None:
        return "never"
    seconds = (now - moment).total_seconds()
    for unit, width in (("s", 60.0), ("min", 60.0), ("h", 48.0)):
        if seconds < width:
            return f"{max(seconds, 0):.0f} {unit} ago"
        seconds /= 60 if unit != "h" else 24
    return f"{seconds:.0f} days ago ({moment:%Y-%m-%d %H:%M} UTC)"


def _moment(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _plain(value: object) -> object:
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)
