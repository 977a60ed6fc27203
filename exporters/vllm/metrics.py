"""One ``/metrics`` page of a vLLM server -> rows of ``engine_samples`` and the configuration it shows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import UTC, datetime

import pyarrow as pa

from vllm_slo.exporters.schema import ENGINE_SAMPLES
from vllm_slo.exporters.vllm.names import COLUMN_SOURCES, PROCESS_START, SERIES, ColumnSource
from vllm_slo.exporters.vllm.page import Page, Sample, parse

Key = tuple[str | None, str | None]
"""(model, engine)"""

_SUFFIXES = {"value": ("", "_total"), "label": ("",), "sum": ("_sum",), "count": ("_count",)}
_COUNTED_PER_SERVER = frozenset({"admission_rejections"})
_HISTOGRAMS = tuple(series.name for series in SERIES if series.kind == "histogram")


@dataclass(frozen=True)
class Target:
    """One server to scrape: ``url`` of its metrics page, ``instance`` as in the spans' ``service.instance.id``."""

    url: str
    instance: str
    shard: str | None = None


@dataclass(frozen=True)
class Scrape:
    """What one page gave.

    ``rows`` has exactly the columns of ENGINE_SAMPLES, one row per model and engine; none without vLLM's series.
    ``configuration`` is flat text: ``vllm_version``, ``models``, ``cache.<engine>.<label>``, ``bounds.<histogram>``.
    """

    rows: pa.Table
    configuration: dict[str, str]
    process_start: datetime | None
    page: Page


def read(text: str, when: datetime, target: Target, version: str | None = None) -> Scrape:
    """The rows and the configuration of one page. Never raises for what the page holds.

    A series that is absent, or NaN, is null and never 0.
    Samples of one series that differ only in labels other than model and engine (finish reasons, Ray workers) add up;
    a usage ratio is the highest of them.
    Under Ray the engine is ``<replica>/<engine>``: each replica numbers its engines from 0.
    A counter without an ``engine`` label is kept on the first engine of the model, so that sums over engines are right.
    """
    page = parse(text)
    start = _process_start(page)
    keys = _keys(page)
    columns: dict[str, list[object]] = {name: [None] * len(keys) for name in ENGINE_SAMPLES.schema.names}
    for source in COLUMN_SOURCES:
        columns[source.column] = list(_column(page, source, keys))
    at = when.astimezone(UTC)
    columns |= {
        "day": [at.date()] * len(keys),
        "time": [at] * len(keys),
        "source": ["scrape"] * len(keys),
        "service_instance_id": [target.instance] * len(keys),
        "shard": [target.shard] * len(keys),
        "model": [model for model, _ in keys],
        "engine": [engine for _, engine in keys],
        "vllm_version": [version] * len(keys),
        "process_start_time": [start] * len(keys),
    }
    rows = pa.table(columns, schema=ENGINE_SAMPLES.schema)
    return Scrape(rows, _configuration(page, keys, version), start, page)


def _process_start(page: Page) -> datetime | None:
    seconds = page.value(PROCESS_START)
    if seconds is None or not 0 < seconds < 253402300800:  # year 10000, where datetime ends
        return None
    return datetime.fromtimestamp(seconds, UTC)


def _engine(sample: Sample) -> str | None:
    engine = sample.labels.get("engine")
    replica = sample.labels.get("ReplicaId")
    return f"{replica}/{engine or 0}" if replica else engine


def _keys(page: Page) -> list[Key]:
    found = {
        (sample.labels["model_name"], _engine(sample))
        for name, samples in page.samples.items()
        if name not in _COUNTED_PER_SERVER
        for sample in samples
        if "model_name" in sample.labels
    }
    return sorted(found, key=lambda key: (key[0], key[1] or ""))


def _column(page: Page, source: ColumnSource, keys: list[Key]) -> list[float | None]:
    values: dict[Key, list[float]] = {}
    for sample in page.of(source.series, _SUFFIXES[source.part]):
        if source.where is not None and sample.labels.get(source.where[0]) not in source.where[1]:
            continue
        value = _number(sample.labels.get(source.label)) if source.part == "label" else sample.value
        if math.isnan(value):
            continue
        for key in _meant(sample, source, keys):
            values.setdefault(key, []).append(value)
    combine = max if source.part == "label" or source.column.endswith("_ratio") else math.fsum
    return [combine(values[key]) if key in values else None for key in keys]


def _meant(sample: Sample, source: ColumnSource, keys: list[Key]) -> list[Key]:
    """The rows a sample belongs to."""
    model, engine = sample.labels.get("model_name"), _engine(sample)
    if source.part == "label":  # cache_config_info names no model, and before data parallelism no engine
        return [key for key in keys if engine is None or key[1] in (engine, None)]
    if source.series in _COUNTED_PER_SERVER and engine is None:
        return [key for key in keys if key[0] == model][:1]
    return [key for key in keys if key == (model, engine)]


def _configuration(page: Page, keys: list[Key], version: str | None) -> dict[str, str]:
    found = {"vllm_version": version} if version is not None else {}
    if models := sorted({model for model, _ in keys if model is not None}):
        found["models"] = ", ".join(models)
    for sample in page.of("cache_config_info"):
        prefix = f"cache.{_engine(sample) or '0'}."
        found |= {prefix + label: text for label, text in sample.labels.items() if label not in ("engine", "ReplicaId")}
    for name in _HISTOGRAMS:
        if bounds := page.bounds(name):
            found[f"bounds.{name}"] = ", ".join(f"{bound:g}" for bound in bounds)
    return dict(sorted(found.items()))


def _number(text: str | None) -> float:
    try:
        return float(text or "")
    except ValueError:
        return math.nan
