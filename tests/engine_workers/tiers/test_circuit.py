from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from cache_router.errors import BlockLostError, TierError
from engine_workers.tiers.circuit import Circuit, CircuitLimits, CircuitState

LIMITS = CircuitLimits(max_failures=3, open_s=1.0, max_open_s=5.0, hang_s=20.0)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def circuit(clock: Clock) -> Circuit:
    return Circuit("redis", LIMITS, clock)


def fail(circuit: Circuit) -> None:
    with pytest.raises(TierError, match="down"), circuit.call():
        raise TierError("redis", "down")


def succeed(circuit: Circuit) -> None:
    with circuit.call():
        pass


def assert_not_asked(circuit: Circuit) -> None:
    with pytest.raises(TierError, match="not asked"), circuit.call():
        pytest.fail("it was let through")


def test_it_opens_after_failures_in_a_row(circuit: Circuit) -> None:
    for _ in range(2):
        fail(circuit)
        fail(circuit)
        succeed(circuit)
    for _ in range(3):
        assert circuit.state() is CircuitState.CLOSED
        fail(circuit)
    assert circuit.state() is CircuitState.OPEN
    assert_not_asked(circuit)


def test_a_lost_block_is_an_answer(circuit: Circuit) -> None:
    for _ in range(5):
        fail(circuit)
        fail(circuit)
        with pytest.raises(BlockLostError), circuit.call():
            raise BlockLostError
    assert circuit.state() is CircuitState.CLOSED


def test_after_a_while_one_call_is_let_through_to_see(circuit: Circuit, clock: Clock) -> None:
    for _ in range(3):
        fail(circuit)
    clock.now += 0.99
    assert_not_asked(circuit)
    clock.now += 0.02
    assert circuit.state() is CircuitState.HALF_OPEN
    with circuit.call():
        assert_not_asked(circuit)
    assert circuit.state() is CircuitState.CLOSED


def test_each_probe_that_fails_doubles_the_wait_up_to_a_bound(
    circuit: Circuit, clock: Clock
) -> None:
    for _ in range(3):
        fail(circuit)
    for wait_s in (1.0, 2.0, 4.0, 5.0, 5.0):
        clock.now += wait_s - 0.01
        assert_not_asked(circuit)
        clock.now += 0.02
        fail(circuit)
    clock.now += 5.0
    succeed(circuit)
    for _ in range(3):
        fail(circuit)
    clock.now += 1.01
    assert circuit.state() is CircuitState.HALF_OPEN


def test_a_cancelled_call_says_nothing(circuit: Circuit, clock: Clock) -> None:
    fail(circuit)
    fail(circuit)
    with pytest.raises(asyncio.CancelledError), circuit.call():
        raise asyncio.CancelledError
    fail(circuit)
    assert circuit.state() is CircuitState.OPEN
    clock.now += 1.01
    with pytest.raises(asyncio.CancelledError), circuit.call():
        raise asyncio.CancelledError
    assert circuit.state() is CircuitState.HALF_OPEN


def test_what_began_before_it_opened_neither_closes_nor_prolongs_it(
    circuit: Circuit, clock: Clock
) -> None:
    with circuit.call():
        for _ in range(3):
            fail(circuit)
    assert circuit.state() is CircuitState.OPEN
    clock.now += 1.01
    succeed(circuit)
    with suppress(TierError), circuit.call():
        for _ in range(3):
            fail(circuit)
        clock.now += 0.5
        raise TierError("redis", "down")
    clock.now += 0.51
    assert circuit.state() is CircuitState.HALF_OPEN


def test_while_a_call_hangs_no_other_is_let_through(circuit: Circuit, clock: Clock) -> None:
    with circuit.call():
        clock.now += 19.0
        succeed(circuit)
        clock.now += 1.5
        assert circuit.state() is CircuitState.OPEN
        with pytest.raises(TierError, match="hangs"), circuit.call():
            pass
    assert circuit.state() is CircuitState.CLOSED
