"""The command that starts a vLLM server, as options and environment."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.vllm.doctor.flags import known

_ASSIGNMENT = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")
_BEFORE_PROGRAM = frozenset({"env", "export", "exec", "nohup", "sudo"})
_BETWEEN = ";&|\n"
_CONTAINER_SWITCHES = frozenset(
    {
        "-d",
        "-i",
        "-t",
        "-it",
        "-ti",
        "-dit",
        "-itd",
        "--rm",
        "--detach",
        "--init",
        "--interactive",
        "--tty",
        "--privileged",
    }
)
_SERVER_MODULES = frozenset({"vllm.entrypoints.openai.api_server", "vllm.entrypoints.cli.main"})
_NUMBER = re.compile(r"^(\d+(?:\.\d+)?)([kmgtKMGT]?)$")
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_VERSION_TAG = re.compile(r"^v?(\d+\.\d+(?:\.\d+)?)")


@dataclass(frozen=True)
class CommandLine:
    """``options`` maps an option without dashes to its values; a switch has the value ``true`` or ``false``.

    ``strangers`` are the options that vLLM 0.32 does not know, without dashes. ``env`` is what stands before the
    program or in ``docker run -e``. ``container``: it runs in one; ``host_network``: that shares the host's network.
    """

    options: Mapping[str, tuple[str, ...]]
    model: str | None = None
    strangers: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    container: bool = False
    host_network: bool = False
    image_version: str | None = None

    def value(self, option: str) -> str | None:
        """The last value given for an option, None when it was not given."""
        values = self.options.get(option)
        return values[-1] if values else None

    def on(self, option: str) -> bool | None:
        """Whether a switch is on; None when it was not given."""
        value = self.value(option)
        return None if value is None else value != "false"

    def integer(self, option: str) -> int | None:
        """An option's value as vLLM reads it (``32k`` is 32,000, ``32K`` is 32,768); None for none, ``auto`` and -1."""
        match = _NUMBER.match(self.value(option) or "")
        if match is None:
            return None
        base = 1024 if match[2].isupper() else 1000
        return int(float(match[1]) * base ** _POWERS[match[2].lower()])


def parse_command(text: str) -> CommandLine:
    """The command line of a server: ``vllm serve ...``, the api_server module, or ``docker run ... IMAGE ...``.

    Variables may stand before it, and so may wrappers (``taskset``, ``uv run``). A shell script will do: the first of
    its commands that starts a server counts, with the variables set before it; nothing is expanded.
    Raises SloError when the text cannot be split or starts no vLLM server.

    >>> parse_command("OTEL_SERVICE_NAME=vllm vllm serve m --max_num_seqs=8 --no-enable-prefix-caching").options
    {'max-num-seqs': ('8',), 'enable-prefix-caching': ('false',)}
    """
    env: dict[str, str] = {}
    other = ""
    for statement in _statements(text):
        at = 0
        while at < len(statement) and (statement[at] in _BEFORE_PROGRAM or _ASSIGNMENT.match(statement[at])):
            if _ASSIGNMENT.match(statement[at]):
                name, _, value = statement[at].partition("=")
                env[name] = value
            at += 1
        tokens = statement[at:]
        if tokens and tokens[0].rsplit("/", 1)[-1] in ("docker", "podman"):
            if (contained := _container(tokens[1:])) is None:
                raise SloError("--command: no image with 'vllm' in its name after docker run; give 'vllm serve ...'")
            arguments, more, host_network, version = contained
            options, strangers, model = _options(_server_arguments(arguments, bare=True) or [])
            return CommandLine(options, model, strangers, {**env, **more}, True, host_network, version)
        if (found := _server_arguments(tokens, bare=bool(tokens) and tokens[0].startswith("--"))) is not None:
            options, strangers, model = _options(found)
            return CommandLine(options, model, strangers, env)
        other = other or " ".join(tokens[:3])
    start = repr(other) if other else "an empty command"
    raise SloError(f"--command: {start} starts no vLLM server; give 'vllm serve MODEL ...' or its options alone")


def _statements(text: str) -> list[list[str]]:
    """The words of each command of a shell text; quotes are obeyed, comment lines left out."""
    joined = re.sub(r"^\s*#.*$", "", text.replace("\\\n", " "), flags=re.MULTILINE)
    lexer = shlex.shlex(joined, posix=True, punctuation_chars=_BETWEEN)
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, ""
    statements: list[list[str]] = [[]]
    try:
        for token in lexer:
            if token and not token.strip(_BETWEEN):
                statements.append([])
            else:
                statements[-1].append(token)
    except ValueError as error:
        cure = "quote it as one argument: --command 'vllm serve MODEL --flag value'"
        raise SloError(f"--command: {error}; {cure}") from error
    return [statement for statement in statements if statement]


def _container(tokens: Sequence[str]) -> tuple[list[str], dict[str, str], bool, str | None] | None:
    """(what stands behind the image's name, variables, whether the network is the host's, version in the tag)."""
    env: dict[str, str] = {}
    host_network = False
    waiting = ""
    for at, token in enumerate(tokens):
        option, _, value = (waiting, "", token) if waiting else token.partition("=")
        if token.startswith("-") and not waiting and "=" not in token:
            waiting = "" if token in _CONTAINER_SWITCHES else token
            continue
        if option in ("-e", "--env") and "=" in value:
            name, _, content = value.partition("=")
            env[name] = content
        if option in ("--network", "--net") and value == "host":
            host_network = True
        if not waiting and not token.startswith("-") and "vllm" in token:
            tag = _VERSION_TAG.match(token.rpartition(":")[2])
            return list(tokens[at + 1 :]), env, host_network, tag[1] if tag else None
        waiting = ""
    return None


def _server_arguments(tokens: Sequence[str], *, bare: bool) -> list[str] | None:
    """The arguments of the server; None when none is started. ``bare``: they may stand without a program."""
    for at, (first, second) in enumerate(pairwise(tokens)):
        if (first.rsplit("/", 1)[-1], second) == ("vllm", "serve"):
            return list(tokens[at + 2 :])
        if first == "-m" and second in _SERVER_MODULES:
            rest = list(tokens[at + 2 :])
            return rest[1:] if rest[:1] == ["serve"] else rest
    return list(tokens) if bare else None


def _options(arguments: Sequence[str]) -> tuple[dict[str, tuple[str, ...]], tuple[str, ...], str | None]:
    flags = known()
    options: dict[str, tuple[str, ...]] = {}
    strangers: list[str] = []
    model: str | None = None
    at = 0
    while at < len(arguments):
        token = arguments[at]
        at += 1
        if not _is_option(token):
            model = model or token
            continue
        written, equals, value = token.partition("=")
        option, dot, key = written.partition(".")
        found = flags.find(option)
        if found is None:
            name, arity, negated = option.lstrip("-").replace("_", "-"), "+", False
            if not re.match(r"^-O\d?$", option):
                strangers.append(name)
        else:
            name, negated = found
            arity = "1" if dot else flags.arity[name]
        values = [value] if equals else []
        limit = {"0": 0, "bool": 0, "1": 1, "?": 1, "+": len(arguments)}[arity]
        while not equals and len(values) < limit and at < len(arguments):
            if _is_option(arguments[at]) and not (arity == "1" and not values and _negative(arguments[at])):
                break
            values.append(arguments[at])
            at += 1
        if not values:
            values = ["false" if negated else "true"]
        options[name + dot + key] = tuple(values)
    return options, tuple(strangers), model


def _is_option(token: str) -> bool:
    return token.startswith("-") and len(token) > 1


def _negative(token: str) -> bool:
    return re.match(r"^-\d", token) is not None
