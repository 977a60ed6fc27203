"""What decoding a body gives: rows, refusals, and the body as it may be kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_slo.exporters.conventions import PROMPT_TEXT_ATTRIBUTES
from vllm_slo.exporters.errors import SloError

if TYPE_CHECKING:
    import pyarrow as pa

    from vllm_slo.exporters.otlp.lot import Lot

BODY_REASONS: dict[str, str] = {
    "malformed_protobuf": "Not even the outermost level is protobuf: another format, or a cut transfer.",
    "malformed_json": "Not JSON: cut, invalid UTF-8, nested without end.",
    "wrong_type": "JSON with something else where an object or a list is needed on the way to the spans.",
    "no_resource_spans": "A JSON object without `resourceSpans`: logs, metrics or something else.",
}
"""Reason -> meaning, for bodies that are refused whole."""

REFUSAL_REASONS: dict[str, str] = {
    "invalid_trace_id": "The trace id is not 16 bytes (32 hex digits), or all zero.",
    "invalid_span_id": "The span id is not 8 bytes (16 hex digits), or all zero.",
    "invalid_parent_span_id": "The parent's id is there and not 8 bytes.",
    "invalid_link_trace_id": "The trace id of a link is not 16 bytes.",
    "invalid_link_span_id": "The span id of a link is not 8 bytes.",
    "malformed_span": "The span is not valid protobuf: invalid UTF-8, a cut field, nested more than 100 messages deep.",
    "malformed_group": "The resource or the scope of the spans is not valid protobuf.",
    "wrong_type": "A field of the JSON span, of its resource or of its scope has another type or is out of range.",
    "unknown_enum": "The JSON span has a kind or a status with an unknown name.",
    "too_deep": "An attribute of the JSON span is nested too deep.",
}
"""Reason -> meaning, for spans that are refused alone."""


class BodyError(SloError):
    """The whole body is unusable; ``reason`` is the counter label."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class Refusal:
    """``count`` spans left out for one reason (a short snake_case counter label); ``detail`` names the first."""

    reason: str
    count: int
    detail: str


@dataclass(frozen=True)
class ShardRule:
    """Resources whose ``attribute`` matches ``pattern`` (shell style) belong to ``shard``."""

    attribute: str
    pattern: str
    shard: str


@dataclass(frozen=True)
class DecodeSettings:
    """What the decoders must know of the configuration; ``models`` maps a service instance to its model."""

    prompt_text_attributes: tuple[str, ...] = PROMPT_TEXT_ATTRIBUTES
    shard_rules: tuple[ShardRule, ...] = ()
    models: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Decoded:
    """Rows of one body.

    ``clean_body`` holds the accepted spans without prompt text; it is the object that came in when nothing changed.
    ``dropped_attributes`` counts the attributes removed, by key pattern.
    """

    lot: Lot
    clean_body: bytes
    refused: list[Refusal] = field(default_factory=list)
    dropped_attributes: dict[str, int] = field(default_factory=dict)

    @property
    def requests(self) -> pa.Table:
        """Rows of ``requests``."""
        return self.lot.requests

    @property
    def spans(self) -> pa.Table:
        """Rows of ``spans``."""
        return self.lot.spans

    @property
    def rows(self) -> int:
        """Accepted spans."""
        return self.lot.rows


Decoder = Callable[[bytes, int, DecodeSettings], Decoded]
"""(OTLP protobuf body, time of receipt in epoch nanoseconds, settings) -> Decoded; raises BodyError."""
