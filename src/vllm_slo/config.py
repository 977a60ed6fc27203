"""The configuration file: YAML -> ``Config`` (what the user writes) -> the settings of the packages (what code reads).

Every fault of a file is reported at once, as ``file: key.path: found X, which is not Y; write Z``.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, field_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.settings import QuerySettings, RetentionSettings
from vllm_slo.exporters.conventions import PROMPT_TEXT_ATTRIBUTES
from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.otlp.decoded import DecodeSettings, ShardRule

DEFAULT_FILE = Path("vllm-slo.yaml")
VARIABLE = "VLLM_SLO_CONFIG"

_SIZE = re.compile(r"(\d+)\s*(B|KB|MB|GB|TB|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_RETENTION = RetentionSettings()
_KEPT_DAYS = 365_000
"""A thousand years: what null means for retention."""
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


class ConfigError(SloError):
    """A configuration file that cannot be used, with all its faults."""


def _fault(found: object, rule: str, cure: str) -> PydanticCustomError:
    shown = json.dumps(found, default=str)
    return PydanticCustomError(
        "rule", "found {found}, which is not {rule}; write {cure}", {"found": shown, "rule": rule, "cure": cure}
    )


def _bytes(value: object) -> object:
    """Bytes of `16 MiB` and the like (KB = 1000, KiB = 1024)."""
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match is None:
            raise _fault(value, "a size", "a number of bytes, or one like 512 MiB")
        unit = match[2].lower()
        return int(match[1]) * (1024 if "i" in unit else 1000) ** _POWERS[unit.rstrip("b").rstrip("i")]
    return value


def _address(value: object) -> object:
    """HOST:PORT as it is."""
    if isinstance(value, str):
        host, _, port = value.rpartition(":")
        if host and port.isdecimal() and int(port) < 65536:
            return value
    elif value is None:
        return None
    raise _fault(value, "HOST:PORT with a port of 0 to 65535", "127.0.0.1:4317, or null for none")


Size = Annotated[int, Field(ge=1), BeforeValidator(_bytes)]
Address = Annotated[str | None, BeforeValidator(_address)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TlsConfig(_Section):
    """Files of the certificate chain and of its private key, PEM."""

    certificate: str = Field(examples=["/etc/vllm-slo/tls.crt"], description="Certificate chain, PEM.")
    key: str = Field(examples=["/etc/vllm-slo/tls.key"], description="Private key, PEM.")


class PromptTextConfig(_Section):
    """Attributes (shell patterns) that are dropped because they carry what users wrote or were told."""

    extend: tuple[str, ...] = Field(
        default=(), examples=[["my.prompt*"]], strict=False, description="More patterns, beside the built-in ones."
    )
    replace: tuple[str, ...] | None = Field(
        default=None,
        examples=[["my.prompt*"]],
        strict=False,
        description="These patterns and no built-in ones; [] keeps every attribute.",
    )


class ReceiverConfig(_Section):
    """Where OTLP arrives and how much of it is taken."""

    grpc: Address = Field(default="127.0.0.1:4317", description="Address for OTLP/gRPC; null for none.")
    http: Address = Field(
        default="127.0.0.1:4318", description="Address for OTLP/HTTP, /healthz and /metrics; null for none."
    )
    token_file: str | None = Field(
        default=None,
        examples=["/etc/vllm-slo/token"],
        description="File with the bearer token that senders must show; null asks for none.",
    )
    tls: TlsConfig | None = Field(
        default=None, description="Serve both addresses with this certificate; null serves plain."
    )
    max_body_bytes: Size = Field(default=16 * 1024**2, description="Largest request taken, as it travels.")
    spool_limit_bytes: Size = Field(
        default=4 * 1024**3, description="Senders are pushed back while more than this waits in the spool."
    )
    prompt_text_attributes: PromptTextConfig = Field(
        default_factory=lambda: PromptTextConfig(), description="Attributes that are dropped before anything is kept."
    )


class ShardConfig(_Section):
    """Instances whose resource attribute matches the pattern belong to the shard; the first match counts."""

    attribute: str = Field(examples=["k8s.pod.name"], description="Resource attribute.")
    pattern: str = Field(examples=["vllm-long-*"], description="Shell pattern for its value.")
    shard: str = Field(examples=["long"], description="Name of the shard.")


class ScrapeConfig(_Section):
    """One vLLM server whose /metrics is read."""

    url: str = Field(examples=["http://127.0.0.1:8000/metrics"], description="Address of its /metrics.")
    instance: str | None = Field(
        default=None, examples=["vllm-0"], description="Its service.instance.id; null for host:port."
    )
    shard: str | None = Field(default=None, examples=["long"], description="Its shard; null for that of its spans.")
    model: str | None = Field(default=None, examples=["llama-3-8b"], description="Its model; null for what it reports.")
    interval_seconds: float = Field(default=5.0, ge=0.1, strict=False, description="Seconds between two reads.")

    @field_validator("url")
    @classmethod
    def _http(cls, url: str) -> str:
        if not re.match(r"https?://[^/\s]+", url):
            raise _fault(url, "an http or https URL", "http://127.0.0.1:8000/metrics")
        return url


Days = Annotated[int | None, Field(ge=1, le=_KEPT_DAYS, examples=[30])]


class RetentionConfig(_Section):
    """How long rows stay, in whole days before today; null keeps them."""

    requests_days: Days = Field(default=_RETENTION.requests_days, description="Days that requests stay.")
    spans_days: Days = Field(default=_RETENTION.spans_days, description="Days that other spans stay.")
    engine_samples_days: Days = Field(
        default=_RETENTION.engine_samples_days, description="Days that engine samples stay."
    )
    rollups_minute_days: Days = Field(
        default=_RETENTION.rollups_minute_days, description="Days that the rollups of minutes stay."
    )
    rollups_hour_days: Days = Field(
        default=_RETENTION.rollups_hour_days, description="Days that the rollups of hours stay."
    )
    rollups_day_days: Days = Field(
        default=_RETENTION.rollups_day_days, description="Days that the rollups of days stay."
    )
    total_bytes: Annotated[int | None, BeforeValidator(_bytes)] = Field(
        default=None,
        ge=1,
        examples=["100 GiB"],
        description="Above it the oldest days of requests and spans go first, today never; null for no limit.",
    )


class QueryConfig(_Section):
    """Limits of one SQL query."""

    memory_limit: str = Field(default="2 GiB", description="Memory of one connection.")
    threads: int | None = Field(
        default=None, ge=1, examples=[2], description="Threads of one connection; null for every core."
    )
    timeout_seconds: float = Field(default=60.0, gt=0, strict=False, description="A query that runs longer is stopped.")

    @field_validator("memory_limit")
    @classmethod
    def _size(cls, text: str) -> str:
        if _SIZE.fullmatch(text.strip()) is None:
            raise _fault(text, "a size with a unit", "2 GiB")
        return text


class AppConfig(_Section):
    """Where the pages are served."""

    host: str = Field(default="127.0.0.1", description="Address the app listens on.")
    port: int = Field(default=8501, ge=0, le=65535, description="Its port; 0 takes a free one.")


class Config(_Section):
    """The whole file."""

    lake: str = Field(default="lake", description="Folder or URL of the lake; relative to the file.")
    buckets: dict[str, int] = Field(
        default_factory=lambda: dict(Buckets().bounds),
        description="Context buckets: name and largest prompt in tokens, ascending. Longer prompts: the last one.",
    )
    receiver: ReceiverConfig = Field(default_factory=lambda: ReceiverConfig(), description="How spans come in.")
    shards: tuple[ShardConfig, ...] = Field(
        default=(), strict=False, description="Rules for spans without `vllm.shard`."
    )
    models: dict[str, str] = Field(
        default={},
        examples=[{"vllm-0": "llama-3-8b"}],
        description="Model of each service instance that does not report `vllm.model`.",
    )
    scrape: tuple[ScrapeConfig, ...] = Field(
        default=(), strict=False, description="vLLM servers whose /metrics is read."
    )
    retention: RetentionConfig = Field(default_factory=lambda: RetentionConfig(), description="How long rows stay.")
    query: QueryConfig = Field(default_factory=lambda: QueryConfig(), description="Limits of one SQL query.")
    app: AppConfig = Field(default_factory=lambda: AppConfig(), description="Where the pages are served.")
    _file: Path | None = PrivateAttr(None)

    @field_validator("buckets")
    @classmethod
    def _ascending(cls, buckets: dict[str, int]) -> dict[str, int]:
        example = "short: 4096, medium: 32768, long: 128000"
        if not buckets:
            raise _fault(buckets, "a list of at least one bucket", example)
        for name, bound in buckets.items():
            if not _NAME.fullmatch(name):
                raise _fault(name, "a bucket name of letters, digits, `_`, `.` and `-`", example)
            if bound < 1:
                raise _fault(bound, "a number of tokens over 0", example)
        bounds = list(buckets.values())
        if bounds != sorted(set(bounds)):
            raise _fault(
                buckets,
                "ascending",
                ", ".join(f"{name}: {bound}" for name, bound in sorted(buckets.items(), key=lambda b: b[1])),
            )
        return buckets

    @property
    def file(self) -> Path | None:
        """The file it was read from; None for the defaults."""
        return self._file

    def bucket_settings(self) -> Buckets:
        """The context buckets."""
        return Buckets(tuple(self.buckets.items()))

    def decode_settings(self) -> DecodeSettings:
        """What the decoders must know."""
        text = self.receiver.prompt_text_attributes
        built_in = PROMPT_TEXT_ATTRIBUTES if text.replace is None else text.replace
        scraped = {s.instance or _host_and_port(s.url): s.model for s in self.scrape if s.model}
        return DecodeSettings(
            prompt_text_attributes=(*built_in, *text.extend),
            shard_rules=tuple(ShardRule(rule.attribute, rule.pattern, rule.shard) for rule in self.shards),
            models=tuple({**scraped, **self.models}.items()),
        )

    def retention_settings(self) -> RetentionSettings:
        """How long rows stay."""
        written = self.retention
        days = {
            name: getattr(written, name) or _KEPT_DAYS for name in type(written).model_fields if name != "total_bytes"
        }
        return RetentionSettings(**days, total_bytes=written.total_bytes)

    def query_memory_bytes(self) -> int:
        """The memory limit of SQL connections as a number."""
        size = _bytes(self.query.memory_limit)
        assert isinstance(size, int), "validated"
        return size

    def query_settings(self) -> QuerySettings:
        """Limits of SQL connections."""
        return QuerySettings(self.query.memory_limit.replace(" ", ""), self.query.threads, self.query.timeout_seconds)


def find(option: str | None = None, environment: Mapping[str, str] = os.environ) -> Config:
    """The configuration of --config, else of VLLM_SLO_CONFIG, else of ./vllm-slo.yaml, else the defaults."""
    named = option or environment.get(VARIABLE)
    if named:
        return load(Path(named))
    return load(DEFAULT_FILE) if DEFAULT_FILE.is_file() else Config()


def load(file: Path) -> Config:
    """The configuration in ``file``; paths in it are relative to its folder. Raises ConfigError with all faults."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}; name another with --config") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: is not UTF-8 text (byte {error.start}); save it as UTF-8") from error
    return parse(text, file)


