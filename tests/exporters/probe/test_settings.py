"""The probe's environment variables: values, every fault at once, and the page that documents them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.probe.settings import Settings, SettingsError
from vllm_slo.exporters.probe.variables import OTHERS, VARIABLES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "probe-settings.md"


def page() -> str:
    """docs/probe-settings.md, generated."""
    rows = [f"| `{v.name}` | {f'`{v.default}`' if v.default else ''} | {v.meaning} |" for v in VARIABLES]
    return "\n".join(
        [
            "# Settings of the probe",
            "",
            "The probe runs inside the processes of a vLLM server and is configured by environment variables of that "
            "server. A wrong value switches the probe off: the server's log names every fault and the server runs on. "
            "vLLM may log at its start that it does not know these variables; that is harmless. This page is generated "
            "from `exporters/probe/variables.py`.",
            "",
            "| variable | default | meaning |",
            "| --- | --- | --- |",
            *rows,
            "",
            "## Variables of others that the probe reads",
            "",
            "| variable | what for |",
            "| --- | --- |",
            *(f"| `{name}` | {meaning} |" for name, meaning in OTHERS.items()),
            "",
        ]
    )


def test_every_variable_is_documented_with_its_default_and_meaning(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page(), "run pytest --rewrite-golden and read the diff"


def test_an_empty_environment_gives_the_documented_defaults() -> None:
    settings = Settings.from_environment({}, user_id=1000)
    assert settings.enabled is True
    assert settings.endpoint_for(None) == "http://127.0.0.1:4317"
    assert (settings.metrics_host, settings.metrics_port) == ("127.0.0.1", 9464)
    assert settings.buckets == (("short", 4096), ("medium", 32768), ("long", None))
    assert settings.priority_classes == (-1, 0)
    assert (settings.queue_size, settings.export_interval_seconds) == (10_000, 1.0)
    assert (settings.tenant_header, settings.tenant_hash) == (None, False)
    assert (settings.slo_file, settings.step_log) == (None, None)
    assert settings.runtime_dir == Path("/tmp/vllm-slo-1000")
    assert (settings.shard, settings.model, settings.instance) == (None, None, None)
    assert settings.resource == {"service.name": "vllm"}
    assert settings.random_ids is True


def test_every_variable_has_an_effect() -> None:
    other = {
        "VLLM_SLO_PROBE": "0",
        "VLLM_SLO_OTLP_ENDPOINT": "https://collector:4317",
        "VLLM_SLO_OTLP_PROTOCOL": "http/protobuf",
        "VLLM_SLO_METRICS_HOST": "0.0.0.0",
        "VLLM_SLO_METRICS_PORT": "0",
        "VLLM_SLO_FILE": "/etc/slos.yaml",
        "VLLM_SLO_BUCKETS": "a=1,b=2",
        "VLLM_SLO_PRIORITIES": "1,5,9",
        "VLLM_SLO_TENANT_HEADER": "X-Tenant",
        "VLLM_SLO_TENANT_HASH": "yes",
        "VLLM_SLO_TENANT_SALT": "a secret",
        "VLLM_SLO_STEP_LOG": "/tmp/steps",
        "VLLM_SLO_QUEUE_SIZE": "7",
        "VLLM_SLO_EXPORT_INTERVAL_SECONDS": "0.25",
        "VLLM_SLO_RUNTIME_DIR": "/run/probe",
    }
    assert other.keys() == {variable.name for variable in VARIABLES}
    default = Settings.from_environment({})
    for variable in VARIABLES:
        changed = Settings.from_environment({variable.name: other[variable.name]})
        assert getattr(changed, variable.field) != getattr(default, variable.field), variable.name
    assert Settings.from_environment(other).tenant_header == "x-tenant", "HTTP headers are compared in lower case"


WRONG = {
    "VLLM_SLO_PROBE": "maybe",
    "VLLM_SLO_OTLP_ENDPOINT": "ftp://collector",
    "VLLM_SLO_OTLP_PROTOCOL": "http/json",
    "VLLM_SLO_METRICS_HOST": "a b",
    "VLLM_SLO_METRICS_PORT": "abc",
    "VLLM_SLO_BUCKETS": "short=9,long=5",
    "VLLM_SLO_PRIORITIES": "1,2,3,4",
    "VLLM_SLO_TENANT_HEADER": "X Tenant",
    "VLLM_SLO_TENANT_HASH": "sha256",
    "VLLM_SLO_QUEUE_SIZE": "0",
    "VLLM_SLO_EXPORT_INTERVAL_SECONDS": "nan",
}


def test_every_fault_is_told_at_once_with_its_variable_and_the_cure() -> None:
    with pytest.raises(SettingsError) as caught:
        Settings.from_environment(WRONG)
    lines = str(caught.value).splitlines()
    assert isinstance(caught.value, SloError)
    assert "VLLM_SLO_METRICS_PORT: 'abc' is not a port; write 1 to 65535, or 0 for none" in lines
    assert len(lines) == len(WRONG)
    for name, value in WRONG.items():
        (line,) = [line for line in lines if line.startswith(f"{name}: {value!r} ")]
        assert "; write " in line


@pytest.mark.parametrize("value", ["-1", "65536", "1.5", ""])
def test_a_port_is_an_integer_of_the_range_and_an_empty_value_is_the_default(value: str) -> None:
    if value == "":
        assert Settings.from_environment({"VLLM_SLO_METRICS_PORT": value}).metrics_port == 9464
        return
    with pytest.raises(SettingsError, match="is not a port"):
        Settings.from_environment({"VLLM_SLO_METRICS_PORT": value})


@pytest.mark.parametrize("value", ["short=4096,,long", "a=1,a=2", "a,b=2", "a=0,b", "=5,b", "a=x,b", "a b=5"])
def test_buckets_that_are_no_ascending_list_of_names_are_refused(value: str) -> None:
    with pytest.raises(SettingsError, match="VLLM_SLO_BUCKETS"):
        Settings.from_environment({"VLLM_SLO_BUCKETS": value})


def test_a_misspelt_variable_is_a_fault_and_those_of_other_commands_are_none() -> None:
    with pytest.raises(SettingsError, match=r"VLLM_SLO_METRIC_PORT: no such variable; did you mean VLLM_SLO_METRICS_P"):
        Settings.from_environment({"VLLM_SLO_METRIC_PORT": "9000"})
    Settings.from_environment({"VLLM_SLO_LAKE": "/data", "VLLM_SLO_VLLM_PYTHON": "python", "VLLM_SLO_REQUIRE_VLLM": ""})


def test_records_go_where_vllm_sends_its_own_unless_told_otherwise() -> None:
    config = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint="grpc://collector:4317"))
    without = SimpleNamespace(observability_config=SimpleNamespace(otlp_traces_endpoint=None))
    own = {"VLLM_SLO_OTLP_ENDPOINT": "other:4317"}
    generic = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://agent:4318/"}
    traces = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://agent:4318/custom"}
    http = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    asked = [
        ({}, config, "grpc://collector:4317"),
        (own, config, "http://other:4317"),
        (traces, config, "grpc://collector:4317"),
        (generic, without, "http://agent:4318/"),
        ({**generic, **traces}, without, "http://agent:4318/custom"),
        ({**generic, **http}, without, "http://agent:4318/v1/traces"),
        ({**traces, **http}, without, "http://agent:4318/custom"),
        ({**own, **http}, without, "http://other:4317/v1/traces"),
        (http, None, "http://127.0.0.1:4318/v1/traces"),
    ]
    for environ, vllm_config, expected in asked:
        assert Settings.from_environment(environ).endpoint_for(vllm_config) == expected, (environ, vllm_config)


def test_the_protocol_is_vllms_own_unless_told_otherwise_and_a_wrong_one_is_a_fault() -> None:
    theirs = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    assert Settings.from_environment(theirs).protocol == "http/protobuf"
    assert Settings.from_environment({**theirs, "VLLM_SLO_OTLP_PROTOCOL": "grpc"}).protocol == "grpc"
    with pytest.raises(SettingsError, match="OTEL_EXPORTER_OTLP_TRACES_PROTOCOL: 'http/json' is not a protocol"):
        Settings.from_environment({"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"})


def test_the_resource_is_read_as_opentelemetry_reads_it() -> None:
    from opentelemetry.sdk.resources import OTELResourceDetector

    text = "vllm.shard=a%2Cb, service.instance.id = x ,broken,vllm.model=m=1,=nothing,service.name=other"
    settings = Settings.from_environment({"OTEL_RESOURCE_ATTRIBUTES": text})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_RESOURCE_ATTRIBUTES", text.replace(",broken", "").replace(",=nothing", ""))
        patch.delenv("OTEL_SERVICE_NAME", raising=False)
        assert dict(settings.resource) == dict(OTELResourceDetector().detect().attributes)
    assert (settings.shard, settings.instance, settings.model) == ("a,b", "x", "m=1")
    assert Settings.from_environment({"OTEL_SERVICE_NAME": "mine"}).resource["service.name"] == "mine"


def test_shard_and_model_are_the_resources_else_the_instance_and_the_served_name() -> None:
    settings = Settings.from_environment({"OTEL_RESOURCE_ATTRIBUTES": "service.instance.id=general-0"})
    assert settings.shard == "general-0"
    for served in ("tiny", ["tiny", "alias"]):
        config = SimpleNamespace(model_config=SimpleNamespace(served_model_name=served))
        assert settings.model_for(config) == "tiny"
        named = Settings.from_environment({"OTEL_RESOURCE_ATTRIBUTES": "vllm.model=m"})
        assert named.model_for(config) == "m"
    assert settings.model_for(None) is None


def test_what_processes_share_lies_in_the_users_own_runtime_folder() -> None:
    assert Settings.from_environment({"XDG_RUNTIME_DIR": "/run/user/5"}).runtime_dir == Path("/run/user/5/vllm-slo")
    assert Settings.from_environment({"TMPDIR": "/scratch"}, 7).runtime_dir == Path("/scratch/vllm-slo-7")
    assert Settings.from_environment({"VLLM_SLO_RUNTIME_DIR": "/x"}).runtime_dir == Path("/x")


def test_ids_without_random_suffix_are_known_by_vllms_own_switch() -> None:
    assert Settings.from_environment({"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"}).random_ids is False
