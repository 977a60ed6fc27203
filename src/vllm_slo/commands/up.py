"""`vllm-slo up`: receive spans, keep them in the lake, show the pages."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from vllm_slo.commands.invocation import SPOOL_VARIABLE

if TYPE_CHECKING:
    from vllm_slo.commands.invocation import Invocation
    from vllm_slo.exporters.receiver.settings import ReceiverSettings
    from vllm_slo.exporters.vllm.metrics import Target
    from vllm_slo.serving.process import Addresses, ScrapeSettings, ServeSettings

TOKEN_VARIABLE = "VLLM_SLO_TOKEN"
MIB = 1024 * 1024


class Options(TypedDict):
    """The options of the command line as click hands them over."""

    grpc: str | None
    http: str | None
    scrape: tuple[str, ...]
    no_app: bool
    app_port: int | None
    token_file: Path | None
    tls_cert: Path | None
    tls_key: Path | None
    insecure: bool
    spool: str | None
    free_space_mib: int


@click.command("up")
@click.option(
    "--grpc", metavar="HOST:PORT", help="Address for OTLP/gRPC; port 0 takes a free one. [default: 127.0.0.1:4317]"
)
@click.option(
    "--http", metavar="HOST:PORT", help="Address for OTLP/HTTP, /healthz, /metrics. [default: 127.0.0.1:4318]"
)
@click.option(
    "--scrape",
    metavar="URL[=INSTANCE[@SHARD]]",
    multiple=True,
    help="A vLLM server whose /metrics is read too; repeat for more. INSTANCE is its service.instance.id.",
)
@click.option("--no-app", is_flag=True, help="Receive only; serve no pages.")
@click.option(
    "--app-port", type=click.IntRange(0, 65535), help="Port of the pages; 0 takes a free one. [default: 8501]"
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help=f"File with the bearer token that senders must show; or put the token into {TOKEN_VARIABLE}.",
)
@click.option(
    "--tls-cert", type=click.Path(dir_okay=False, path_type=Path), help="Certificate chain, PEM; with --tls-key."
)
@click.option("--tls-key", type=click.Path(dir_okay=False, path_type=Path), help="Private key, PEM; with --tls-cert.")
@click.option("--insecure", is_flag=True, help="Listen beyond this machine without a token.")
@click.option("--spool", metavar="FOLDER", help="Local folder where spans wait for the lake. [default: LAKE/spool]")
@click.option(
    "--free-space-mib",
    type=click.IntRange(min=0),
    default=256,
    show_default=True,
    help="Push senders back while the spool's disk has less free than this.",
)
@click.pass_obj
def up(invocation: Invocation, /, **options: Unpack[Options]) -> None:
    """Receive OTLP spans, commit them to the lake, read vLLM's metrics, and serve the pages, until stopped.

    Spans are acknowledged once they are on disk. Stop with Ctrl-C or SIGTERM; kill -9 loses no acknowledged span.
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Read when gRPC is loaded. Its own lines about a port that it is refused and about the fork that starts the pages
    # look like faults; what matters is in our messages.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from vllm_slo.serving.process import serve

    settings = _settings(invocation, options)
    serve(settings, lambda addresses: _say(settings, addresses))


def _settings(invocation: Invocation, options: Options) -> ServeSettings:
    from vllm_slo.analytics.maintenance import MaintenanceSettings
    from vllm_slo.exporters.receiver.settings import Limits, ReceiverError, ReceiverSettings, Tls, read_token, token_of
    from vllm_slo.serving.app import AppSettings, installed
    from vllm_slo.serving.process import ServeSettings, default_spool

    config = invocation.config
    certificate, key = options["tls_cert"], options["tls_key"]
    if (certificate is None) != (key is None):
        raise ReceiverError("--tls-cert and --tls-key belong together; give both or none")
    tls = None
    if certificate is not None and key is not None:
        tls = Tls(certificate, key)
    elif config.receiver.tls is not None:
        tls = Tls(Path(config.receiver.tls.certificate), Path(config.receiver.tls.key))
    token_file = options["token_file"] or config.receiver.token_file
    given = os.environ.get(TOKEN_VARIABLE)
    token = read_token(Path(token_file)) if token_file else token_of(given, TOKEN_VARIABLE) if given else None
    lake = invocation.lake_location
    spool = default_spool(lake, options["spool"])
    app = None
    if not options["no_app"] and installed():
        port = config.app.port if options["app_port"] is None else options["app_port"]
        environment = {**invocation.export_environment(), SPOOL_VARIABLE: str(spool)}
        app = AppSettings(config.app.host, port, environment)
    return ServeSettings(
        lake=lake,
        spool=spool,
        receiver=ReceiverSettings(
            grpc=options["grpc"] or config.receiver.grpc,
            http=options["http"] or config.receiver.http,
            token=token,
            tls=tls,
            insecure=options["insecure"],
            limits=Limits(
                body_bytes=config.receiver.max_body_bytes,
                spool_bytes=config.receiver.spool_limit_bytes,
                free_bytes=options["free_space_mib"] * MIB,
            ),
        ),
        decode=config.decode_settings(),
        buckets=config.bucket_settings(),
        maintenance=MaintenanceSettings(config.retention_settings()),
        scrape=_scrape(invocation, options["scrape"]),
        app=app,
    )


