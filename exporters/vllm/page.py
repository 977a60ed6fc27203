"""The text of a ``/metrics`` page -> its samples: a bad line costs only itself.

Prometheus text and OpenMetrics text are both read: timestamps, exemplars and ``# EOF`` are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import StringIO

from prometheus_client.parser import text_fd_to_metric_families

from vllm_slo.exporters.vllm.names import HTTP_REQUESTS, PROCESS_START, canonical, gone, is_vllm


@dataclass(frozen=True)
class Sample:
    """One line: today's name of the series, its suffix (``_sum``, ``_bucket``, ...), labels and value (may be NaN)."""

    name: str
    suffix: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True)
class Page:
    """What one page holds of vLLM, under today's names.

    ``samples`` are grouped by name. ``old_names`` are the older names met, as they stood on the page without prefix.
    ``vllm_samples`` counts every line of vLLM, those of series nobody reads included.
    """

    samples: Mapping[str, tuple[Sample, ...]]
    vllm_samples: int
    old_names: tuple[str, ...] = ()
    bad_lines: int = 0
    first_bad_line: str | None = None
    families: frozenset[str] = field(default_factory=frozenset)

    def of(self, name: str, suffixes: tuple[str, ...] = ("", "_total")) -> Iterator[Sample]:
        """The samples of one series with one of the suffixes."""
        return (sample for sample in self.samples.get(name, ()) if sample.suffix in suffixes)

    def value(self, name: str, suffixes: tuple[str, ...] = ("", "_total")) -> float | None:
        """The sum over the samples of one series; None when there is none or none is a number."""
        values = [sample.value for sample in self.of(name, suffixes) if not math.isnan(sample.value)]
        return math.fsum(values) if values else None

    def bounds(self, name: str) -> tuple[float, ...]:
        """The finite upper bounds of a histogram, ascending; empty when the page has no such histogram."""
        bounds = {_number(sample.labels.get("le", "")) for sample in self.of(name, ("_bucket",))}
        return tuple(sorted(bound for bound in bounds if math.isfinite(bound)))


def parse(text: str) -> Page:
    """The page's vLLM samples. Never raises: lines that no parser understands are counted and the first is kept."""
    current: dict[str, list[Sample]] = {}
    older: dict[str, list[Sample]] = {}
    old_names: set[str] = set()
    families: set[str] = set()
    bad, first_bad, vllm_samples = 0, None, 0
    for line in text.splitlines():
        try:
            parsed = [sample for family in text_fd_to_metric_families(StringIO(line)) for sample in family.samples]
        except (ValueError, IndexError, KeyError):
            bad += 1
            first_bad = first_bad or line.strip()[:200]
            continue
        for sample in parsed:
            value = float(sample.value)
            if sample.name in (PROCESS_START, HTTP_REQUESTS):
                current.setdefault(sample.name, []).append(Sample(sample.name, "", sample.labels, value))
                continue
            if not is_vllm(sample.name):
                continue
            vllm_samples += 1
            families.add(sample.name)
            known = canonical(sample.name)
            if known is None:
                if (name := gone(sample.name)) is not None:
                    old_names.add(name)
                continue
            name, suffix, old = known
            if old is not None:
                old_names.add(old)
            (current if old is None else older).setdefault(name, []).append(Sample(name, suffix, sample.labels, value))
    samples = {name: tuple(found) for name, found in (older | current).items()}
    return Page(samples, vllm_samples, tuple(sorted(old_names)), bad, first_bad, frozenset(families))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
