from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_router.cost import (
    ARENA,
    Caution,
    LoadPlan,
    PrefillRate,
    Prefix,
    Rates,
    TierRun,
    TransferRate,
    plan_load,
)
from cache_router.learned_rates import LearnedPrefill, LearnedTransfer

BOLD = Caution(num_deviations=0.0, margin=0.0, min_saved_s=0.0)
FREE_COPY = TransferRate(latency_s=0.0, per_byte_s=0.0)
# A model of 135 million parameters in float32 on two cores.
SMALL_MODEL = PrefillRate(fixed_s=0.03, per_token_s=1 / 450, per_pair_s=1e-7)
BLOCK_SIZE = 32
BLOCK_BYTES = 46_080 * BLOCK_SIZE


def seconds_with_cut(prefix: Prefix, rates: Rates, cut: int) -> float:
    """The same cost, written down block by block."""
    tiers = [run.tier for run in prefix.runs for _ in range(run.num_blocks)]
    loaded = tiers[: cut - prefix.num_local_blocks]
    fetch_s = [
        rates.of_tier(tier).seconds(loaded.count(tier) * prefix.block_bytes)
        for tier in set(loaded) - {ARENA}
    ]
    copy_s = rates.of_tier(ARENA).seconds(len(loaded) * prefix.block_bytes) if loaded else 0.0
    cached = min(cut * prefix.block_size, prefix.num_tokens - 1)
    return (
        max(fetch_s, default=0.0)
        + copy_s
        + rates.prefill.seconds(cached, prefix.num_tokens - cached)
    )


def true_seconds(plan: LoadPlan, prefix: Prefix, rates: Rates) -> float:
    return seconds_with_cut(prefix, rates, plan.num_blocks)


positive = st.floats(1e-6, 1.0)
transfer_rates = st.builds(TransferRate, positive, st.floats(1e-10, 1e-5), st.floats(0, 1))
some_rates = st.builds(
    Rates,
    st.builds(PrefillRate, st.floats(1e-5, 0.1), st.floats(1e-6, 1e-2), st.floats(1e-13, 1e-6)),
    st.dictionaries(st.sampled_from([ARENA, "ssd", "redis", "s3"]), transfer_rates),
)
some_runs = st.lists(
    st.builds(TierRun, st.sampled_from([ARENA, "ssd", "redis", "s3"]), st.integers(1, 9)),
    max_size=5,
)


@given(some_rates, some_runs, st.integers(0, 5), st.integers(1, 300))
def test_the_cut_is_as_cheap_as_the_best_of_all_cuts(
    rates: Rates, runs: list[TierRun], num_local_blocks: int, num_further_tokens: int
) -> None:
    num_blocks = num_local_blocks + sum(run.num_blocks for run in runs)
    num_tokens = num_blocks * 16 + num_further_tokens
    prefix = Prefix(num_tokens, 16, 4096, num_local_blocks, runs)
    plan = plan_load(prefix, rates, BOLD)
    best = min(
        seconds_with_cut(prefix, rates, cut) for cut in range(num_local_blocks, num_blocks + 1)
    )
    assert num_local_blocks <= plan.num_blocks <= num_blocks
    assert plan.total_s == pytest.approx(best)
    assert plan.total_s == pytest.approx(true_seconds(plan, prefix, rates))
    assert plan.compute_all_s == pytest.approx(seconds_with_cut(prefix, rates, num_local_blocks))
    assert plan.saved_s >= 0


def test_a_whole_hit_computes_one_token() -> None:
    prefix = Prefix(64, 32, 1000, 0, [TierRun(ARENA, 2)])
    plan = plan_load(prefix, Rates(SMALL_MODEL), BOLD)
    assert plan.num_blocks == 2
    assert plan.recompute_s == pytest.approx(SMALL_MODEL.seconds(63, 1))


def test_only_the_blocks_that_pay_are_loaded() -> None:
    runs = [TierRun("ssd", 10), TierRun("s3", 10)]
    slow = TransferRate(latency_s=0.0, per_byte_s=1 / 1e6)
    rates = Rates(SMALL_MODEL, {"ssd": TransferRate(1e-3, 1 / 1e9), "s3": slow})
    assert plan_load(Prefix(21 * 32, 32, BLOCK_BYTES, 0, runs), rates).num_blocks == 10


def test_tiers_deliver_at_the_same_time() -> None:
    rate = TransferRate(latency_s=0.0, per_byte_s=1e-6)
    rates = Rates(SMALL_MODEL, {"ssd": rate, "redis": rate, ARENA: FREE_COPY})
    both = Prefix(400, 16, 1000, 0, [TierRun("ssd", 10), TierRun("redis", 10)])
    one = Prefix(400, 16, 1000, 0, [TierRun("ssd", 20)])
    assert plan_load(both, rates).load_s == pytest.approx(0.01)
    assert plan_load(one, rates).load_s == pytest.approx(0.02)


