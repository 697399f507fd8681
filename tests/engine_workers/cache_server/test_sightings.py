from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_server.sightings import Sightings, keys_of
from tests.engine_workers.cache_server.block_names import name_of


@given(st.lists(st.lists(st.integers(0, 50), unique=True, max_size=20), max_size=20))
def test_nothing_is_counted_too_little_before_it_fades(lookups: list[list[int]]) -> None:
    sightings = Sightings(counters_bits=12)
    expected: dict[int, int] = {}
    for numbers in lookups:
        counts = sightings.see(keys_of([name_of(number) for number in numbers]))
        for number, count in zip(numbers, counts, strict=True):
            expected[number] = min(15, expected.get(number, 0) + 1)
            assert count >= expected[number]
    keys = keys_of([name_of(number) for number in expected])
    assert all(sightings.count(keys) >= np.array(list(expected.values())))


def test_few_of_the_unseen_are_counted_when_it_is_as_full_as_it_gets() -> None:
    sightings = Sightings(counters_bits=12)
    keys = keys_of([name_of(number) for number in range(12_000)])
    for start in range(0, 10_000, 100):
        sightings.see(keys[start : start + 100])
    assert (sightings.count(keys[10_000:]) > 0).mean() < 0.05


def test_what_was_seen_long_ago_is_forgotten() -> None:
    sightings = Sightings(counters_bits=10)
    old = keys_of([name_of(0)])
    for _ in range(15):
        sightings.see(old)
    for number in range(1, 4_000):
        sightings.see(keys_of([name_of(number)]))
    assert sightings.count(old) < 2


def test_the_same_hash_in_another_namespace_is_another_block() -> None:
    other = Fingerprint(b"m" * 16)
    assert keys_of([name_of(1)]) != keys_of([name_of(1, other)])
