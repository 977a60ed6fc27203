"""The filter never forgets, and is seldom wrong."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_slo.analytics.bloom import Bloom, Keys

MEGABYTE = 1 << 20


def _keys(count: int, seed: int) -> Keys:
    return Keys.of(np.random.default_rng(seed).integers(0, 2**64, count, dtype=np.uint64))


def _filled(count: int, lots: int, memory: int) -> Bloom:
    bloom = Bloom()
    for seed in range(lots):
        bloom.add(_keys(count, seed), memory - bloom.size_bytes)
    return bloom


def test_what_was_added_is_always_found() -> None:
    bloom = _filled(20_000, 30, 8 * MEGABYTE)
    assert bloom.keys == 600_000
    assert all(bloom.contains(_keys(20_000, seed)).all() for seed in range(30))


def test_what_was_not_added_is_rarely_found() -> None:
    bloom = _filled(50_000, 20, 128 * MEGABYTE)
    assert bloom.contains(_keys(1_000_000, 99)).mean() < 5e-5


@pytest.mark.slow
def test_twenty_million_keys_fit_128_mebibytes() -> None:
    bloom = _filled(100_000, 200, 128 * MEGABYTE)
    assert bloom.size_bytes <= 128 * MEGABYTE
    assert bloom.contains(_keys(4_000_000, 999)).mean() < 5e-5


def test_memory_stays_below_the_limit_and_a_full_filter_still_never_forgets() -> None:
    bloom = _filled(50_000, 20, MEGABYTE)
    assert bloom.size_bytes <= MEGABYTE
    assert all(bloom.contains(_keys(50_000, seed)).all() for seed in range(20))
    assert not bloom.contains(_keys(10_000, 99)).all()


def test_an_empty_filter_takes_no_memory_and_finds_nothing() -> None:
    bloom = Bloom()
    assert bloom.size_bytes == 0
    assert not bloom.contains(_keys(1000, 1)).any()


def test_memory_follows_the_keys() -> None:
    assert _filled(1000, 1, 128 * MEGABYTE).size_bytes <= MEGABYTE
    assert _filled(60_000, 1, 128 * MEGABYTE).size_bytes <= 8 * MEGABYTE


def test_without_any_room_the_first_key_still_finds_a_place() -> None:
    bloom = Bloom()
    bloom.add(_keys(10, 1), 0)
    assert bloom.size_bytes == 1024
    assert bloom.contains(_keys(10, 1)).all()


def test_equal_keys_in_one_call_are_all_kept() -> None:
    bloom = Bloom()
    bloom.add(Keys.of(np.zeros(1000, dtype=np.uint64)), MEGABYTE)
    bloom.add(Keys.of(np.arange(1000, dtype=np.uint64)), MEGABYTE)
    assert bloom.contains(Keys.of(np.arange(1000, dtype=np.uint64))).all()
