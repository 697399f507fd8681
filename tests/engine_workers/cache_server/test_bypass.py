from __future__ import annotations

import pytest

from engine_workers.cache_server.bypass import Bypass, BypassLimits, BypassReason, Outcome

USELESS_LOAD = Outcome(load_s=1.0, saved_s=0.5, computed_s=0.5)
GOOD_LOAD = Outcome(load_s=0.1, saved_s=1.0, computed_s=0.1)
CHEAP_MISS = Outcome(waited_s=0.005, save_s=0.01, computed_s=1.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


class Workload:
    """Prompts, one a second, that use the tiers if the bypass lets them."""

    def __init__(self, retry_s: float = 900.0) -> None:
        self.clock = Clock()
        self.bypass = Bypass(BypassLimits(retry_s=retry_s), self.clock)
        self._number = 0

    def run(self, outcome: Outcome, num_prompts: int, prefix: bytes = b"") -> int:
        """Number of prompts that used the tiers."""
        num_used = 0
        for _ in range(num_prompts):
            self.clock.now += 1.0
            self._number += 1
            if self.bypass.uses_tiers(prefix or self._number.to_bytes(32, "little")):
                num_used += 1
                self.bypass.report(outcome)
        return num_used


def test_tiers_that_save_time_stay_in_use() -> None:
    work = Workload()
    assert work.run(GOOD_LOAD, 1_000) == 1_000
    assert not work.bypass.state.is_bypassed
    assert work.bypass.state.saved_s > work.bypass.state.spent_s


def test_a_small_loss_is_an_investment() -> None:
    work = Workload()
    assert work.run(CHEAP_MISS, 1_000) == 1_000


def test_a_few_prompts_decide_nothing() -> None:
    work = Workload()
    assert work.run(USELESS_LOAD, 15) == 15
    assert not work.bypass.state.is_bypassed


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (USELESS_LOAD, BypassReason.LOADS),
        (Outcome(save_s=0.1, waited_s=0.01, computed_s=1.0), BypassReason.SAVES),
        (Outcome(waited_s=0.3, save_s=0.01, computed_s=1.0), BypassReason.LOOKUPS),
        (Outcome(load_s=0.9, waited_s=0.3, saved_s=1.0), BypassReason.LOOKUPS),
    ],
)
def test_tiers_that_cost_more_than_they_save_step_aside_and_say_why(
    outcome: Outcome, reason: BypassReason
) -> None:
    work = Workload()
    work.run(outcome, 20)
    assert work.bypass.state.reason is reason


def test_meanwhile_only_the_probing_share_uses_them() -> None:
    work = Workload()
    work.run(USELESS_LOAD, 16)
    assert work.bypass.state.is_bypassed
    num_used = sum(work.bypass.uses_tiers(number.to_bytes(32)) for number in range(5_000))
    assert 0.04 < num_used / 5_000 < 0.09
    work.run(USELESS_LOAD, 800)
    assert work.bypass.state.is_bypassed
    assert work.bypass.state.num_changes == 1


def test_prompts_that_begin_alike_are_probed_together() -> None:
    work = Workload(retry_s=1e9)
    work.run(USELESS_LOAD, 16)
    shares = []
    for _ in range(200):
        # To the beginning of the next window.
        work.clock.now = (work.clock.now // 60 + 1) * 60
        answers = {work.bypass.uses_tiers(b"system prompt") for _ in range(10)}
        assert len(answers) == 1
        shares.append(answers.pop())
    assert 0 < sum(shares) < 40


def test_they_come_back_when_probes_save_time_again() -> None:
    work = Workload()
    work.run(USELESS_LOAD, 16)
    work.run(GOOD_LOAD, 840, prefix=b"system prompt")
    assert not work.bypass.state.is_bypassed
    assert work.bypass.state.num_changes == 2


def test_they_come_back_untested_after_a_while_and_step_aside_again_if_nothing_changed() -> None:
    work = Workload()
    work.run(USELESS_LOAD, 16)
    work.clock.now += 900
    assert work.run(USELESS_LOAD, 16) == 16
    assert work.bypass.state.is_bypassed
    assert work.bypass.state.num_changes == 3


def test_a_loss_between_the_two_tolerances_changes_nothing_either_way() -> None:
    between = Outcome(save_s=0.02, computed_s=1.0)
    work = Workload()
    work.run(between, 200)
    assert not work.bypass.state.is_bypassed
    work.run(USELESS_LOAD, 100)
    assert work.bypass.state.is_bypassed
    for number in range(800):
        if work.bypass.uses_tiers(number.to_bytes(32)):
            work.bypass.report(between)
    assert work.bypass.state.is_bypassed


def test_what_left_the_window_no_longer_counts() -> None:
    work = Workload()
    work.run(USELESS_LOAD, 15)
    work.clock.now += 120
    work.run(GOOD_LOAD, 60)
    assert work.bypass.state.num_changes == 0
    work.clock.now += 120
    assert work.bypass.state.spent_s == 0.0
