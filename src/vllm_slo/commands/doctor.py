"""`vllm-slo doctor`: what will be missing or wrong in a server's telemetry, and the cure."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from vllm_slo.commands.invocation import Invocation
from vllm_slo.exporters.errors import SloError

if TYPE_CHECKING:
    from vllm_slo.exporters.vllm.doctor.finding import Finding
    from vllm_slo.exporters.vllm.doctor.subject import Recorded

_COLOURS = {"error": "red", "warning": "yellow", "note": "cyan", "unknown": "magenta", "ok": "green"}


@click.command("doctor")
@click.argument("source", metavar="[URL|FILE|FOLDER]", required=False)
@click.option(
    "--command",
    metavar="TEXT",
    help="The command that starts the server: 'vllm serve ...', 'docker run ... IMAGE ...'.",
)
@click.option(
    "--env",
    "variables",
    metavar="NAME=VALUE",
    multiple=True,
    help="A variable of the server's environment; repeat. Those not given count as not set; `none`: none is set.",
)
@click.option("--otlp-endpoint", metavar="URL", help="Try the OTLP receiver there: gRPC, or HTTP on port 4318.")
@click.option(
    "--probe",
    "probe_address",
    metavar="URL",
    help="The page of the probe's series, http://HOST:9464. [default: that port of a running server's machine]",
)
@click.option(
    "--instance",
    metavar="NAME",
    help="Look this server up in the lake. [default: service.instance.id of the environment given]",
)
@click.option(
    "--objective",
    "objectives",
    metavar="NAME=SECONDS",
    multiple=True,
    help="A threshold that histogram bounds must hit; repeat. ttft, itl, tpot, duration, queue, prefill or decode.",
)
@click.option("--all", "everything", is_flag=True, help="Show what is in order, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_obj
def doctor(
    invocation: Invocation,
    source: str | None,
    command: str | None,
    variables: tuple[str, ...],
    otlp_endpoint: str | None,
    probe_address: str | None,
    instance: str | None,
    objectives: tuple[str, ...],
    everything: bool,
    as_json: bool,
) -> int:
    """Say what will be missing or wrong in the telemetry of one vLLM server, each with the cure.

    Give the address of a running server, a saved metrics page, the command that starts the server, or both: what the
    sources given cannot tell is `unknown`. The probe is looked for at its own port and in the lake. Exit code 1 when
    there is an error.

    \b
    vllm-slo doctor http://localhost:8000
    vllm-slo doctor --command "OTEL_SERVICE_NAME=vllm vllm serve MODEL --otlp-traces-endpoint http://localhost:4317"
    """
    if source is None and command is None and instance is None and probe_address is None:
        raise click.UsageError(
            "Give a server's address, a saved metrics page, --command 'vllm serve ...', --probe URL or --instance NAME."
        )
    import httpx

    from vllm_slo.exporters.vllm.doctor.checks import examine
    from vllm_slo.exporters.vllm.doctor.command_line import parse_command
    from vllm_slo.exporters.vllm.doctor.look import TIMEOUT_SECONDS, Looked, look, look_at_probe, try_receiver
    from vllm_slo.exporters.vllm.doctor.probe import INFO
    from vllm_slo.exporters.vllm.doctor.subject import DEFAULT_OBJECTIVES, Subject, parse_objective
    from vllm_slo.exporters.vllm.scrape import utc_now

    try:
        line = parse_command(command) if command is not None else None
        wanted = tuple(map(parse_objective, objectives))
    except SloError as error:
        raise click.UsageError(str(error)) from error
    with httpx.Client(timeout=TIMEOUT_SECONDS) as client:
        looked = look(source, client, utc_now) if source is not None else Looked(())
        receiver = try_receiver(otlp_endpoint, client) if otlp_endpoint is not None else None
        given = _environment(variables)
        if line is not None and (line.env or line.container):
            given = {**line.env, **(given or {})}
        named = instance or _instance(given)
        probe_page = look_at_probe(probe_address, client) if probe_address is not None else None
        if probe_page is None and source is not None and "://" in source:
            usual = look_at_probe(_usual_probe(source, given), client)
            own = usual.value(INFO) is not None and (not named or usual.instance in (None, named))
            probe_page = usual if own else None
    subject = Subject(
        command=line,
        env=given,
        pages=looked.pages,
        version=looked.version,
        healthy=looked.healthy,
        clock_offset_seconds=looked.clock_offset_seconds,
        receiver=receiver,
        probe_page=probe_page,
        recorded=_recorded(invocation, named, required=instance is not None) if named else None,
        own_version=_own_version(),
        objectives=wanted or DEFAULT_OBJECTIVES,
        objectives_given=bool(wanted),
        context_buckets=invocation.config.bucket_settings().bounds,
    )
    findings = examine(subject)
    if as_json:
        click.echo(json.dumps({"source": source, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        _show(findings, everything)
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def _environment(variables: tuple[str, ...]) -> dict[str, str] | None:
    """The variables given, None when none was."""
    if not variables:
        return None
    if bad := [text for text in variables if "=" not in text and text != "none"]:
        raise click.UsageError(f"--env {bad[0]}: write NAME=VALUE, or none.")
    return dict(text.split("=", 1) for text in variables if text != "none")


def _usual_probe(source: str, env: dict[str, str] | None) -> str:
    """Where the probe of the first engine of a server listens, unless its environment says another port."""
    from urllib.parse import urlsplit

    host = urlsplit(source).hostname or "127.0.0.1"
    port = (env or {}).get("VLLM_SLO_METRICS_PORT", "9464")
    return f"http://{f'[{host}]' if ':' in host else host}:{port if port.isdigit() and port != '0' else 9464}"


def _instance(env: dict[str, str] | None) -> str | None:
    """The name of the server's resource, where its environment gives one."""
    for pair in (env or {}).get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        name, _, value = pair.partition("=")
        if name.strip() == "service.instance.id" and value.strip():
            return value.strip()
    return None


def _recorded(invocation: Invocation, instance: str, *, required: bool) -> Recorded | None:
    """What the lake has of a server; None where there is no lake, which is an error only when it was asked for."""
    from vllm_slo.analytics.instances import newest_day
    from vllm_slo.exporters.vllm.doctor.subject import Recorded

    try:
        connection = invocation.reader().cursor()
    except SloError:
        if required:
            raise
        return None
    found = next((each for each in newest_day(connection) if each.name == instance), None)
    if found is None:
        return Recorded(instance) if required else None
    return Recorded(
        instance,
        found.rows,
        found.running,
        found.version,
        found.probe_sampled,
        found.dropped,
        found.errors,
        found.gpu,
        found.silent_since,
    )


def _own_version() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vllm-slo")
    except PackageNotFoundError:
        return None


def _show(findings: list[Finding], everything: bool) -> None:
    """Print each finding; those that only lack the same source are one."""
    lacking: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        if finding.severity == "unknown":
            lacking.setdefault((finding.found, finding.cure), []).append(finding.id)
        elif finding.severity != "ok" or everything:
            _print(finding.severity, finding.id, finding.found, finding.why if finding.cure else "", finding.cure)
    for (found, cure), ids in lacking.items():
        _print("unknown", ", ".join(ids), found, "", cure)
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in _COLOURS}
    click.echo(", ".join(f"{count} {severity}" for severity, count in counts.items() if count))


def _print(severity: str, title: str, found: str, why: str, cure: str) -> None:
    click.echo(click.style(severity.ljust(8), fg=_COLOURS[severity], bold=True) + title)
    click.echo(f"        {found}")
    if why:
        click.echo(f"        why   {why}")
    if cure:
        click.echo(f"        cure  {cure}")