def parse(text: str, file: Path) -> Config:
    """The configuration that ``text`` holds; ``file`` names it in messages and anchors its relative paths.

    A section without a line in it is the section of the defaults.
    """
    try:
        content = yaml.load(text, Loader=_UniqueKeys)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: {_yaml_fault(error)}") from error
    content = {} if content is None else content
    if not isinstance(content, dict):
        raise ConfigError(
            f"{file}: found {json.dumps(content, default=str)}, which is not `key: value` lines; "
            "see vllm-slo.example.yaml"
        )
    try:
        config = Config.model_validate({key: value for key, value in content.items() if value is not None})
    except ValidationError as error:
        raise ConfigError("\n".join(f"{file}: {_describe(fault)}" for fault in error.errors())) from error
    config = _anchored(config, file.absolute().parent)
    config._file = file.absolute()
    return config


def _anchored(config: Config, folder: Path) -> Config:
    def at(path: str) -> str:
        return path if "://" in path else str(folder / path)

    receiver = config.receiver
    changed: dict[str, Any] = {}
    if receiver.token_file is not None:
        changed["token_file"] = at(receiver.token_file)
    if receiver.tls is not None:
        changed["tls"] = TlsConfig(certificate=at(receiver.tls.certificate), key=at(receiver.tls.key))
    return config.model_copy(update={"lake": at(config.lake), "receiver": receiver.model_copy(update=changed)})


