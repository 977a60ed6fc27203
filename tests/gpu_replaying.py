"""Recorded GPUs in the place of NVML, and the page that the exporter makes of them."""

from __future__ import annotations

from pathlib import Path

import pynvml
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from vllm_slo.exporters.gpu.collector import GpuCollector
from vllm_slo.exporters.gpu.nvml import Nvml
from vllm_slo.exporters.gpu.recording import Replay
from vllm_slo.exporters.gpu.series import PREFIX
from vllm_slo.exporters.gpu.sources import NvmlSource, Source, open_nvml

HERE = Path(__file__).resolve().parent / "exporters" / "gpu"
RECORDINGS = {file.stem: file for file in sorted((HERE / "recordings").glob("*.json"))}
DCGM_PAGES = HERE / "dcgm_pages"

Samples = dict[tuple[str, ...], float]


def replayed(name: str) -> Nvml:
    """NVML that answers from a recording."""
    return Nvml(Replay.load(RECORDINGS[name], pynvml))


def source_of(name: str, *, processes: bool = False) -> NvmlSource:
    """The source over a recording, its time fixed."""
    source = open_nvml(processes=processes, limit_seconds=5.0, nvml=replayed(name))
    source._clock = lambda: 1_800_000_000.0
    return source


def page(source: Source | None) -> str:
    """What ``/metrics`` shows."""
    registry = CollectorRegistry()
    registry.register(GpuCollector(lambda: source))
    return generate_latest(registry).decode()


def samples(text: str, *labels: str) -> Samples:
    """Values by name (without prefix) and the values of these labels."""
    return {
        (sample.name.removeprefix(PREFIX), *(sample.labels[label] for label in labels if label in sample.labels)): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