def test_a_load_that_saves_less_than_the_margin_is_not_worth_it() -> None:
    tokens = 16 * BLOCK_SIZE
    prefix = Prefix(tokens + 1, BLOCK_SIZE, BLOCK_BYTES, 0, [TierRun("s3", 16)])
    saved = SMALL_MODEL.seconds(0, tokens + 1) - SMALL_MODEL.seconds(tokens, 1)

    def plan(share: float, spread: float = 0.0) -> LoadPlan:
        rate = TransferRate(share * saved, 1e-15, spread)
        return plan_load(prefix, Rates(SMALL_MODEL, {"s3": rate, ARENA: FREE_COPY}))

    assert plan(0.90).num_blocks == 16
    assert plan(0.99).num_blocks == 0
    # As fast on average, but it often takes much longer.
    assert plan(0.90, spread=0.5).num_blocks == 0


def test_more_blocks_than_the_prompt_has_are_refused() -> None:
    with pytest.raises(ValueError, match="more than a prompt of 40 tokens"):
        plan_load(Prefix(40, 16, 1, 1, [TierRun("ssd", 2)]), Rates())


def test_where_loading_takes_0_73_of_computing_ttft_falls_by_22_to_32_percent() -> None:
    tokens_per_s = 450.0
    linear = PrefillRate(fixed_s=0.03, per_token_s=1 / tokens_per_s, per_pair_s=0.0)
    bandwidth = 46_080 * tokens_per_s / 0.73
    store = TransferRate(latency_s=0.005, per_byte_s=1 / bandwidth)
    for num_tokens in (1_000, 2_000, 4_000, 8_000):
        runs = [TierRun("s3", (num_tokens - 1) // BLOCK_SIZE)]
        plan = plan_load(
            Prefix(num_tokens, BLOCK_SIZE, BLOCK_BYTES, 0, runs),
            Rates(linear, {"s3": store, ARENA: FREE_COPY}),
        )
        assert 0.22 <= plan.saved_s / plan.compute_all_s <= 0.32


def learned(true: Rates, tier: str, noise: random.Random) -> Rates:
    """What is learned from loads and prefills of many sizes that take 10 % more or less."""
    prefill = LearnedPrefill()
    for _ in range(60):
        cached, new = noise.choice((0, 0, 512, 2048)), noise.randint(16, 6000)
        measured_s = true.prefill.seconds(cached, new) * noise.lognormvariate(0, 0.1)
        prefill = prefill.learn(cached, new, measured_s)
    transfer = {}
    for name in (tier, ARENA):
        rate = LearnedTransfer.starting_at(Rates().of_tier(name))
        for _ in range(60):
            num_bytes = noise.randint(1, 250) * BLOCK_BYTES
            measured_s = true.of_tier(name).seconds(num_bytes) * noise.lognormvariate(0, 0.1)
            rate = rate.learn(num_bytes, measured_s)
        transfer[name] = rate.rate
    return Rates(prefill.rate, transfer)


def test_decisions_with_learned_rates_are_right_outside_a_band_around_break_even() -> None:
    noise = random.Random(20)
    num_right = num_clear = 0
    spent_s = ideal_s = 0.0
    bandwidths = np.geomspace(2e6, 2e9, 13)
    latencies = (0.001, 0.005, 0.02, 0.05, 0.2)
    for bandwidth, latency_s in itertools.product(bandwidths, latencies):
        store = TransferRate(latency_s, 1 / float(bandwidth))
        true = Rates(SMALL_MODEL, {"s3": store, ARENA: TransferRate(1e-3, 1 / 2e9)})
        believed = learned(true, "s3", noise)
        for num_tokens in (64, 128, 256, 512, 1024, 2048, 4096, 8192):
            runs = [TierRun("s3", (num_tokens - 1) // BLOCK_SIZE)]
            prefix = Prefix(num_tokens, BLOCK_SIZE, BLOCK_BYTES, 0, runs)
            plan, oracle = plan_load(prefix, believed), plan_load(prefix, true, BOLD)
            spent_s += true_seconds(plan, prefix, true)
            ideal_s += oracle.total_s
            load_all_s = seconds_with_cut(prefix, true, runs[0].num_blocks)
            if abs(load_all_s / oracle.compute_all_s - 1) > 0.1:
                num_clear += 1
                num_right += (plan.num_blocks > 0) == (oracle.num_blocks > 0)
    # Of 520 cells.
    assert num_clear > 400
    assert num_right >= 0.95 * num_clear
    assert spent_s <= 1.05 * ideal_s
