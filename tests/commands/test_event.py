"""`vllm-slo event`: each event once, whoever writes at the same time."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from vllm_slo.analytics import events
from vllm_slo.analytics.events import EventError
from vllm_slo.analytics.lake import Lake
from vllm_slo.commands.event import KINDS
from vllm_slo.commands.group import group
from vllm_slo.commands.moments import moment
from vllm_slo.exporters.schema import EVENT_KINDS

NOW = datetime(2026, 11, 30, 12, tzinfo=UTC)


def slo(lake: Path, *arguments: str) -> Result:
    """One command line, in this process."""
    return CliRunner().invoke(group, ["--lake", str(lake), *arguments])


def listed(lake: Path, since: str = "2026-01-01") -> list[dict[str, object]]:
    """What `event list --json` prints."""
    done = slo(lake, "event", "list", "--since", since, "--json")
    assert done.exit_code == 0, done.exception
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


def test_the_kinds_are_those_of_the_schema() -> None:
    assert KINDS == EVENT_KINDS


def test_an_event_is_added_with_everything_that_was_said_of_it(tmp_path: Path) -> None:
    done = slo(
        tmp_path,
        *("event", "add", "--kind", "exclusion", "--title", "night work", "--at", "2026-11-30T01:00:00+02:00"),
        *("--until", "2026-11-30T00:30Z", "--shard", "long", "--instance", "vllm-0", "--model", "m", "--id", "ci-1"),
        *("--detail", '{"who": "us"}', "--json"),
    )
    assert done.exit_code == 0, done.exception
    assert json.loads(done.stdout)["added"] is True
    assert listed(tmp_path) == [
        {
            "event_id": "ci-1",
            "time": "2026-11-29T23:00:00.000000Z",
            "end_time": "2026-11-30T00:30:00.000000Z",
            "kind": "exclusion",
            "title": "night work",
            "shard": "long",
            "service_instance_id": "vllm-0",
            "model": "m",
            "source": "command",
            "detail": '{"who": "us"}',
        }
    ]


def test_the_same_call_adds_once_and_another_adds_another(tmp_path: Path) -> None:
    same = ("event", "add", "--kind", "deploy", "--title", "v2", "--at", "2026-11-30")
    assert "added" in slo(tmp_path, *same).stdout
    assert "is there already" in slo(tmp_path, *same, "--detail", '{"a": 1}').stdout
    assert "added" in slo(tmp_path, *same, "--shard", "long").stdout
    assert "added" in slo(tmp_path, *same, "--id", "x").stdout
    assert "is there already" in slo(tmp_path, "event", "add", "--kind", "note", "--title", "other", "--id", "x").stdout
    assert len(listed(tmp_path)) == 3


@pytest.mark.parametrize("option", ["--id", "--shard", "--instance", "--model"])
def test_what_an_unset_variable_leaves_is_refused(tmp_path: Path, option: str) -> None:
    done = slo(tmp_path, "event", "add", "--kind", "deploy", "--title", "v2", option, "")
    assert isinstance(done.exception, EventError)
    assert "is empty, perhaps from a variable that is not set" in str(done.exception)
    assert not list(tmp_path.iterdir())


def test_a_lake_that_was_not_there_is_named(tmp_path: Path) -> None:
    note = ("event", "add", "--kind", "note", "--title", "t")
    assert slo(tmp_path / "typo", *note).stderr.startswith(f"new lake {tmp_path}/typo; ")
    assert slo(tmp_path / "typo", *note).stderr == ""


def test_several_processes_that_add_the_same_and_other_events_lose_and_double_none(tmp_path: Path) -> None:
    Lake.open(tmp_path / "lake")
    base = [sys.executable, "-m", "vllm_slo", "--lake", str(tmp_path / "lake"), "event", "add", "--kind", "note"]
    running = [
        subprocess.Popen([*base, "--title", title, "--at", "2026-11-30"], stdout=subprocess.DEVNULL)
        for title in ("same", "same", "same", "a", "b", "c")
    ]
    assert [process.wait(120) for process in running] == [0] * 6
    assert sorted(str(event["title"]) for event in listed(tmp_path / "lake")) == ["a", "b", "c", "same"]


def test_the_list_begins_at_since_and_says_when_it_is_empty(tmp_path: Path) -> None:
    for day in ("2026-11-01", "2026-11-20"):
        slo(tmp_path, "event", "add", "--kind", "note", "--title", day, "--at", day)
    assert [event["title"] for event in listed(tmp_path, "2026-11-10")] == ["2026-11-20"]
    shown = slo(tmp_path, "event", "list", "--since", "2026-11-01")
    assert shown.stdout.splitlines()[0].split()[:3] == ["event_id", "time", "end_time"]
    assert len(shown.stdout.splitlines()) == 3
    assert "no events since 2031-01-01" in slo(tmp_path, "event", "list", "--since", "2031-01-01").stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--kind", "x", "--title", "t"), "'x' is not one of"),
        (("--kind", "note", "--title", "t", "--detail", "[1]"), "not a JSON object"),
        (("--kind", "note", "--title", "t", "--detail", "{"), "not JSON"),
        (("--kind", "note", "--title", "t", "--at", "yesterday"), "'yesterday' is no moment"),
        (("--kind", "note", "--title", " "), "the title is empty"),
        (("--kind", "note", "--title", "t", "--at", "2026-01-02", "--until", "2026-01-01"), "before it begins"),
    ],
)
def test_what_cannot_be_an_event_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = slo(tmp_path, "event", "add", *arguments)
    assert done.exit_code != 0
    assert message in done.stderr + str(done.exception)


def test_an_id_depends_on_everything_but_the_detail() -> None:
    one = events.row("note", "t", NOW)["event_id"]
    assert events.row("note", "t", NOW, detail={"a": 1})["event_id"] == one
    others = [
        events.row("deploy", "t", NOW),
        events.row("note", "u", NOW),
        events.row("note", "t", NOW + timedelta(seconds=1)),
        events.row("note", "t", NOW, end_time=NOW),
        events.row("note", "t", NOW, shard="s"),
        events.row("note", "t", NOW, instance="s"),
        events.row("note", "t", NOW, model="s"),
    ]
    assert len({row["event_id"] for row in others} | {one}) == 8
    with pytest.raises(EventError, match="kind 'x' is unknown"):
        events.row("x", "t", NOW)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("now", NOW),
        ("90s", NOW - timedelta(seconds=90)),
        ("1.5h", NOW - timedelta(minutes=90)),
        ("7d", NOW - timedelta(days=7)),
        ("2w", NOW - timedelta(days=14)),
        ("2026-11-30", datetime(2026, 11, 30, tzinfo=UTC)),
        ("2026-11-30T10:00+02:00", datetime(2026, 11, 30, 8, tzinfo=UTC)),
    ],
)
def test_moments_are_ages_or_iso_times(text: str, expected: datetime) -> None:
    assert moment(text, NOW) == expected
