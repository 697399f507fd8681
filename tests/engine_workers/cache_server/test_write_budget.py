from __future__ import annotations

import random

from engine_workers.cache_server.write_budget import WriteBudget


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_over_any_time_no_more_is_written_than_the_rate_and_one_burst() -> None:
    clock, choice = Clock(), random.Random(1)
    budget = WriteBudget(bytes_per_s=1_000, burst_s=2.0, clock=clock)
    spent = 0
    for _ in range(10_000):
        clock.now += choice.expovariate(50)
        num_bytes = choice.randint(1, 300)
        if budget.allows(num_bytes):
            budget.spend(num_bytes)
            spent += num_bytes
        assert spent <= 1_000 * (clock.now - 100.0) + 2_000 + 1e-6
    assert spent >= 0.95 * 1_000 * (clock.now - 100.0)


def test_a_pause_gives_one_burst_and_no_more() -> None:
    clock = Clock()
    budget = WriteBudget(bytes_per_s=1_000, burst_s=2.0, clock=clock)
    budget.spend(2_000)
    assert not budget.allows(1)
    clock.now += 3_600
    assert budget.fill() == 1.0
    assert budget.allows(2_000)
    assert not budget.allows(2_001)


def test_a_clock_that_goes_back_gives_nothing_and_takes_nothing() -> None:
    clock = Clock()
    budget = WriteBudget(bytes_per_s=1_000, burst_s=1.0, clock=clock)
    budget.spend(500)
    clock.now -= 50
    assert budget.fill() == 0.5
    clock.now += 0.25
    assert budget.fill() == 0.75
