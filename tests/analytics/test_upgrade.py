"""Lakes of other schema versions: older ones are brought up to date with their data, newer ones refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from lake_rows import requests
from vllm_slo.analytics.lake import Lake
from vllm_slo.analytics.upgrade import VERSION_PROPERTY, upgrade
from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.schema import REQUESTS, SCHEMA_VERSION, TABLES, Column, Table

ADDED = ("tenant", "preemptions", "decode_seconds")
OLDER = tuple(
    replace(t, columns=tuple(c for c in t.columns if c.name not in ADDED)) if t is REQUESTS else t for t in TABLES
)
NEXT_VERSION = SCHEMA_VERSION + 1
NEWEST = replace(
    REQUESTS, columns=(*REQUESTS.columns, Column("watermark", pa.int64(), "Of a later version.", since=NEXT_VERSION))
)


def _with(table: Table) -> tuple[Table, ...]:
    return tuple(table if t.name == table.name else t for t in TABLES)


def _old_lake(path: Path) -> None:
    lake = Lake.open(path, tables=OLDER, version=0)
    lake.append("requests", requests(range(3)).drop_columns(list(ADDED)), ("spool", 1))


def _stored(lake: Lake) -> pa.Table:
    lake.refresh("requests")
    return lake.read("requests", lake.data_files("requests")).sort_by("start_time")


def _version(path: Path) -> str | None:
    return DeltaTable(path / "requests").metadata().configuration.get(VERSION_PROPERTY)


def test_an_older_lake_gets_the_new_columns_and_keeps_its_rows(tmp_path: Path) -> None:
    _old_lake(tmp_path)
    lake = Lake.open(tmp_path)
    assert not lake.append("requests", requests(range(3)), ("spool", 1))
    lake.append("requests", requests(range(3, 5)), ("spool", 2))
    stored = _stored(lake)
    assert stored.schema.names[:3] == REQUESTS.schema.names[:3]
    assert stored["decode_seconds"].null_count == 3
    assert stored.drop_columns(list(ADDED)).equals(requests(range(5)).drop_columns(list(ADDED)))
    through_delta = pa.table(DeltaTable(tmp_path / "requests").scan().read_all())
    assert (through_delta.num_rows, through_delta["decode_seconds"].null_count) == (5, 3)


def test_two_steps_lead_to_the_newest_version(tmp_path: Path) -> None:
    _old_lake(tmp_path)
    Lake.open(tmp_path)
    assert _version(tmp_path) == str(SCHEMA_VERSION)
    lake = Lake.open(tmp_path, tables=_with(NEWEST), version=NEXT_VERSION)
    rows = requests([7]).append_column(pa.field("watermark", pa.int64()), pa.array([4]))
    lake.append("requests", rows)
    stored = _stored(lake)
    assert stored["watermark"].to_pylist() == [None, None, None, 4]


def test_the_version_outlives_checkpoints(tmp_path: Path) -> None:
    _old_lake(tmp_path)
    lake = Lake.open(tmp_path)
    lake.with_handle("requests", lambda handle: handle.create_checkpoint())
    for number in range(25):
        lake.append("requests", requests([100 + number]), ("spool", 100 + number))
    assert _version(tmp_path) == str(SCHEMA_VERSION)
    Lake.open(tmp_path)


def test_an_upgrade_cut_short_is_finished_by_the_next_opening(tmp_path: Path) -> None:
    _old_lake(tmp_path)
    cut_short = DeltaTable(tmp_path / "requests")
    upgrade(cut_short, REQUESTS, 0)
    assert _version(tmp_path) == "0"
    Lake.open(tmp_path)
    assert _version(tmp_path) == str(SCHEMA_VERSION)
    assert [f.name for f in DeltaTable(tmp_path / "requests").schema().fields].count("tenant") == 1


def test_compaction_works_across_the_versions(tmp_path: Path) -> None:
    _old_lake(tmp_path)
    lake = Lake.open(tmp_path)
    lake.append("requests", requests(range(3, 5)), ("spool", 2))
    lake.refresh("requests")
    files = lake.data_files("requests")
    assert len(files) == 2
    merged = lake.replace("requests", files, lake.read("requests", files, dictionaries=True), same_rows=True)
    assert lake.read("requests", merged)["decode_seconds"].null_count == 3


def test_a_reader_reads_an_older_lake_as_it_is(tmp_path: Path) -> None:
    _old_lake(tmp_path)
    reader = Lake.open(tmp_path, create=False)
    assert reader.read("requests", reader.data_files("requests"))["tenant"].null_count == 3
    assert _version(tmp_path) == "0"


@pytest.mark.parametrize("create", [True, False])
def test_a_newer_lake_is_refused_with_the_cure_and_left_alone(tmp_path: Path, create: bool) -> None:
    Lake.open(tmp_path, tables=_with(NEWEST)[:2], version=NEXT_VERSION)
    told = f"schema version {NEXT_VERSION}, this vllm-slo knows {SCHEMA_VERSION}; upgrade vllm-slo"
    with pytest.raises(SloError, match=told):
        Lake.open(tmp_path, create=create)
    assert not (tmp_path / "rollups").exists()
