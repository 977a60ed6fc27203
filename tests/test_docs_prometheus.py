"""What the documentation gives to Prometheus is accepted by Prometheus."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

DOCS = Path(__file__).resolve().parent.parent / "docs"
CONFIGURATIONS = [
    pytest.param(block, id=f"{page.stem}-{number}")
    for page in sorted(DOCS.glob("*.md"))
    for number, block in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL))
    if "scrape_configs:" in block
]


def test_the_probe_and_the_gpu_exporter_have_one() -> None:
    assert {"probe-0", "gpu-exporter-0"} <= {str(each.id) for each in CONFIGURATIONS}


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_promtool_accepts_the_configuration(configuration: str, tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not installed (Debian: prometheus)")
    file = tmp_path / "prometheus.yml"
    file.write_text(configuration)
    checked = subprocess.run([promtool, "check", "config", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_the_ports_are_those_that_the_code_listens_on(configuration: str) -> None:
    from vllm_slo.commands.gpu_exporter import DEFAULT_LISTEN
    from vllm_slo.exporters.probe.settings import Settings

    known = {"vllm-gpu": DEFAULT_LISTEN, "vllm-probe": f"127.0.0.1:{Settings.from_environment({}).metrics_port}"}
    for job in yaml.safe_load(configuration)["scrape_configs"]:
        if job["job_name"] in known:
            assert job["static_configs"][0]["targets"] == [known[job["job_name"]]]
