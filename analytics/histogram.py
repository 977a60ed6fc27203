"""Quantiles from log2 histograms, as the rollups hold them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_slo.exporters.schema import BINS_PER_OCTAVE, NON_POSITIVE_BIN

RELATIVE_ERROR = 2 ** (1 / (2 * BINS_PER_OCTAVE)) - 1
"""Largest relative distance of a bin's middle from a value in the bin: 1.09 %."""


def middles(bins: NDArray[np.int64]) -> NDArray[np.float64]:
    """The geometric middle of each bin in seconds; 0 for the bin of values that are not positive."""
    exponents = np.where(bins == NON_POSITIVE_BIN, 0, bins) - 0.5
    return np.where(bins == NON_POSITIVE_BIN, 0.0, np.exp2(exponents / BINS_PER_OCTAVE))


def quantiles(bins: Sequence[int], counts: Sequence[int], wanted: Sequence[float]) -> tuple[float, ...]:
    """The quantiles of a histogram with ascending ``bins``, each within RELATIVE_ERROR of the exact one.

    Defined as in `quantile_cont`: linear between the two values around rank q * (n - 1).

    >>> quantiles([0, 32], [3, 1], [0.5, 1.0])
    (0.989228013193975, 1.978456026387951)
    """
    values = middles(np.asarray(bins, dtype=np.int64))
    cumulative = np.cumsum(np.asarray(counts, dtype=np.int64))
    rank = np.asarray(wanted) * (cumulative[-1] - 1)
    below = values[np.searchsorted(cumulative, np.floor(rank), side="right")]
    above = values[np.searchsorted(cumulative, np.ceil(rank), side="right")]
    return tuple(float(value) for value in below + (above - below) * (rank - np.floor(rank)))
