from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from random import Random

import pytest

from cache_router.errors import NoWorkerError
from cache_router.reservation import Reservation
from cache_router.types import (
    Candidate,
    TierId,
    TokenIds,
    Trust,
    WorkerId,
)
from cache_router.worker_registry import WorkerLoad
from tests.cache_router.cluster import (
    BLOCK_SIZE,
    A,
    B,
    C,
    Cluster,
    ask,
    joined,
    tokens,
)


def test_routing_alone_reserves_nothing() -> None:
    cluster = Cluster(A, B)
    query = ask(tokens(100))
    for _ in range(10):
        cluster.router.route(query)
    assert [cluster.registry.load(each) for each in (A, B)] == [WorkerLoad(), WorkerLoad()]
    assert cluster.candidate(query, A).cached_tokens == 0


def test_a_reservation_holds_what_the_worker_must_compute() -> None:
    cluster = Cluster(A)
    prompt = tokens(161)
    cluster.store(A, prompt[:96])
    with cluster.reserve(ask(prompt)) as reservation:
        assert cluster.load(A) == (1, 65)
        reservation.prefill_done()
        assert cluster.load(A) == (1, 0)
    assert cluster.load(A) == (0, 0)


def test_a_reservation_of_a_removed_worker_is_released_into_nothing() -> None:
    cluster = Cluster(A)
    query = ask(tokens(100))
    decision = cluster.router.route(query)
    with cluster.router.reserve(query, decision):
        cluster.registry.remove(A)
        cluster.add(A)
    assert cluster.load(A) == (0, 0)
    cluster.registry.remove(A)
    with pytest.raises(NoWorkerError):
        cluster.router.reserve(query, decision)


def test_what_is_shared_with_a_prefill_in_flight_does_not_wait() -> None:
    cluster = Cluster(A)
    shared = tokens(160)
    with cluster.reserve(ask(joined(shared, tokens(40, seed=1)))) as reservation:
        sibling = ask(joined(shared, tokens(30, seed=2)))
        assert cluster.candidate(sibling, A) == Candidate(
            A, 160, 30, 40, 1, Trust.EXACT, tokens_by_tier={TierId.GPU: 160}
        )
        stranger = ask(tokens(30, seed=3))
        assert cluster.candidate(stranger, A) == Candidate(A, 0, 30, 200, 1, Trust.EXACT)
        cluster.store(A, shared[:64])  # half way, events have come for a part
        assert cluster.candidate(sibling, A).waiting_tokens == 200 - 96
        reservation.prefill_done()
        cluster.registry.load(A).waiting_tokens = 500  # others, that share nothing
        assert cluster.candidate(sibling, A).waiting_tokens == 500


def test_a_prefill_is_over_once_events_report_its_last_block() -> None:
    cluster = Cluster(A)
    prompts = [tokens(170, seed=1), tokens(100, seed=2)]
    other = tokens(50, seed=3)
    with cluster.reserve(ask(*prompts)), cluster.reserve(ask(other)):
        cluster.store(A, prompts[0])
        cluster.router.route(ask(other))
        assert cluster.load(A) == (2, 320), "one of its two prompts is not computed yet"
        cluster.store(A, prompts[1])
        cluster.router.route(ask(other))
        assert cluster.load(A) == (2, 50)
    assert cluster.load(A) == (0, 0)


def test_a_request_that_hangs_does_not_keep_those_behind_it() -> None:
    cluster = Cluster(A)
    # Of less than a block no event tells that it is computed.
    with cluster.reserve(ask(tokens(BLOCK_SIZE - 1))):
        behind = []
        for seed in range(300):
            with cluster.reserve(ask(tokens(64, seed))) as reservation:
                behind.append(weakref.ref(reservation))
            del reservation
        assert sum(ref() is not None for ref in behind) < 100
        assert cluster.load(A) == (1, BLOCK_SIZE - 1)


def test_a_failed_request_is_not_followed_by_its_siblings() -> None:
    cluster = Cluster(A)
    query = ask(tokens(161))
    with cluster.reserve(query) as reservation:
        reservation.failed()
        assert cluster.candidate(query, A).cached_tokens == 0


def test_a_prediction_outlives_its_request_by_the_ttl() -> None:
    cluster = Cluster(A, B)
    query = ask(tokens(161))
    with cluster.reserve(query) as reservation:
        chosen = reservation.worker_id
    assert cluster.router.route(query).worker_id == chosen
    cluster.clock.now_s += 5.0
    assert cluster.router.route(query).predicted_cached_tokens == 0


