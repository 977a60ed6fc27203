"""`vllm-slo` itself: the global options and the commands. Importing it loads no heavy library."""

from __future__ import annotations

import click

from vllm_slo import __version__
from vllm_slo.commands.demo import demo
from vllm_slo.commands.doctor import doctor
from vllm_slo.commands.event import event
from vllm_slo.commands.export import export
from vllm_slo.commands.gpu_exporter import gpu_exporter
from vllm_slo.commands.import_ import import_
from vllm_slo.commands.invocation import CONFIG_VARIABLE, LAKE_VARIABLE, PROGRAM, Invocation
from vllm_slo.commands.query import query
from vllm_slo.commands.status import status
from vllm_slo.commands.up import up

COMMANDS: tuple[click.Command, ...] = (up, demo, import_, query, export, event, status, doctor, gpu_exporter)


class _InOrder(click.Group):
    """Lists the commands as they are in ``COMMANDS``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    PROGRAM,
    cls=_InOrder,
    commands={str(command.name): command for command in COMMANDS},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit codes: 0 done, 1 a fault that the message names, 2 wrong usage, 130 interrupted. "
    "VLLM_SLO_DEBUG=1 shows the traceback of an internal error.",
)
@click.option(
    "--lake",
    metavar="PATH_OR_URL",
    envvar=LAKE_VARIABLE,
    show_envvar=True,
    help="Where the lake is. Else `lake` of the configuration, else ./lake.",
)
@click.option(
    "--config",
    metavar="FILE",
    envvar=CONFIG_VARIABLE,
    show_envvar=True,
    help="Configuration in YAML. Else ./vllm-slo.yaml, else the defaults.",
)
@click.version_option(__version__, prog_name=PROGRAM)
@click.pass_context
def group(context: click.Context, lake: str | None, config: str | None) -> None:
    """Why is the tail slow, who pays for it, what to change, and did it work: observability and SLOs for vLLM."""
    context.obj = Invocation(lake_option=lake, config_option=config)
