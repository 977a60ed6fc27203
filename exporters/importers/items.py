"""What a file is read into, one item after the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import pyarrow as pa

from vllm_slo.exporters.otlp.decoded import Refusal


@dataclass(frozen=True)
class Body:
    """An OTLP protobuf body; ``place`` says where in the file it was, ``refused`` what was lost on the way to it."""

    payload: bytes
    place: str
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True)
class Rows:
    """Rows in exactly the columns of one table of the schema, and what of them was refused or dropped."""

    table: str
    rows: pa.Table
    place: str
    refused: tuple[Refusal, ...] = ()
    dropped_attributes: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Unreadable:
    """A part of the file that is none of the forms; ``reason`` is a short snake_case label."""

    reason: str
    detail: str
    place: str


Item = Body | Rows | Unreadable