@dataclass(frozen=True)
class Burst:
    """Where requests went that came before any prefill was done."""

    chosen: Counter[WorkerId]
    computed_tokens: dict[WorkerId, int]


def burst(cluster: Cluster, prompts: Sequence[TokenIds]) -> Burst:
    with ExitStack() as stack:
        reservations = [stack.enter_context(cluster.reserve(ask(prompt))) for prompt in prompts]
        chosen = Counter(each.worker_id for each in reservations)
        return Burst(chosen, {each: cluster.registry.load(each).waiting_tokens for each in chosen})


def siblings(prefix: TokenIds, num_siblings: int, num_own_tokens: int) -> list[TokenIds]:
    return [
        joined(prefix, tokens(num_own_tokens, seed=100 + sibling))
        for sibling in range(num_siblings)
    ]


@pytest.mark.parametrize("held_by", [None, A])
@pytest.mark.parametrize("seed", range(5))
def test_a_shared_system_prompt_does_not_herd_everyone_to_one_worker(
    seed: int, held_by: WorkerId | None
) -> None:
    cluster = Cluster(A, B, C, seed=seed)
    system = tokens(500)
    if held_by is not None:
        cluster.store(held_by, system)
    chosen = burst(cluster, siblings(system, 60, num_own_tokens=100)).chosen
    assert min(chosen[worker_id] for worker_id in (A, B, C)) >= 15


@pytest.mark.parametrize("seed", range(5))
def test_a_burst_of_siblings_stays_together_and_computes_the_prefix_once(seed: int) -> None:
    cluster = Cluster(A, B, C, seed=seed)
    result = burst(cluster, siblings(tokens(3200), 16, num_own_tokens=100))
    assert len(result.chosen) == 1
    assert sum(result.computed_tokens.values()) == 3200 + 16 * 100


def test_a_long_burst_spreads_once_its_own_suffixes_outweigh_the_prefix() -> None:
    cluster = Cluster(A, B)
    result = burst(cluster, siblings(tokens(1600), 100, num_own_tokens=100))
    assert sorted(result.chosen.values()) == [pytest.approx(50, abs=10)] * 2
    assert sum(result.computed_tokens.values()) == 2 * 1600 + 100 * 100


def test_a_stranger_does_not_starve_behind_a_burst() -> None:
    cluster = Cluster(A, B)
    with ExitStack() as stack:
        for prompt in siblings(tokens(3200), 10, num_own_tokens=100):
            holder = stack.enter_context(cluster.reserve(ask(prompt))).worker_id
        decision = cluster.router.route(ask(tokens(100, seed=999)))
        assert decision.worker_id != holder
        assert decision.candidates[0].cost_tokens == 100


@pytest.mark.parametrize("seed", range(5))
def test_with_nothing_shared_it_is_never_worse_than_least_load(seed: int) -> None:
    cluster = Cluster(A, B, C, seed=seed)
    rng = Random(seed)
    queues: dict[WorkerId, list[tuple[Reservation, int]]] = {each: [] for each in (A, B, C)}
    rivals: dict[WorkerId, list[int]] = {each: [] for each in (A, B, C)}
    most_ours = most_least_load = 0
    with ExitStack() as stack:
        for step in range(400):
            num_tokens = rng.choice([20, 200, 2000])
            query = ask(tokens(num_tokens, seed=step))
            waiting = {each: cluster.registry.load(each).waiting_tokens for each in queues}
            reservation = stack.enter_context(cluster.reserve(query))
            assert waiting[reservation.worker_id] == min(waiting.values())
            queues[reservation.worker_id].append((reservation, num_tokens))
            rivals[min(rivals, key=lambda each: sum(rivals[each]))].append(num_tokens)
            most_ours = max(most_ours, *(sum(n for _, n in queue) for queue in queues.values()))
            most_least_load = max(most_least_load, *(sum(queue) for queue in rivals.values()))
            if step % 3 == 2:  # each worker computes the oldest prompt that waits there
                for queue in queues.values():
                    if queue:
                        queue.pop(0)[0].prefill_done()
                for rival in rivals.values():
                    if rival:
                        rival.pop(0)
    assert most_ours <= 1.1 * most_least_load
    assert [cluster.load(each) for each in (A, B, C)] == [(0, 0)] * 3
