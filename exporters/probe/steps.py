"""A scheduled step, and who is told of what happens. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from vllm_slo.exporters.probe.life import Cell, Life


class Observer(Protocol):
    """Who is told as things happen; `meters.Meters` is one."""

    def scheduled(self, cell: Cell, queue_ns: int) -> None: ...
    def first_token(self, cell: Cell, ttft_ns: int, prefill_ns: int) -> None: ...
    def output_gap(self, gap_ns: int, decoding: Mapping[Cell, int]) -> None: ...
    def one_gap(self, cell: Cell, gap_ns: int) -> None: ...
    def finished(self, cell: Cell, reason: str, duration_ns: int, token_ns: int | None) -> None: ...
    def preempted(self, cell: Cell, reason: str, lost_tokens: int) -> None: ...
    def recomputed(self, tokens: int) -> None: ...
    def step(self, step_ns: int, end_ns: int) -> None: ...
    def empty_step(self, end_ns: int) -> None: ...


class Chunk(NamedTuple):
    """Prompt tokens (or lost ones) of one request in one step."""

    life: Life
    tokens: int
    computed: int
    """Its computed tokens after the step."""
    last: bool
    """Whether the step computes all it has, so that a token comes out."""


class Step:
    """One scheduled step that awaits its output."""

    __slots__ = ("chunks", "decoding", "key", "prefill_tokens", "start_ns", "tokens")

    def __init__(self, key: object, start_ns: int, tokens: int, decoding: int, chunks: Sequence[tuple[Chunk, int]]):
        self.key = key
        self.start_ns = start_ns
        self.tokens = tokens
        self.chunks = chunks
        """Each with the number of preemptions that its request had then: a later one makes it void."""
        self.decoding = decoding
        self.prefill_tokens = sum([chunk.tokens for chunk, _ in chunks]) if chunks else 0
