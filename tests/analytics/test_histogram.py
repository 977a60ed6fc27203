from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_slo.analytics.histogram import RELATIVE_ERROR, middles, quantiles
from vllm_slo.exporters.schema import BINS_PER_OCTAVE, NON_POSITIVE_BIN

values = st.lists(st.floats(min_value=1e-9, max_value=1e6), min_size=1, max_size=200)


def binned(seconds: list[float]) -> tuple[list[int], list[int]]:
    counts: dict[int, int] = {}
    for value in seconds:
        bin_ = math.ceil(BINS_PER_OCTAVE * math.log2(value)) if value > 0 else NON_POSITIVE_BIN
        counts[bin_] = counts.get(bin_, 0) + 1
    bins = sorted(counts)
    return bins, [counts[b] for b in bins]


@given(values, st.floats(min_value=0, max_value=1))
def test_a_quantile_is_within_the_stated_error_of_the_exact_one(seconds: list[float], wanted: float) -> None:
    (found,) = quantiles(*binned(seconds), [wanted])
    assert found == pytest.approx(float(np.quantile(seconds, wanted)), rel=RELATIVE_ERROR * (1 + 1e-9))


@given(values, st.lists(st.floats(min_value=0, max_value=1), min_size=2, max_size=9))
def test_quantiles_never_fall(seconds: list[float], wanted: list[float]) -> None:
    found = quantiles(*binned(seconds), sorted(wanted))
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in pairwise(found))


@given(values, values)
def test_merged_histograms_give_the_quantiles_of_all_values(first: list[float], second: list[float]) -> None:
    merged: dict[int, int] = {}
    for bins, counts in (binned(first), binned(second)):
        for bin_, count in zip(bins, counts, strict=True):
            merged[bin_] = merged.get(bin_, 0) + count
    ordered = sorted(merged)
    wanted = [0.0, 0.5, 0.99, 1.0]
    assert quantiles(ordered, [merged[b] for b in ordered], wanted) == quantiles(*binned(first + second), wanted)


def test_values_that_are_not_positive_count_as_zero() -> None:
    assert quantiles([NON_POSITIVE_BIN, 32], [3, 1], [0.0, 0.5]) == (0.0, 0.0)
    assert middles(np.array([NON_POSITIVE_BIN, 0])).tolist() == [0.0, pytest.approx(1, rel=RELATIVE_ERROR)]