def _host_and_port(url: str) -> str:
    """The instance that an address stands for."""
    from vllm_slo.exporters.vllm.scrape import parse_target

    return parse_target(url).instance


class _UniqueKeys(yaml.SafeLoader):
    """SafeLoader that refuses a key written twice: YAML forbids it, PyYAML silently keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"found the key '{key.value}' twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _yaml_fault(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or str(error)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return f"{where}{problem}; the file must be YAML with each key once"


_KINDS: dict[str, str] = {
    "bool": "true or false",
    "dict": "a block of `key: value` lines",
    "float": "a number",
    "int": "a whole number",
    "model": "a block of `key: value` lines",
    "string": "text (put it in quotes)",
    "tuple": "a list",
}


def _describe(fault: ErrorDetails) -> str:
    path = ".".join(str(part) for part in fault["loc"])
    kind, found = fault["type"], json.dumps(fault["input"], default=str)
    model, field = _field_at(fault["loc"])
    if kind == "extra_forbidden":
        known = list(model.model_fields)
        near = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1, cutoff=0.5)
        cure = f"write {near[0]}" if near else f"write one of {', '.join(known)}"
        return f"{path}: found an unknown key, which is not a setting; {cure}"
    if kind == "missing":
        return f"{path}: found nothing, which is required; write {path.rpartition('.')[2]}: {field}"
    if kind == "rule":
        return f"{path}: {fault['msg']}"
    context = fault.get("ctx", {})
    bounds = {"greater_than_equal": "at least", "greater_than": "over", "less_than_equal": "at most"}
    if kind in bounds:
        (limit,) = context.values()
        return f"{path}: found {found}, which is not {bounds[kind]} {limit}; write {field}"
    rule = _KINDS.get(kind.removesuffix("_type").removesuffix("_parsing"), fault["msg"])
    return f"{path}: found {found}, which is not {rule}; write {field}"


def _field_at(location: tuple[int | str, ...]) -> tuple[type[_Section], str]:
    """The section that holds the key at ``location``, and a value that would do there, as JSON."""
    model: type[_Section] = Config
    good = "a value as in vllm-slo.example.yaml"
    for part in location:
        field = model.model_fields.get(str(part))
        if field is None:
            continue
        sample = field.examples[0] if field.examples else field.get_default(call_default_factory=True)
        good = json.dumps(sample.model_dump() if isinstance(sample, BaseModel) else sample)
        inner = _section_of(field.annotation)
        if inner is not None:
            model = inner
    return model, good


def _section_of(annotation: Any) -> type[_Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, _Section):
        return annotation
    for argument in getattr(annotation, "__args__", ()):
        found = _section_of(argument)
        if found is not None:
            return found
    return None
