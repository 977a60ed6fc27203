"""Refusals of one body, gathered by reason."""

from __future__ import annotations

from typing import Any

from vllm_slo.exporters.otlp.decoded import Refusal

NO_TRACE = bytes(16)
NO_SPAN = bytes(8)


class Refusals:
    """Counts refused spans by reason and keeps the words for the first of each."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}
        self._counts: dict[str, int] = {}

    def add(self, reason: str, detail: str, count: int = 1) -> None:
        """Count ``count`` more spans refused for ``reason``."""
        self._first.setdefault(reason, detail)
        self._counts[reason] = self._counts.get(reason, 0) + count

    def extend(self, others: list[Refusal]) -> None:
        """Add refusals gathered elsewhere."""
        for other in others:
            self.add(other.reason, other.detail, other.count)

    def list(self) -> list[Refusal]:
        """One ``Refusal`` a reason, in the order of first appearance."""
        return [Refusal(reason, self._counts[reason], detail) for reason, detail in self._first.items()]


def bad_id(span: Any) -> tuple[str, str] | None:
    """(reason, what is wrong) for the first unusable id of a protobuf span, None when all are good.

    Links may be all zero: the specification lets SDKs record a link whose target has no valid id.
    """
    trace_id, span_id, parent = span.trace_id, span.span_id, span.parent_span_id
    if len(trace_id) != 16 or trace_id == NO_TRACE:
        return "invalid_trace_id", _wrong("trace_id", trace_id, 16)
    if len(span_id) != 8 or span_id == NO_SPAN:
        return "invalid_span_id", _wrong("span_id", span_id, 8)
    if parent and len(parent) != 8:
        return "invalid_parent_span_id", f"parent_span_id has {len(parent)} bytes; none or 8 are needed"
    for position, link in enumerate(span.links):
        if len(link.trace_id) != 16:
            return "invalid_link_trace_id", _sized(f"links[{position}].trace_id", link.trace_id, 16)
        if len(link.span_id) != 8:
            return "invalid_link_span_id", _sized(f"links[{position}].span_id", link.span_id, 8)
    return None


def named(name: str) -> str:
    """A span name for a message: short, and left out when it is empty or not plain text."""
    return f" ({name[:80]!r})" if name and name.isprintable() else ""


def _wrong(field: str, value: bytes, size: int) -> str:
    if len(value) == size:
        return f"{field} is all zero; {size} bytes that are not all zero are needed"
    return _sized(field, value, size)


def _sized(field: str, value: bytes, size: int) -> str:
    return f"{field} has {len(value)} bytes; {size} are needed"
