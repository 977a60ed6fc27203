"""The configuration file: what it gives, and what it says when it is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from vllm_slo.analytics.buckets import Buckets
from vllm_slo.analytics.settings import QuerySettings, RetentionSettings
from vllm_slo.config import Config, ConfigError, find, load, parse
from vllm_slo.exporters.conventions import PROMPT_TEXT_ATTRIBUTES
from vllm_slo.exporters.otlp.decoded import DecodeSettings, ShardRule

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "configuration.md"
EXAMPLE = ROOT / "vllm-slo.example.yaml"
HERE = Path("vllm-slo.yaml")


def faults(text: str) -> list[str]:
    """The lines of the error, without the file's name."""
    with pytest.raises(ConfigError) as caught:
        parse(text, HERE)
    lines = str(caught.value).splitlines()
    assert all(line.startswith("vllm-slo.yaml: ") for line in lines)
    return [line.removeprefix("vllm-slo.yaml: ") for line in lines]


def settings_of(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, field) of every setting."""
    for name, field in model.model_fields.items():
        inner = [
            argument
            for argument in (field.annotation, *getattr(field.annotation, "__args__", ()))
            if isinstance(argument, type) and issubclass(argument, BaseModel)
        ]
        listed = "[]" if str(field.annotation).startswith("tuple") else ""
        if not inner or listed or not field.is_required():
            yield f"{prefix}{name}", field
        for each in inner:
            yield from settings_of(each, f"{prefix}{name}{listed}.")


def configuration_page() -> str:
    """docs/configuration.md: every key, its default and what it means."""
    rows = [
        f"| `{key}` | {_shown(field)} | {field.description or ''} |".replace("  ", " ")
        for key, field in settings_of(Config)
        if not _is_block(field)
    ]
    return "\n".join(
        [
            "# Configuration",
            "",
            "A YAML file: `--config FILE`, else the variable `VLLM_SLO_CONFIG`, else `vllm-slo.yaml` in the working",
            "folder, else the defaults. Every key is optional; a key that is unknown or has a wrong value stops the",
            "program at its start with all faults of the file. Paths in the file are relative to its folder. Sizes are",
            "bytes, or text such as `512 MiB` (KB = 1000, KiB = 1024). The lake is, in this order: `--lake`, the",
            "variable `VLLM_SLO_LAKE`, the key `lake`, the folder `lake`.",
            "",
            "[vllm-slo.example.yaml](../vllm-slo.example.yaml) has every key with its default, ready to be copied.",
            "",
            "| key | default | meaning |",
            "|---|---|---|",
            *rows,
            "",
            "Changing `buckets` changes no data: `bucket` is computed when rows are read. Rollups keep the bucket they",
            "were written with.",
            "",
            "Prompt text is dropped before anything is kept, wherever attributes can be. The built-in patterns:",
            "",
            *(f"* `{pattern}`" for pattern in PROMPT_TEXT_ATTRIBUTES),
            "",
        ]
    )


def _is_block(field: Any) -> bool:
    return isinstance(field.get_default(call_default_factory=True), BaseModel)


def _shown(field: Any) -> str:
    if field.is_required():
        return "required"
    default = field.get_default(call_default_factory=True)
    if isinstance(default, dict):
        return "`" + (", ".join(f"{key}: {value}" for key, value in default.items()) or "{}") + "`"
    if isinstance(default, tuple):
        return "`[]`"
    if isinstance(default, int) and default >= 2**20 and default % 2**20 == 0:
        size = default // 2**20
        return f"`{size // 1024} GiB`" if size % 1024 == 0 else f"`{size} MiB`"
    return f"`{'null' if default is None else default}`"


def test_the_page_is_generated_from_the_settings(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(configuration_page())
    assert PAGE.read_text() == configuration_page(), "run pytest --rewrite-golden on this file and read the diff"


def test_the_example_file_is_the_defaults_in_every_key() -> None:
    example = load(EXAMPLE)
    assert example.model_dump() | {"lake": "lake"} == Config().model_dump()
    written = set(re.findall(r"^[ #-]*(\w+):", EXAMPLE.read_text(), re.MULTILINE))
    assert {key.rpartition(".")[2].removesuffix("[]") for key, _ in settings_of(Config)} - {
        "certificate",
        "key",
    } <= written


def test_the_commented_entries_of_the_example_are_right() -> None:
    text = re.sub(r"^(shards|scrape): \[\]", r"\1:", EXAMPLE.read_text(), flags=re.MULTILINE)
    text = re.sub(r"^# (- |  )", r"  \1", text, flags=re.MULTILINE)
    config = parse(text, EXAMPLE)
    assert [rule.shard for rule in config.shards] == ["long"]
    assert [target.url for target in config.scrape] == ["http://127.0.0.1:8000/metrics"]


def test_the_defaults_are_those_of_the_packages() -> None:
    config = Config()
    assert config.bucket_settings() == Buckets()
    assert config.query_settings() == QuerySettings()
    assert config.decode_settings() == DecodeSettings()
    assert config.retention_settings() == RetentionSettings()


def test_every_fault_of_a_file_is_reported_at_once_with_place_and_cure() -> None:
    found = faults(
        "bucket: {a: 1}\nbuckets: {a: 5, b: 3}\n"
        "receiver: {grcp: x, http: 4318, max_body_bytes: 1 foo, tls: {certificate: 1}}\n"
        "shards: [{attribute: a, shard: 3}]\nscrape: [{url: localhost:8000}]\nquery: {memory_limit: 3, threads: 0}\n"
        "app: 8501\nretention: {requests_days: x}\n"
    )
    assert sorted(found) == sorted(
        [
            'buckets: found {"a": 5, "b": 3}, which is not ascending; write b: 3, a: 5',
            "bucket: found an unknown key, which is not a setting; write buckets",
            "receiver.grcp: found an unknown key, which is not a setting; write grpc",
            "receiver.http: found 4318, which is not HOST:PORT with a port of 0 to 65535; "
            "write 127.0.0.1:4317, or null for none",
            'receiver.max_body_bytes: found "1 foo", which is not a size; write a number of bytes, or one like 512 MiB',
            'receiver.tls.certificate: found 1, which is not text (put it in quotes); write "/etc/vllm-slo/tls.crt"',
            'receiver.tls.key: found nothing, which is required; write key: "/etc/vllm-slo/tls.key"',
            'shards.0.pattern: found nothing, which is required; write pattern: "vllm-long-*"',
            'shards.0.shard: found 3, which is not text (put it in quotes); write "long"',
            'scrape.0.url: found "localhost:8000", which is not an http or https URL; '
            "write http://127.0.0.1:8000/metrics",
            'query.memory_limit: found 3, which is not text (put it in quotes); write "2 GiB"',
            "query.threads: found 0, which is not at least 1; write 2",
            "app: found 8501, which is not a block of `key: value` lines; write "
            + '{"host": "127.0.0.1", "port": 8501}',
            'retention.requests_days: found "x", which is not a whole number; write 30',
        ]
    )


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("buckets: {}", "buckets: found {}, which is not a list of at least one bucket"),
        ("buckets: {a: 4, b: 4}", "which is not ascending"),
        ("buckets: {a: 0}", "which is not a number of tokens over 0"),
        ("buckets: {'a b': 4}", 'found "a b", which is not a bucket name'),
        ("lake: a\nlake: b", "line 2, column 1: found the key 'lake' twice"),
        ("- a", "which is not `key: value` lines"),
        ("lake: [", "the file must be YAML"),
        ("app: {port: 70000}", "app.port: found 70000, which is not at most 65535; write 8501"),
        ("receiver: {prompt_text_attributes: {extend: x}}", 'found "x", which is not a list'),
    ],
)
def test_a_fault_is_named(text: str, fault: str) -> None:
    assert any(fault in line for line in faults(text))


def test_an_empty_file_and_an_empty_section_are_the_defaults() -> None:
    assert parse("", HERE).receiver == Config().receiver
    assert parse("receiver:\n  # nothing yet\n", HERE).receiver == Config().receiver


def test_prompt_text_patterns_extend_or_replace_the_built_in_ones() -> None:
    extended = parse("receiver: {prompt_text_attributes: {extend: ['my.*']}}", HERE).decode_settings()
    assert extended.prompt_text_attributes == (*PROMPT_TEXT_ATTRIBUTES, "my.*")
    replaced = parse("receiver: {prompt_text_attributes: {replace: ['my.*']}}", HERE).decode_settings()
    assert replaced.prompt_text_attributes == ("my.*",)


def test_shard_rules_and_models_reach_the_decoders() -> None:
    config = parse(
        "shards: [{attribute: pod, pattern: 'a-*', shard: a}]\nmodels: {one: m1}\n"
        "scrape: [{url: 'http://h:1/metrics', instance: two, model: m2}]",
        HERE,
    )
    settings = config.decode_settings()
    assert settings.shard_rules == (ShardRule("pod", "a-*", "a"),)
    assert dict(settings.models) == {"one": "m1", "two": "m2"}


def test_the_model_of_a_scraped_server_without_a_name_is_that_of_its_host_and_port() -> None:
    settings = parse("scrape: [{url: 'http://h:1/metrics', model: m}]", HERE).decode_settings()
    assert dict(settings.models) == {"h:1": "m"}


def test_null_keeps_rows_for_good() -> None:
    retention = parse("retention: {requests_days: null, total_bytes: 100 GB}", HERE).retention_settings()
    assert retention.requests_days > 36_500
    assert retention.total_bytes == 100_000_000_000


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "slo.yaml"
    file.write_text("lake: data\nreceiver: {token_file: token, tls: {certificate: /c, key: k}}\n")
    config = load(file)
    assert config.lake == str(tmp_path / "data")
    assert config.receiver.token_file == str(tmp_path / "token")
    assert config.receiver.tls is not None
    assert (config.receiver.tls.certificate, config.receiver.tls.key) == ("/c", str(tmp_path / "k"))
    assert config.file == file
    assert parse("lake: s3://bucket/lake", HERE).lake == "s3://bucket/lake"


def test_the_option_comes_before_the_variable_before_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("option", "variable", "vllm-slo"):
        (tmp_path / f"{name}.yaml").write_text(f"lake: {name}\n")
    monkeypatch.chdir(tmp_path)
    environment = {"VLLM_SLO_CONFIG": str(tmp_path / "variable.yaml")}
    assert find(str(tmp_path / "option.yaml"), environment).lake == str(tmp_path / "option")
    assert find(None, environment).lake == str(tmp_path / "variable")
    assert find(None, {}).lake == str(tmp_path / "vllm-slo")
    (tmp_path / "vllm-slo.yaml").unlink()
    assert find(None, {}) == Config()


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(ConfigError, match=r"absent\.yaml: cannot be read: No such file"):
        load(Path("absent.yaml"))
