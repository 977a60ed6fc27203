"""Engine samples that are new to the lake, for imports; the scraper's own are new by their time."""

from __future__ import annotations

import pyarrow as pa

from vllm_slo.analytics.lake import Lake
from vllm_slo.exporters.schema import ENGINE_SAMPLES

KEY = ("time", "source", "service_instance_id", "engine")


def add(lake: Lake, samples: pa.Table, writer: tuple[str, int]) -> int:
    """Append the samples whose time, source, instance and engine the lake does not have; how many that were.

    Appends with the application transaction ``writer``: a repeated call changes nothing and returns 0.
    """
    lake.refresh(ENGINE_SAMPLES.name)
    days = {str(day) for day in samples["day"].unique().to_pylist()}
    files = [file for file in lake.data_files(ENGINE_SAMPLES.name) if dict(file.partition)["day"] in days]
    known = _keys(lake.read(ENGINE_SAMPLES.name, files, list(KEY)))
    new: list[int] = []
    for position, key in enumerate(_rows(samples)):
        if key not in known:
            known.add(key)
            new.append(position)
    rows = samples.take(pa.array(new, pa.int64()))
    if rows.num_rows == 0:
        return 0
    return int(rows.num_rows) if lake.append(ENGINE_SAMPLES.name, rows, writer) else 0


def _keys(rows: pa.Table) -> set[tuple[object, ...]]:
    return set(_rows(rows))


def _rows(rows: pa.Table) -> list[tuple[object, ...]]:
    return list(zip(*(rows[name].to_pylist() for name in KEY), strict=True))
