"""What every command is handed: where the lake is and what the configuration says, read only when asked for."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_slo.analytics.lake import Lake
    from vllm_slo.analytics.query import Reader
    from vllm_slo.config import Config

PROGRAM = "vllm-slo"
LAKE_VARIABLE = "VLLM_SLO_LAKE"
CONFIG_VARIABLE = "VLLM_SLO_CONFIG"
SPOOL_VARIABLE = "VLLM_SLO_SPOOL"
"""Tells the pages where the receiver that started them keeps its spool."""


@dataclass
class Invocation:
    """The global options of one command line."""

    lake_option: str | None = None
    config_option: str | None = None

    @cached_property
    def config(self) -> Config:
        """The configuration: --config, else VLLM_SLO_CONFIG, else ./vllm-slo.yaml, else the defaults."""
        from vllm_slo.config import find

        return find(self.config_option)

    @property
    def lake_location(self) -> str:
        """Absolute path or URL of the lake: --lake, else VLLM_SLO_LAKE, else the configuration, else ./lake."""
        location = self.lake_option or self.config.lake
        return location if "://" in location else str(Path(location).absolute())

    def open_lake(self, *, create: bool) -> Lake:
        """The lake; without ``create`` a missing one is an error that says how to make one."""
        from vllm_slo.analytics.lake import Lake

        return Lake.open(self.lake_location, create=create)

    def reader(self) -> Reader:
        """A read-only SQL view of the lake with the configured buckets and limits."""
        from vllm_slo.analytics.query import Reader

        return Reader(self.open_lake(create=False), self.config.bucket_settings(), self.config.query_settings())

    def export_environment(self) -> dict[str, str]:
        """The environment for a child process that must see the same lake and configuration."""
        chosen = {**os.environ, LAKE_VARIABLE: self.lake_location}
        if self.config.file is not None:
            chosen[CONFIG_VARIABLE] = str(self.config.file)
        return chosen
