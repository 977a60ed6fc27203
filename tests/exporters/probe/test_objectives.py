"""The SLO file as the probe reads it: what it gives, and what a person is told who wrote it wrongly."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from vllm_slo.exporters.probe.objectives import Objective, ObjectivesError, read, read_or_none, thresholds

BUCKETS = ("short", "medium", "long")
GOOD = """
slos:
  - name: chat-ttft
    sli: time_to_first_token
    threshold_seconds: 0.5
    objective: 0.99
    bucket: short
  - {name: urgent-queue, sli: queue, threshold_seconds: 1, objective: 0.999, priority: -1, model: m, shard: "7"}
"""
PARSED = (
    Objective("chat-ttft", "time_to_first_token", 0.5, 0.99, bucket="short"),
    Objective("urgent-queue", "queue", 1.0, 0.999, model="m", shard="7", priority=-1),
)


def file(folder: Path, text: str, name: str = "slos.yaml") -> Path:
    """Written there."""
    path = folder / name
    path.write_text(text)
    return path


def faults(folder: Path, text: str, name: str = "slos.yaml") -> list[str]:
    """What a person is told."""
    with pytest.raises(ObjectivesError) as error:
        read(file(folder, text, name), BUCKETS)
    return str(error.value).splitlines()


def one(**fields: object) -> str:
    """A file of one objective; a field that is None is left out."""
    entry = {"name": "a", "sli": "queue", "threshold_seconds": 1.0, "objective": 0.99, **fields}
    return json.dumps({"slos": [{key: value for key, value in entry.items() if value is not None}]})


def test_yaml_gives_the_objectives(tmp_path: Path) -> None:
    assert read(file(tmp_path, GOOD), BUCKETS) == PARSED


def test_json_needs_no_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = file(tmp_path, one(), "slos.json")
    assert read(path, BUCKETS) == (Objective("a", "queue", 1.0, 0.99),)


def test_yaml_without_pyyaml_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert faults(tmp_path, GOOD) == [
        "slos.yaml: reading YAML needs PyYAML; install it, or write slos.json",
    ]


def test_every_fault_is_told_at_once_with_its_place(tmp_path: Path) -> None:
    text = """
slos:
  - {name: a, sli: ttft, threshold_seconds: 0.5, objective: 99.9}
  - {sli: queue, treshold_seconds: 1, objective: 0.9}
  - just text
  - {name: b, sli: queue, threshold_seconds: 1, objective: 0.9, bucket: shrt, priority: high}
owner: me
"""
    assert faults(tmp_path, text) == [
        "slos.yaml: 'owner' is not known here; only slos is",
        "slos.yaml: slo 3: 'just text' has no fields; write name, sli, threshold_seconds, objective",
        "slos.yaml: slo 'a': sli 'ttft' is not one of queue, time_to_first_token, inter_token_latency, "
        "time_per_output_token, request_duration",
        "slos.yaml: slo 'a': objective 99.9 is not in (0, 1); write 0.999",
        "slos.yaml: slo 2: 'treshold_seconds' is not known; did you mean threshold_seconds?",
        "slos.yaml: slo 2: name is missing; add it",
        "slos.yaml: slo 2: threshold_seconds is missing; add it",
        "slos.yaml: slo 'b': bucket 'shrt' is not one of short, medium, long; see VLLM_SLO_BUCKETS",
        "slos.yaml: slo 'b': priority 'high' is no whole number; write vLLM's, such as 0",
    ]


@pytest.mark.parametrize("value", [0, -1, 1e9, float("nan"), "0.5", True, [1]])
def test_a_threshold_must_be_seconds_up_to_a_day(tmp_path: Path, value: object) -> None:
    (fault,) = faults(tmp_path, one(threshold_seconds=value), "slos.json")
    assert "threshold_seconds" in fault
    assert "write one such as 0.5" in fault


@pytest.mark.parametrize(("value", "cure"), [(99, "write 0.99"), (1, "such as 0.99"), (0, "such as"), ("x", "such as")])
def test_an_objective_must_be_a_share(tmp_path: Path, value: object, cure: str) -> None:
    (fault,) = faults(tmp_path, one(objective=value), "slos.json")
    assert cure in fault


def test_a_name_may_be_taken_once(tmp_path: Path) -> None:
    entry = json.loads(one())["slos"][0]
    (fault,) = faults(tmp_path, json.dumps({"slos": [entry, entry]}), "slos.json")
    assert fault == "slos.json: slo 'a': name 'a' is taken; give each objective its own"


@pytest.mark.parametrize("text", ["", "[]", "slos: {}", "5"])
def test_a_file_without_a_list_says_how_to_begin(tmp_path: Path, text: str) -> None:
    (fault,) = faults(tmp_path, text)
    assert fault.startswith("slos.yaml: no list under slos; write slos:")


def test_an_openslo_document_is_told_apart(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, "apiVersion: openslo/v1\nkind: SLO\n")
    assert fault == "slos.yaml: apiVersion 'openslo/v1' is not read; write a list under slos"


@pytest.mark.parametrize(
    ("name", "text"), [("slos.yaml", "slos: ["), ("slos.json", "{"), ("slos.yaml", "a: 1\n---\nb: 2\n")]
)
def test_a_file_that_does_not_parse_says_where(tmp_path: Path, name: str, text: str) -> None:
    (fault,) = faults(tmp_path, text, name)
    assert "line" in fault
    assert "mend it there" in fault


def test_a_server_runs_on_without_objectives_after_one_warning(tmp_path: Path) -> None:
    said: list[str] = []
    nested = file(tmp_path, "[" * 100_000, "nested.json")
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "absent.yaml", tmp_path, file(tmp_path, "slos: 3"), nested, binary):
        assert read_or_none(path, BUCKETS, said.append) == ()
    assert len(said) == 5
    assert all("VLLM_SLO_FILE is at fault" in warning for warning in said)
    assert read_or_none(None, BUCKETS, said.append) == ()
    assert read_or_none(file(tmp_path, GOOD), BUCKETS, said.append) == PARSED
    assert len(said) == 5


def test_thresholds_of_every_model_and_shard_become_bounds() -> None:
    again = Objective("other", "queue", 2.0, 0.9, shard="elsewhere")
    assert thresholds((*PARSED, again)) == {"time_to_first_token": (0.5,), "queue": (1.0, 2.0)}
