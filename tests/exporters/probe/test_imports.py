"""Callbacks after an import."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pytest

from vllm_slo.exporters.probe.imports import when_imported


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return tmp_path


def test_a_module_that_is_there_is_told_at_once() -> None:
    calls: list[str] = []
    when_imported("json", lambda: calls.append("json"))
    assert calls == ["json"]


def test_a_later_import_is_told_once_after_the_module_has_run(folder: Path) -> None:
    (folder / "later_one.py").write_text("value = 3\n")
    calls: list[int] = []
    when_imported("later_one", lambda: calls.append(sys.modules["later_one"].value))
    when_imported("later_one", lambda: calls.append(sys.modules["later_one"].value + 1))
    assert calls == []
    module = importlib.import_module("later_one")
    importlib.import_module("later_one")
    assert calls == [3, 4]
    assert "value = 3" in inspect.getsource(module)


def test_a_module_that_does_not_exist_is_as_missing_as_before(folder: Path) -> None:
    when_imported("never_there", lambda: None)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("never_there")


def test_a_module_that_fails_is_not_told(folder: Path) -> None:
    (folder / "later_broken.py").write_text("raise ValueError('no')\n")
    calls: list[str] = []
    when_imported("later_broken", lambda: calls.append("called"))
    with pytest.raises(ValueError, match="no"):
        importlib.import_module("later_broken")
    assert calls == []


def test_a_module_that_fails_first_is_told_when_it_no_longer_does(folder: Path) -> None:
    (folder / "later_mended.py").write_text("import os\nif not os.path.exists(__file__ + '.ok'): raise ImportError\n")
    calls: list[str] = []
    when_imported("later_mended", lambda: calls.append("called"))
    with pytest.raises(ImportError):
        importlib.import_module("later_mended")
    (folder / "later_mended.py.ok").touch()
    importlib.import_module("later_mended")
    assert calls == ["called"]
