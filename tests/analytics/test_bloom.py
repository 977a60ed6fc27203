"""The filter never forgets, and is seldom wrong."""

from __future__ import annotations

import numpy as np

from vllm_slo.analytics.bloom import Bloom, Keys

MEGABYTE = 1 << 20


def _keys(count: int, seed: int) -> Keys:
    return Keys.of(np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64))


def test_what_was_added_is_always_found() -> None:
    bloom = Bloom(8 * MEGABYTE)
    for seed in range(30):
        bloom.add(_keys(20_000, seed))
    assert all(bloom.contains(_keys(20_000, seed)).all() for seed in range(30))


def test_what_was_not_added_is_rarely_found() -> None:
    bloom = Bloom(128 * MEGABYTE)
    for seed in range(20):
        bloom.add(_keys(50_000, seed))
    assert bloom.contains(_keys(1_000_000, 99)).mean() < 5e-5


def test_memory_stays_below_the_limit_and_a_full_filter_still_never_forgets() -> None:
    bloom = Bloom(MEGABYTE)
    for seed in range(20):
        bloom.add(_keys(50_000, seed))
    assert bloom.size_bytes <= MEGABYTE
    assert all(bloom.contains(_keys(50_000, seed)).all() for seed in range(20))
    assert not bloom.contains(_keys(10_000, 99)).all()


def test_an_empty_filter_takes_no_memory_and_finds_nothing() -> None:
    bloom = Bloom(128 * MEGABYTE)
    assert bloom.size_bytes == 0
    assert not bloom.contains(_keys(1000, 1)).any()


def test_a_small_filter_starts_small() -> None:
    bloom = Bloom(128 * MEGABYTE)
    bloom.add(_keys(1000, 1))
    assert bloom.size_bytes <= MEGABYTE


def test_equal_keys_in_one_call_are_all_kept() -> None:
    bloom = Bloom(MEGABYTE)
    bloom.add(Keys.of(np.zeros(1000, dtype=np.uint64)))
    bloom.add(Keys.of(np.arange(1000, dtype=np.uint64)))
    assert bloom.contains(Keys.of(np.arange(1000, dtype=np.uint64))).all()
