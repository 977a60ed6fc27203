"""Engine samples that are new to the lake: imported ones and the probe's; the scraper's own are new by their time."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from vllm_slo.analytics.lake import Lake
from vllm_slo.exporters.schema import ENGINE_SAMPLES

KEY = ("time", "source", "service_instance_id", "engine")


def add(lake: Lake, samples: pa.Table, writer: tuple[str, int]) -> int:
    """Append the samples whose time, source, instance and engine the lake does not have; how many that were.

    Appends with the application transaction ``writer``: a repeated call changes nothing and returns 0.
    """
    if samples.num_rows == 0:
        return 0
    lake.refresh(ENGINE_SAMPLES.name)
    days = {str(day) for day in samples["day"].unique().to_pylist()}
    extremes = pc.min_max(samples["time"])
    low, high = extremes["min"].as_py(), extremes["max"].as_py()
    files = [
        file
        for file in lake.data_files(ENGINE_SAMPLES.name)
        if dict(file.partition)["day"] in days
        and (file.low is None or file.high is None or (file.low <= high and file.high >= low))
    ]
    there = lake.read(ENGINE_SAMPLES.name, files, list(KEY))
    times = samples["time"].unique()
    known = set(_rows(there.filter(pc.is_in(there["time"], value_set=times))))
    new: list[int] = []
    for position, key in enumerate(_rows(samples)):
        if key not in known:
            known.add(key)
            new.append(position)
    rows = samples.take(pa.array(new, pa.int64()))
    if rows.num_rows == 0:
        return 0
    return int(rows.num_rows) if lake.append(ENGINE_SAMPLES.name, rows, writer) else 0


def _rows(rows: pa.Table) -> list[tuple[object, ...]]:
    return list(zip(*(rows[name].to_pylist() for name in KEY), strict=True))
