"""`vllm-slo event`: what explains a change, by hand or from continuous integration."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path

import click

from vllm_slo.commands.invocation import Invocation
from vllm_slo.commands.moments import Moment

_LIST_SQL = """
select event_id, time, end_time, kind, title, shard, service_instance_id, model, source, detail
from events where time >= $1 order by time, event_id
"""


KINDS = ("configuration", "restart", "deploy", "alert", "exclusion", "note", "checklist")
"""``schema.EVENT_KINDS``, written again because the schema loads Arrow, which help has no use for."""


class Kind(click.Choice[str]):
    """A kind of event."""

    def __init__(self) -> None:
        super().__init__(KINDS)

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return "KIND"


@click.group("event")
def event() -> None:
    """Add and list events: deploys, exclusions, notes."""


@event.command("add")
@click.option(
    "--kind",
    type=Kind(),
    required=True,
    help=f"One of {', '.join(KINDS)}. An exclusion takes its time out of SLOs.",
)
@click.option("--title", required=True, help="One line for people.")
@click.option(
    "--at",
    "time",
    type=Moment(),
    default="now",
    show_default=True,
    help="When it happened or began: ISO 8601, or an age such as 15m.",
)
@click.option("--until", "end_time", type=Moment(), help="When it ended, for what takes time.")
@click.option("--shard", help="Shard concerned; all without it.")
@click.option("--instance", help="Service instance concerned; all without it.")
@click.option("--model", help="Model concerned; all without it.")
@click.option("--detail", metavar="JSON", help="More, as a JSON object.")
@click.option(
    "--id",
    "event_id",
    metavar="TEXT",
    help="Id of the event, such as that of the CI run. [default: made of everything but the detail]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the event as JSON.")
@click.pass_obj
def add(
    invocation: Invocation,
    kind: str,
    title: str,
    time: datetime,
    end_time: datetime | None,
    shard: str | None,
    instance: str | None,
    model: str | None,
    detail: str | None,
    event_id: str | None,
    as_json: bool,
) -> None:
    """Add one event. The same id is added once: give --id or --at where a call may be repeated.

    \b
    vllm-slo event add --kind deploy --title "max-num-seqs 64" --shard long --id "$CI_PIPELINE_ID"
    """
    from vllm_slo.analytics import events

    row = events.row(
        kind,
        title,
        time,
        end_time=end_time,
        detail=_object(detail),
        instance=instance,
        shard=shard,
        model=model,
        event_id=event_id,
    )
    new = "://" not in invocation.lake_location and not Path(invocation.lake_location).exists()
    added = events.add(invocation.open_lake(create=True), events.table([row]))
    if new:
        click.echo(f"new lake {invocation.lake_location}; --lake or VLLM_SLO_LAKE names another", err=True)
    if as_json:
        click.echo(json.dumps({**row, "added": bool(added)}, default=_iso))
    else:
        click.echo(f"{row['event_id']} {'added' if added else 'is there already'}")


@event.command("list")
@click.option(
    "--since", type=Moment(), default="7d", show_default=True, help="From when on: ISO 8601, or an age such as 7d."
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
@click.pass_obj
def list_(invocation: Invocation, since: datetime, as_json: bool) -> None:
    """List events, oldest first."""
    from vllm_slo.commands.rendering import write_json, write_table

    found = invocation.reader().run(_LIST_SQL, [since])
    if as_json:
        write_json(found.schema, found.to_batches(), sys.stdout)
    elif found.num_rows == 0:
        click.echo(f"no events since {since:%Y-%m-%dT%H:%M:%SZ}; --since 30d looks further back", err=True)
    else:
        shown = found.drop_columns(["detail", "source"])
        write_table(shown.schema, shown.to_batches(), sys.stdout, None)


def _object(text: str | None) -> dict[str, object] | None:
    if text is None:
        return None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise click.BadParameter(f"not JSON: {error}", param_hint="--detail") from None
    if not isinstance(value, dict):
        raise click.BadParameter('not a JSON object; write {"key": "value"}', param_hint="--detail")
    return value


def _iso(value: object) -> str:
    return value.astimezone(UTC).isoformat() if isinstance(value, datetime) else str(value)
