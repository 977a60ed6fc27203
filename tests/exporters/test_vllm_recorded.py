"""Saved metrics pages."""

from __future__ import annotations

import gzip
import os
from datetime import UTC, datetime
from pathlib import Path

import pytest

from vllm_slo.exporters.errors import SloError
from vllm_slo.exporters.schema import ENGINE_SAMPLES
from vllm_slo.exporters.vllm.recorded import pages, samples_from_folder

PAGE = 'vllm:generation_tokens_total{engine="0",model_name="m"} 7\n'


def test_a_recording_gives_one_row_a_page_and_the_configuration_once(captures: Path) -> None:
    folder = captures / "smallkv" / "metrics-general-0"
    rows, events = samples_from_folder(folder, "general-0", "general")
    assert rows.schema.equals(ENGINE_SAMPLES.schema)
    assert rows.num_rows == len(list(folder.iterdir()))
    assert rows["time"].to_pylist() == sorted(rows["time"].to_pylist())
    assert set(rows["service_instance_id"].to_pylist()) == {"general-0"}
    finished = rows["requests_finished_total"].to_pylist()
    assert finished == sorted(finished)
    assert rows["preemptions_total"].to_pylist()[-1] == 4
    assert [(event["kind"], event["source"]) for event in events] == [("configuration", "import")]


def test_the_same_recording_gives_the_same_rows_and_ids(captures: Path) -> None:
    folder = captures / "light" / "metrics-general-1"
    first, second = (samples_from_folder(folder, "general-1") for _ in range(2))
    assert first[0].equals(second[0])
    assert first[1] == second[1]


def test_files_are_read_in_order_of_time_whatever_their_length_and_others_are_passed_over(tmp_path: Path) -> None:
    (tmp_path / "1796076931.txt").write_text(PAGE)
    (tmp_path / "999999999.5.txt.gz").write_bytes(gzip.compress(PAGE.encode()))
    (tmp_path / "notes.txt").write_text("not a page")
    assert [when.timestamp() for when, _ in pages(tmp_path)] == [999999999.5, 1796076931]


def test_a_single_page_with_any_name_is_dated_by_when_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "page.txt"
    file.write_text(PAGE)
    os.utime(file, (1796076931, 1796076931))
    rows, _ = samples_from_folder(file, "a")
    assert rows["time"].to_pylist() == [datetime.fromtimestamp(1796076931, UTC)]
    assert rows["generation_tokens_total"].to_pylist() == [7]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("1796076931.txt.gz", b"not gzip", "cannot be read"),
        ("1796076931.txt.gz", gzip.compress(PAGE.encode() * 1000)[:40], "cannot be read"),
        ("other.txt", b"", "no file named"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SloError, match=said):
        samples_from_folder(tmp_path, "a")


def test_an_absent_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SloError, match=r"nowhere: absent"):
        samples_from_folder(tmp_path / "nowhere", "a")
