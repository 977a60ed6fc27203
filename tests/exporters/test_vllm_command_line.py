"""Command lines of vLLM servers."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.vllm.doctor.command_line import parse_command
from vllm_slo.exporters.vllm.doctor.flags import RETIRED, known


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("vllm serve m --max-num-seqs 8", {"max-num-seqs": ("8",)}),
        ("vllm serve m --max_num_seqs=8", {"max-num-seqs": ("8",)}),
        ("vllm serve m -tp 2 -dp=4", {"tensor-parallel-size": ("2",), "data-parallel-size": ("4",)}),
        ("vllm serve m --no-enable-prefix-caching", {"enable-prefix-caching": ("false",)}),
        ("vllm serve m --enforce-eager --seed -1", {"enforce-eager": ("true",), "seed": ("-1",)}),
        ("vllm serve m --api-key a b --port 1", {"api-key": ("a", "b"), "port": ("1",)}),
        ("vllm serve m --speculative-config.method ngram", {"speculative-config.method": ("ngram",)}),
        ("vllm serve m --disable-log-st", {"disable-log-stats": ("true",)}),
        ("vllm serve m \\\n  --port 1", {"port": ("1",)}),
        ("python3 -m vllm.entrypoints.openai.api_server --model m", {"model": ("m",)}),
        ("/opt/venv/bin/vllm serve m --port 1", {"port": ("1",)}),
        ("--port 1", {"port": ("1",)}),
        ("taskset -c 0 uv run vllm serve m --port 1", {"port": ("1",)}),
        ("vllm serve m --port 1 2>&1 | tee log", {"port": ("1",)}),
        ("vllm serve m --port 1 --port 2", {"port": ("2",)}),
    ],
)
def test_options_are_read_as_vllm_reads_them(text: str, options: dict[str, tuple[str, ...]]) -> None:
    command = parse_command(text)
    assert command.options == options
    assert command.strangers == ()


def test_variables_before_the_program_are_its_environment() -> None:
    command = parse_command("export A=1; B='two words' vllm serve m")
    assert command.env == {"A": "1", "B": "two words"}
    assert command.model == "m"


def test_a_script_is_read_up_to_the_server_it_starts() -> None:
    command = parse_command(
        "#!/bin/bash\nset -euo pipefail\nexport A='x y' B=2\n# vllm serve old --port 9\ncd /srv && sleep 1\n"
        'exec vllm serve m \\\n  --port 1 \\\n  --kv-transfer-config \'{"a": 1,\n "b": 2}\' &\nwait\n'
    )
    assert command.env == {"A": "x y", "B": "2"}
    assert command.model == "m"
    assert command.options == {"port": ("1",), "kv-transfer-config": ('{"a": 1,\n "b": 2}',)}


def test_a_container_brings_environment_network_and_version() -> None:
    command = parse_command(
        "docker run --rm -it --gpus all --name vllm-1 -e A=1 --env=B=2 --env C=3 --network=host -p 8000:8000 "
        "vllm/vllm-openai:v0.32.0 --model m --max-model-len 32k"
    )
    assert command.env == {"A": "1", "B": "2", "C": "3"}
    assert (command.container, command.host_network, command.image_version) == (True, True, "0.32.0")
    assert command.integer("max-model-len") == 32000


@pytest.mark.parametrize(
    ("written", "value"), [("4096", 4096), ("32k", 32000), ("32K", 32768), ("1.5k", 1500), ("auto", None), ("-1", None)]
)
def test_lengths_are_read_as_vllm_reads_them(written: str, value: int | None) -> None:
    assert parse_command(f"vllm serve m --max-model-len={written}").integer("max-model-len") == value


def test_what_vllm_does_not_know_is_a_stranger() -> None:
    command = parse_command("vllm serve m --max-batch-size 4 --port 1 --swap_space=4")
    assert command.strangers == ("max-batch-size", "swap-space")
    assert command.value("port") == "1"


@pytest.mark.parametrize(
    "text", ["", "vllm bench serve", "nginx -g x", "vllm serve 'm", "docker run -it ubuntu bash", "docker run"]
)
def test_what_starts_no_server_is_refused(text: str) -> None:
    with pytest.raises(SloError, match="--command"):
        parse_command(text)


def test_no_retired_option_is_taken_by_vllm_and_every_cure_names_one_that_is() -> None:
    flags = known()
    assert [name for name in RETIRED if flags.find(f"--{name}")] == []
    named = {
        word.strip("().,;:") for cure in RETIRED.values() for word in cure.instead.split() if word.startswith("--")
    }
    assert len(named) > 15
    assert [name for name in named if flags.find(name) is None] == []


_LIST_OPTIONS = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
print(json.dumps([[action.option_strings, type(action).__name__, action.nargs] for action in parser._actions]))
"""


@pytest.mark.vllm
def test_the_list_of_options_is_that_of_the_real_parser() -> None:
    python = os.environ.get("VLLM_SLO_VLLM_PYTHON", "")
    if not python:
        pytest.skip(os.environ.get("VLLM_SLO_VLLM_MISSING", "VLLM_SLO_VLLM_PYTHON names no interpreter"))
    listed = subprocess.run([python, "-c", _LIST_OPTIONS], capture_output=True, text=True, timeout=200, check=True)
    real: dict[str, str] = {}
    aliases: dict[str, str] = {}
    for spellings, action, nargs in json.loads(listed.stdout.splitlines()[-1]):
        names = [name for name in spellings if name.startswith("--") and not name.startswith("--no-")]
        if not names or names[0] == "--help":
            continue
        kind = {"_StoreTrueAction": "0", "BooleanOptionalAction": "bool"}.get(action)
        real[names[0][2:]] = kind or nargs or "1"
        aliases |= {n: names[0][2:] for n in spellings if n != names[0] and not n.startswith("--no-")}
    assert known().arity == real
    assert known().aliases == aliases
