from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_router.cost import PrefillRate, TransferRate, typical_rate
from cache_router.learned_rates import LearnedPrefill, LearnedTransfer

MIB = 1024 * 1024


def test_an_unmeasured_tier_is_a_guess() -> None:
    learned = LearnedTransfer.starting_at(typical_rate("ssd"))
    assert learned.num_reports == 0
    assert learned.rate == typical_rate("ssd")


def after(
    learned: LearnedTransfer, true: TransferRate, num_loads: int, noise: random.Random
) -> LearnedTransfer:
    for _ in range(num_loads):
        num_bytes = noise.randint(1, 200) * MIB
        seconds = true.seconds(num_bytes) * noise.lognormvariate(0, 0.05)
        learned = learned.learn(num_bytes, seconds)
    return learned


def test_latency_and_bandwidth_are_told_apart_by_loads_of_different_sizes() -> None:
    noise = random.Random(1)
    learned = LearnedTransfer.starting_at(typical_rate("s3"))
    for num_bytes in (MIB, 100 * MIB) * 40:
        seconds = (0.02 + num_bytes / 5e8) * noise.lognormvariate(0, 0.05)
        learned = learned.learn(num_bytes, seconds)
    assert learned.rate.latency_s == pytest.approx(0.02, rel=0.1)
    assert learned.rate.per_byte_s == pytest.approx(1 / 5e8, rel=0.1)
    assert learned.rate.spread == pytest.approx(0.05, rel=0.6)


def test_loads_of_one_size_are_predicted_though_their_parts_are_not_known() -> None:
    learned = LearnedTransfer.starting_at(typical_rate("redis"))
    for _ in range(20):
        learned = learned.learn(64 * MIB, 0.5)
    assert learned.rate.seconds(64 * MIB) == pytest.approx(0.5, rel=0.02)
    assert learned.rate.latency_s > 0
    assert learned.rate.per_byte_s > 0


@pytest.mark.parametrize("factor", [4.0, 0.25])
def test_a_bandwidth_that_changes_four_times_is_followed_within_ten_loads(factor: float) -> None:
    noise = random.Random(2)
    true = TransferRate(latency_s=0.005, per_byte_s=1 / 1e9)
    learned = after(LearnedTransfer.starting_at(typical_rate("s3")), true, 40, noise)
    changed = TransferRate(latency_s=0.005, per_byte_s=factor / 1e9)
    learned = after(learned, changed, 10, noise)
    for num_bytes in (20 * MIB, 100 * MIB, 200 * MIB):
        assert learned.rate.seconds(num_bytes) == pytest.approx(
            changed.seconds(num_bytes), rel=0.15
        )


def test_one_load_that_hung_changes_little() -> None:
    noise = random.Random(3)
    true = TransferRate(latency_s=0.005, per_byte_s=1 / 1e9)
    before = after(LearnedTransfer.starting_at(typical_rate("ssd")), true, 40, noise)
    hung = before.learn(100 * MIB, 60.0)
    assert hung.rate.seconds(100 * MIB) == pytest.approx(true.seconds(100 * MIB), rel=0.15)


def test_a_first_guess_that_is_a_thousand_times_off_is_left_behind() -> None:
    noise = random.Random(4)
    true = TransferRate(latency_s=0.5, per_byte_s=1e-6)
    learned = after(LearnedTransfer.starting_at(typical_rate("ram")), true, 12, noise)
    assert learned.rate.seconds(50 * MIB) == pytest.approx(true.seconds(50 * MIB), rel=0.2)


def test_prefill_is_learned_by_length_and_position() -> None:
    noise = random.Random(5)
    true = PrefillRate(fixed_s=0.02, per_token_s=1 / 800, per_pair_s=2e-7)
    learned = LearnedPrefill()
    for _ in range(200):
        cached, new = noise.choice((0, 0, 1024, 4096)), noise.randint(16, 4096)
        learned = learned.learn(cached, new, true.seconds(cached, new) * noise.uniform(0.95, 1.05))
    for cached, new in ((0, 512), (0, 4096), (4000, 200), (4096, 4096)):
        assert learned.rate.seconds(cached, new) == pytest.approx(
            true.seconds(cached, new), rel=0.08
        )


@given(
    st.lists(st.tuples(st.integers(1, 10**12), st.floats(1e-9, 1e6)), min_size=1, max_size=40),
)
def test_whatever_is_measured_rates_stay_positive_and_finite(
    reports: list[tuple[int, float]],
) -> None:
    learned = LearnedTransfer.starting_at(typical_rate("ssd"))
    for num_bytes, seconds in reports:
        learned = learned.learn(num_bytes, seconds)
        rate = learned.rate
        assert 0 < rate.latency_s < float("inf")
        assert 0 < rate.per_byte_s < float("inf")
        assert 0 <= rate.spread < float("inf")
