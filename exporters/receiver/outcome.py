"""What a sender is told about one body; plain data, the same for gRPC and HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_slo.exporters.otlp.decoded import Refusal

_MESSAGE_CHARACTERS = 1000


@dataclass(frozen=True)
class Accepted:
    """On disk. ``refused`` spans were left out: a partial success."""

    refused: tuple[Refusal, ...] = ()

    @property
    def rejected_spans(self) -> int:
        """Spans left out."""
        return sum(refusal.count for refusal in self.refused)

    @property
    def message(self) -> str:
        """What was left out and why, of bounded length."""
        text = "; ".join(f"{refusal.count} refused ({refusal.reason}): {refusal.detail}" for refusal in self.refused)
        return bounded(text)


@dataclass(frozen=True)
class Unusable:
    """Nothing of the body can be used; sending it again will not help."""

    reason: str
    message: str


@dataclass(frozen=True)
class PushedBack:
    """Nothing was kept; the sender should come again after ``retry_seconds``. ``cause`` is a counter label."""

    cause: str
    message: str
    retry_seconds: float


Outcome = Accepted | Unusable | PushedBack

ALL_ACCEPTED = Accepted()
STOPPING = "stopping"
"""Cause of being pushed back while the receiver shuts down."""


def bounded(text: str) -> str:
    """``text``, cut so that it fits into a reply."""
    return text if len(text) <= _MESSAGE_CHARACTERS else text[: _MESSAGE_CHARACTERS - 1] + "…"
