from __future__ import annotations

import asyncio
from itertools import product

import pytest

from cache_router.predictions import Predictions
from cache_router.reservation import Reservation
from cache_router.types import BlockHash, WorkerId
from cache_router.worker_registry import WorkerLoad

W = WorkerId("w")
FIRST = [BlockHash(1), BlockHash(2)]
SECOND = [BlockHash(9)]


@pytest.fixture
def load() -> WorkerLoad:
    return WorkerLoad(num_running=5, waiting_tokens=70)


@pytest.fixture
def predictions() -> Predictions:
    return Predictions(lambda: 0.0, ttl_s=5.0)


@pytest.fixture
def reservation(load: WorkerLoad, predictions: Predictions) -> Reservation:
    return Reservation(W, load, 30, predictions, [FIRST, SECOND])


def test_nothing_is_held_before_it_is_entered(
    reservation: Reservation, load: WorkerLoad, predictions: Predictions
) -> None:
    reservation.prefill_done()
    reservation.failed()
    assert load == WorkerLoad(5, 70)
    assert predictions.match(FIRST) == {}


def test_a_request_waits_until_its_first_token_and_runs_until_it_leaves(
    reservation: Reservation, load: WorkerLoad, predictions: Predictions
) -> None:
    with reservation:
        assert load == WorkerLoad(6, 100)
        assert predictions.match(FIRST) == {W: 2}
        assert predictions.match_computed(FIRST) == {}
        reservation.prefill_done()
        reservation.prefill_done()
        assert load == WorkerLoad(6, 70)
        assert predictions.match_computed(FIRST) == {W: 2}
    assert load == WorkerLoad(5, 70)
    assert predictions.match_computed(SECOND) == {W: 1}


def test_leaving_in_peace_means_that_the_prefill_was_done(
    reservation: Reservation, load: WorkerLoad, predictions: Predictions
) -> None:
    with reservation:
        pass
    assert load == WorkerLoad(5, 70)
    assert predictions.match_computed(FIRST) == {W: 2}


def test_a_failed_request_leaves_nothing_to_expect(
    reservation: Reservation, load: WorkerLoad, predictions: Predictions
) -> None:
    with reservation:
        reservation.failed()
        assert load == WorkerLoad(6, 70)
        assert predictions.match(FIRST) == {}
        reservation.prefill_done()
    assert load == WorkerLoad(5, 70)
    assert predictions.match(FIRST) == {}


@pytest.mark.parametrize("error", [RuntimeError, asyncio.CancelledError, KeyboardInterrupt])
def test_an_error_before_the_first_token_drops_the_prediction(
    reservation: Reservation,
    load: WorkerLoad,
    predictions: Predictions,
    error: type[BaseException],
) -> None:
    with pytest.raises(error), reservation:
        raise error
    assert load == WorkerLoad(5, 70)
    assert predictions.match(FIRST) == {}


def test_an_error_after_the_first_token_keeps_it(
    reservation: Reservation, load: WorkerLoad, predictions: Predictions
) -> None:
    def break_off_while_decoding() -> None:
        with reservation:
            reservation.prefill_done()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        break_off_while_decoding()
    assert load == WorkerLoad(5, 70)
    assert predictions.match(FIRST) == {W: 2}


async def test_a_cancelled_task_gives_everything_back(
    reservation: Reservation, load: WorkerLoad, predictions: Predictions
) -> None:
    entered = asyncio.Event()

    async def serve() -> None:
        with reservation:
            entered.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(serve())
    await entered.wait()
    task.cancel()
    await asyncio.wait([task])
    assert load == WorkerLoad(5, 70)
    assert predictions.match(FIRST) == {}


@pytest.mark.parametrize("calls", list(product(["done", "failed", "raise"], repeat=3)))
@pytest.mark.parametrize("late", ["done", "failed"])
def test_no_order_of_calls_leaks(load: WorkerLoad, calls: tuple[str, ...], late: str) -> None:
    predictions = Predictions(lambda: 0.0, ttl_s=5.0)
    reservation = Reservation(W, load, 30, predictions, [FIRST])

    def call(name: str) -> None:
        if name == "done":
            reservation.prefill_done()
        elif name == "failed":
            reservation.failed()
        else:
            raise RuntimeError

    try:
        with reservation:
            for name in calls:
                call(name)
    except RuntimeError:
        assert "raise" in calls
    left = dict(predictions.match(FIRST))
    call(late)
    assert load == WorkerLoad(5, 70)
    assert predictions.match(FIRST) == left
    assert predictions.match_computed(FIRST) == left, "nothing may stay in flight"
