"""On PYTHONPATH of a vLLM under test: it says that it is a version nobody knows."""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

VERSION = "0.99.0"


class _Future(MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "vllm._version":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        loader: Loader | None = spec.loader
        assert loader is not None
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            module.__version__ = module.version = VERSION
            module.__version_tuple__ = module.version_tuple = (0, 99, 0)

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Future())
