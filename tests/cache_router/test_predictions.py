from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_router.predictions import Prediction, Predictions
from cache_router.types import BlockHash, WorkerId

A, B = WorkerId("a"), WorkerId("b")
TTL_S = 5.0


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def hashes(*values: int) -> list[BlockHash]:
    return [BlockHash(value) for value in values]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def predictions(clock: Clock) -> Predictions:
    return Predictions(clock, TTL_S)


def test_a_prediction_counts_at_once_for_its_worker_only(predictions: Predictions) -> None:
    predictions.enter(A, hashes(1, 2, 3))
    assert predictions.match(hashes(1, 2, 9)) == {A: 2}
    assert predictions.match(hashes(9)) == {}
    assert predictions.match([]) == {}


def test_it_does_not_expire_while_its_prefill_is_in_flight(
    predictions: Predictions, clock: Clock
) -> None:
    predictions.enter(A, hashes(1))
    clock.now_s += 1000 * TTL_S
    assert predictions.match(hashes(1)) == {A: 1}
    assert predictions.match_computed(hashes(1)) == {}


def test_it_lives_for_the_ttl_after_its_prefill(predictions: Predictions, clock: Clock) -> None:
    prediction = predictions.enter(A, hashes(1, 2))
    clock.now_s += 60
    prediction.prefill_done()
    prediction.prefill_done()
    clock.now_s += TTL_S * 0.99
    assert predictions.match(hashes(1, 2)) == predictions.match_computed(hashes(1, 2)) == {A: 2}
    clock.now_s += TTL_S * 0.01
    assert predictions.match(hashes(1, 2)) == {}


def test_a_dropped_one_is_gone_unless_another_request_predicted_the_same(
    predictions: Predictions,
) -> None:
    first = predictions.enter(A, hashes(1, 2, 3))
    predictions.enter(A, hashes(1, 2))
    first.drop()
    first.drop()
    assert predictions.match(hashes(1, 2, 3)) == {A: 2}


def test_a_request_that_fails_after_its_prefill_is_gone_at_once(
    predictions: Predictions, clock: Clock
) -> None:
    prediction = predictions.enter(A, hashes(1))
    prediction.prefill_done()
    prediction.drop()
    assert predictions.match(hashes(1)) == {}
    predictions.enter(A, hashes(1))
    clock.now_s += 2 * TTL_S
    assert predictions.match(hashes(1)) == {A: 1}


def test_an_old_life_changes_nothing_in_the_next(predictions: Predictions, clock: Clock) -> None:
    waiting, done = predictions.enter(A, hashes(1)), predictions.enter(A, hashes(1))
    done.prefill_done()
    predictions.clear(A)
    assert predictions.match(hashes(1)) == {}
    predictions.enter(A, hashes(1))
    waiting.prefill_done()
    clock.now_s += 2 * TTL_S
    waiting.drop()
    done.drop()
    assert predictions.match(hashes(1)) == {A: 1}
    assert predictions.match_computed(hashes(1)) == {}


def test_a_full_store_gives_up_the_oldest_done_ones_and_never_those_in_flight(
    clock: Clock,
) -> None:
    predictions = Predictions(clock, TTL_S, max_blocks=5)
    predictions.enter(A, hashes(1, 2))
    for start in (10, 20):
        predictions.enter(A, hashes(start)).prefill_done()
    predictions.enter(B, hashes(30, 31))
    assert predictions.match(hashes(10)) == {}
    assert predictions.match(hashes(20)) == {A: 1}
    predictions.enter(B, hashes(40, 41, 42))
    assert predictions.match(hashes(40)) == {}
    assert predictions.match(hashes(1, 2)) == {A: 2}
    assert predictions.match(hashes(30, 31)) == {B: 2}


_calls = st.lists(
    st.tuples(
        st.sampled_from(["enter", "done", "drop", "wait"]),
        st.integers(0, 9),
        st.lists(st.integers(0, 1), min_size=1, max_size=4).map(tuple),
    ),
    max_size=30,
)


@given(_calls)
def test_match_is_the_longest_prefix_of_any_live_prediction(
    calls: list[tuple[str, int, tuple[int, ...]]],
) -> None:
    clock = Clock()
    predictions = Predictions(clock, TTL_S)

    def chain(blocks: tuple[int, ...]) -> list[BlockHash]:
        return [BlockHash(hash(blocks[: i + 1])) for i in range(len(blocks))]

    made: list[tuple[Prediction, tuple[int, ...]]] = []
    expires_s: dict[int, float | None] = {}  # no key: gone; None: in flight
    for action, which, blocks in calls:
        if action == "enter":
            expires_s[len(made)] = None
            made.append((predictions.enter(A, chain(blocks)), blocks))
        elif action == "wait":
            clock.now_s += which
            expires_s = {i: at for i, at in expires_s.items() if at is None or at > clock.now_s}
        elif which < len(made):
            if action == "done":
                made[which][0].prefill_done()
                if which in expires_s and expires_s[which] is None:
                    expires_s[which] = clock.now_s + TTL_S
            else:
                made[which][0].drop()
                expires_s.pop(which, None)
    for _, _, query in calls:
        runs = [0]
        for i in expires_s:
            blocks = made[i][1]
            runs.append(
                next(
                    (n for n in range(len(query)) if blocks[: n + 1] != query[: n + 1]), len(query)
                )
            )
        assert predictions.match(chain(query)).get(A, 0) == max(runs)