def _scrape(invocation: Invocation, named: tuple[str, ...]) -> tuple[ScrapeSettings, ...]:
    """Targets of the command line and of the configuration, by interval."""
    from vllm_slo.serving.process import ScrapeSettings

    configured = invocation.config.scrape
    if not named and not configured:
        return ()
    from vllm_slo.exporters.vllm.scrape import INTERVAL_SECONDS, parse_target

    groups: dict[float, list[Target]] = {}
    for text in named:
        groups.setdefault(INTERVAL_SECONDS, []).append(parse_target(text))
    for target in configured:
        name = f"={target.instance or ''}" + (f"@{target.shard}" if target.shard else "")
        groups.setdefault(target.interval_seconds, []).append(parse_target(target.url + name))
    return tuple(ScrapeSettings(tuple(targets), seconds) for seconds, targets in groups.items())


def _say(settings: ServeSettings, addresses: Addresses) -> None:
    receiver = settings.receiver
    scheme = "https" if receiver.tls else "http"
    lines = [f"lake       {settings.lake}"]
    if receiver.grpc:
        host = receiver.grpc.rpartition(":")[0]
        lines.append(f"OTLP/gRPC  {host}:{addresses.grpc_port}")
    if receiver.http:
        host = receiver.http.rpartition(":")[0]
        lines.append(f"OTLP/HTTP  {scheme}://{host}:{addresses.http_port}/v1/traces   (/healthz, /metrics)")
    for group in settings.scrape:
        for scraped in group.targets:
            shard = f", shard {scraped.shard}" if scraped.shard else ""
            lines.append(f"scraping   {scraped.url} as {scraped.instance}{shard}")
    if settings.app and addresses.app_port:
        lines.append(f"pages      http://{settings.app.host}:{addresses.app_port}")
    click.echo("\n".join([*lines, *_exposed(settings), *_flag(receiver, addresses)]))


def _flag(receiver: ReceiverSettings, addresses: Addresses) -> list[str]:
    """What vLLM must be started with. Its gRPC exporter cannot speak TLS (0.32), so TLS means HTTP."""
    variables = "OTEL_EXPORTER_OTLP_HEADERS='authorization=Bearer%20TOKEN' " if receiver.token else ""
    if receiver.grpc and not receiver.tls:
        target = f"grpc://{receiver.grpc.rpartition(':')[0]}:{addresses.grpc_port}"
    elif receiver.http:
        scheme = "https" if receiver.tls else "http"
        target = f"{scheme}://{receiver.http.rpartition(':')[0]}:{addresses.http_port}/v1/traces"
        variables += "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL=http/protobuf "
    else:
        return []
    before = f"{variables}... " if variables else ""
    return [f"start vLLM with  {before}--otlp-traces-endpoint {target}"]


def _exposed(settings: ServeSettings) -> list[str]:
    """What others on the network could read; an address that only this machine reaches exposes nothing."""
    from vllm_slo.exporters.receiver.settings import is_loopback

    receiver, notes = settings.receiver, []
    hosts = [address.rpartition(":")[0].strip("[]") for address in (receiver.grpc, receiver.http) if address]
    if receiver.token and not receiver.tls and not all(map(is_loopback, hosts)):
        notes.append("warning    the token travels unencrypted; give --tls-cert and --tls-key")
    if settings.app and not is_loopback(settings.app.host):
        notes.append("warning    the pages ask for no password; put a proxy that does before them")
    return notes
