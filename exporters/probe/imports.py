"""Calls a function once a module has been imported, at once if it is there already."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_waiting: dict[str, list[Callable[[], None]]] = {}


def when_imported(module: str, callback: Callable[[], None]) -> None:
    """``callback`` must not raise; it runs in the thread that imports, after the module has been executed."""
    there = sys.modules.get(module)
    if there is not None and not getattr(getattr(there, "__spec__", None), "_initializing", False):
        callback()
        return
    _waiting.setdefault(module, []).append(callback)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds nothing itself: wraps the loader that the others find for a module that is waited for."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _waiting:
            return None
        callbacks = _waiting.pop(fullname)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            _waiting[fullname] = callbacks
            return None
        spec.loader = _Loader(spec.loader, callbacks)
        return spec


class _Loader(Loader):
    """The loader of the module, and the callbacks afterwards."""

    def __init__(self, loader: Any, callbacks: list[Callable[[], None]]) -> None:
        self._loader = loader
        self._callbacks = callbacks

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The module keeps its own loader: whoever asks it for source or data gets them.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        try:
            self._loader.exec_module(module)
        except BaseException:
            # Whoever imports it again, maybe with success, is told.
            _waiting.setdefault(module.__name__, []).extend(self._callbacks)
            raise
        for callback in self._callbacks:
            callback()
