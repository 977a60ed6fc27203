"""Readings -> metric families: what ``/metrics`` of the GPU exporter shows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from vllm_slo import __version__
from vllm_slo.exporters.gpu.reading import Gpu
from vllm_slo.exporters.gpu.series import DEVICE_LABELS, INSTANCE_LABELS, PREFIX, SERIES
from vllm_slo.exporters.gpu.sources import Failure, Source

_INSTANCE_INFO = (*INSTANCE_LABELS, "compute_instance", "mig_uuid")

OWN: dict[str, tuple[str, tuple[str, ...], str]] = {
    "info": ("gauge", (*DEVICE_LABELS, "source", "driver_version"), "1; where the GPU's values come from."),
    "mig_info": ("gauge", (*DEVICE_LABELS, *_INSTANCE_INFO), "1 for each MIG device; `mig_uuid` is what CUDA names."),
    "lost": ("gauge", DEVICE_LABELS, "1 when the GPU fell off the bus, with no other value of it; else 0."),
    "stale": ("gauge", DEVICE_LABELS, "1 when the source did not answer in time and these are older values; else 0."),
    "read_timestamp_seconds": ("gauge", DEVICE_LABELS, "When the values were read."),
    "read_errors_total": (
        "counter",
        (*DEVICE_LABELS, "function", "error"),
        "Readings that failed, though the GPU supports them.",
    ),
    "exporter_info": ("gauge", ("version", "source"), "1; source is nvml, dcgm or none."),
    "exporter_gpus": ("gauge", (), "GPUs that are read."),
}
"""Series beside ``series.SERIES``: kind, labels, help."""


class GpuCollector(Collector):
    """Reads the source at each scrape. ``source`` gives None while there is none yet."""

    def __init__(self, source: Callable[[], Source | None]) -> None:
        self._source = source

    def describe(self) -> Iterator[Metric]:
        """Nothing: registering must not collect."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Every family that has a sample; without GPUs there are none but the exporter's own."""
        source = self._source()
        if source is None:
            yield from families((), "none", {})
        else:
            yield from families(source.read(), source.name, source.failures())


def families(gpus: Iterable[Gpu], source: str, failures: dict[Failure, int]) -> Iterator[Metric]:
    """The families of these GPUs. A family without a sample is left out."""
    gpus = tuple(gpus)
    own = {name: _family(name, kind, labels, text) for name, (kind, labels, text) in OWN.items()}
    read = {series.name: _family(series.name, series.kind, series.all_labels, series.help) for series in SERIES}
    for gpu in gpus:
        own["info"].add_metric([*gpu.identity, source, gpu.driver_version], 1)
        own["lost"].add_metric(gpu.identity, float(gpu.lost))
        own["stale"].add_metric(gpu.identity, float(gpu.stale))
        if gpu.read_time:
            own["read_timestamp_seconds"].add_metric(gpu.identity, gpu.read_time)
        for instance in gpu.instances:
            of = (instance.gpu_instance, instance.profile, instance.compute_instance, instance.uuid)
            own["mig_info"].add_metric([*gpu.identity, *of], 1)
        for reading in gpu.readings:
            read[reading.series].add_metric([*gpu.identity, *reading.labels], reading.value)
    for (identity, function, error), count in sorted(failures.items()):
        own["read_errors_total"].add_metric([*identity, function, error], count)
    own["exporter_info"].add_metric([__version__, source], 1)
    own["exporter_gpus"].add_metric([], len(gpus))
    for family in (*read.values(), *own.values()):
        if family.samples:
            yield family


def _family(name: str, kind: str, labels: tuple[str, ...], text: str) -> GaugeMetricFamily | CounterMetricFamily:
    if kind == "counter":
        return CounterMetricFamily(PREFIX + name.removesuffix("_total"), text, labels=labels)
    return GaugeMetricFamily(PREFIX + name, text, labels=labels)


def tables() -> str:
    """The series as rows of Markdown: name, type, labels, meaning, and where they come from."""
    head = ("series", "type", "labels", "says", "NVML", "DCGM")
    rows = [head, tuple("---" for _ in head)]
    for series in SERIES:
        functions = dict.fromkeys(f"`{ask.function}`" for ask in series.nvml)
        fields = dict.fromkeys(f"`{wanted.names[0]}`" for wanted in series.dcgm)
        source = (", ".join(functions) or "–", ", ".join(fields) or "–")
        rows.append((f"`{PREFIX}{series.name}`", series.kind, _code(series.all_labels), series.help, *source))
    rows += [(f"`{PREFIX}{name}`", kind, _code(labels), text, "", "") for name, (kind, labels, text) in OWN.items()]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _code(labels: tuple[str, ...]) -> str:
    return ", ".join(f"`{label}`" for label in labels)
