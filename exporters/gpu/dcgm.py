"""The page of a DCGM exporter -> the same readings as from NVML, in base units.

A GPU that is cut by MIG is told once for each instance: memory and activity are the instance's, everything else is the
GPU's own. Where several pods share a GPU its values are repeated with the pods as labels; the first is taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from vllm_slo.exporters.gpu.reading import Gpu, Instance, Reading
from vllm_slo.exporters.gpu.series import SERIES, Field, Series, scaled

XID = ("DCGM_FI_DEV_XID_ERRORS", "DCGM_FI_DEV_XID_ERROR")
OFF_THE_BUS = 79
"""XID 79: the GPU has fallen off the bus (docs.nvidia.com/deploy/xid-errors)."""

_BLANKS = (0x7FFFFFF0, 2.0**47)
"""DCGM's values for "none", "not supported" and so on: each of these and the 15 above it (dcgm_structs.h)."""
_BLANK_INT64 = float(0x7FFFFFFFFFFFFFF0)
_DRIVER = ("DCGM_FI_DRIVER_VERSION", "DCGM_FI_SYSTEM_DRIVER_VERSION")

_Fields = dict[str, list[tuple[Series, Field]]]


@dataclass
class _Found:
    """What the page says of one GPU, as far as it was read."""

    uuid: str
    name: str
    driver: str
    lost: bool = False
    values: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    instances: dict[str, Instance] = field(default_factory=dict)


def _by_field() -> _Fields:
    fields: _Fields = {}
    for series in SERIES:
        for wanted in series.dcgm:
            for name in wanted.names:
                fields.setdefault(name, []).append((series, wanted))
    return fields


FIELDS: _Fields = _by_field()


def read_page(text: str) -> tuple[Gpu, ...]:
    """The GPUs of a page, by index; none when it has no DCGM series. Raises ValueError when it is no page at all."""
    found: dict[str, _Found] = {}
    for name, labels, value in _samples(text):
        index = labels.get("gpu")
        if index is None or not name.startswith("DCGM_"):
            continue
        gpu = found.setdefault(index, _Found(_uuid(labels), labels.get("modelName", ""), _driver(labels)))
        if name in XID and value == OFF_THE_BUS:
            gpu.lost = True
        if not _blank(value):
            _take(gpu, name, labels, value)
    return tuple(_gpu(index, found[index]) for index in sorted(found, key=lambda text: (len(text), text)))


def _samples(text: str) -> Iterator[tuple[str, dict[str, str], float]]:
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # The parser gives counters the name with _total; DCGM's names have none.
            name = sample.name if sample.name in FIELDS else sample.name.removesuffix("_total")
            yield name, sample.labels, float(sample.value)


def _take(gpu: _Found, name: str, labels: dict[str, str], value: float) -> None:
    number = labels.get("GPU_I_ID", "")
    if number:
        gpu.instances.setdefault(number, Instance(number, labels.get("GPU_I_PROFILE", "")))
    for series, wanted in FIELDS.get(name, ()):
        own_memory = any(other.scope == "mig" for other, _ in FIELDS[name])
        if series.scope == "mig" and number:
            of: tuple[str, ...] = (number, gpu.instances[number].profile)
        elif series.scope == "gpu" and not (number and own_memory):
            of = ()
        else:
            continue
        told = float(bool(int(value) & wanted.bit)) if wanted.bit is not None else scaled(value, wanted.scale)
        gpu.values.setdefault((series.name, of + wanted.labels), told)


def _gpu(index: str, found: _Found) -> Gpu:
    readings = tuple(Reading(name, value, labels) for (name, labels), value in found.values.items())
    return Gpu(
        index,
        found.uuid,
        found.name,
        () if found.lost else readings,
        () if found.lost else tuple(found.instances.values()),
        lost=found.lost,
        driver_version=found.driver,
    )


def _uuid(labels: dict[str, str]) -> str:
    return labels.get("UUID") or labels.get("uuid") or ""


def _driver(labels: dict[str, str]) -> str:
    return next((labels[name] for name in _DRIVER if name in labels), "")


def _blank(value: float) -> bool:
    return value >= _BLANK_INT64 or any(blank <= value <= blank + 15 for blank in _BLANKS)
