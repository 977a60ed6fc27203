"""Which bodies may be decoded together: those whose every top-level field ends inside themselves."""

from __future__ import annotations

from vllm_slo.exporters.otlp.groups import bounds


def joinable(body: bytes) -> bool:
    """Whether ``body`` is nothing but whole ``resource_spans`` fields.

    Such bodies, concatenated, mean exactly what they mean apart. One that ends inside a field would swallow the start
    of its successor, so it must be decoded alone.
    """
    return bounds(body) is not None
