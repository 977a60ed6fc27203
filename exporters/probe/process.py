"""What the parts of the probe in one process share: settings, outbox, and vLLM's configuration once it is known."""

from __future__ import annotations

import os
import weakref
from functools import partial
from typing import Any

from vllm_slo.exporters.probe.outbox import Outbox
from vllm_slo.exporters.probe.settings import Settings
from vllm_slo.exporters.probe.spans import Sender, sender
from vllm_slo.exporters.probe.versions import Version


class Process:
    """One process of a vLLM server. The outbox sends once the first record comes, so after ``knows``."""

    def __init__(self, settings: Settings, row: Version, vllm_version: str) -> None:
        self.settings = settings
        self.row = row
        self.vllm_version = vllm_version
        self.vllm_config: Any = None
        self.kind = "unknown"
        self.outbox = Outbox(settings, self._exporter)
        os.register_at_fork(after_in_child=partial(_forget, weakref.ref(self)))

    def knows(self, vllm_config: Any, kind: str) -> None:
        """vLLM's configuration, and what this process is; the first to know wins."""
        if self.vllm_config is None:
            self.vllm_config, self.kind = vllm_config, kind

    def described(self) -> dict[str, str]:
        """What of the settings may be told: bounds and classes."""
        settings = self.settings
        buckets = ",".join(name if bound is None else f"{name}={bound}" for name, bound in settings.buckets)
        return {"buckets": buckets, "priorities": ",".join(str(bound) for bound in settings.priority_classes)}

    def _exporter(self) -> Sender:
        return sender(self.settings, self.vllm_config, self.kind)()


def _forget(process: weakref.ref[Process]) -> None:
    """A forked engine core is no API server."""
    if (one := process()) is not None:
        one.vllm_config, one.kind = None, "unknown"
