from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from cache_router.errors import NoWorkerError, PromptTooLongError, UnknownModelError
from cache_router.types import (
    Candidate,
    Medium,
    PromptRoot,
    RouteReason,
    TierId,
    Trust,
)
from tests.cache_router.cluster import (
    A,
    B,
    C,
    Cluster,
    ask,
    joined,
    served,
    tokens,
)


def test_the_holder_of_the_longest_prefix_wins() -> None:
    cluster = Cluster(A, B, C)
    prompt = tokens(400)
    cluster.store(A, prompt[:160])
    cluster.store(B, prompt[:320])
    decision = cluster.router.route(ask(prompt))
    assert (decision.worker_id, decision.reason) == (B, RouteReason.PREFIX)
    assert decision.predicted_cached_tokens == 320
    assert [each.worker_id for each in decision.candidates] == [B, A, C]
    assert decision.candidates[0] == Candidate(
        B, 320, 80, 0, 0, Trust.EXACT, tokens_by_tier={TierId.GPU: 320}
    )


def test_waiting_tokens_weigh_as_much_as_uncached_ones() -> None:
    cluster = Cluster(A, B)
    prompt = tokens(400)
    cluster.store(A, prompt[:320])
    cluster.registry.load(A).waiting_tokens = 319
    assert cluster.router.route(ask(prompt)).worker_id == A
    cluster.registry.load(A).waiting_tokens = 321
    decision = cluster.router.route(ask(prompt))
    assert (decision.worker_id, decision.reason) == (B, RouteReason.LOAD)
    assert decision.predicted_cached_tokens == 0


def test_a_trickle_with_one_prefix_does_not_stay_on_its_holder() -> None:
    cluster = Cluster(A, B)
    system = tokens(500)
    cluster.store(A, system)
    chosen = Counter[str]()
    for number in range(40):
        prompt = joined(system, tokens(60, seed=number + 1))
        query = ask(prompt)
        decision = cluster.router.route(query)
        chosen[decision.worker_id] += 1
        # Each prefill is over before the next request comes, and each answer takes long.
        cluster.router.reserve(query, decision).__enter__().prefill_done()
        cluster.store(decision.worker_id, prompt)
    assert max(chosen.values()) <= 28


def test_a_slower_medium_is_named_as_a_tier() -> None:
    cluster = Cluster(A)
    cluster.store(A, tokens(160), medium=Medium.CPU)
    assert cluster.router.route(ask(tokens(161))).reason is RouteReason.TIER
    cluster.store(A, tokens(160))
    assert cluster.router.route(ask(tokens(161))).reason is RouteReason.PREFIX


def test_a_worker_that_is_not_ready_never_wins() -> None:
    cluster = Cluster(A, B)
    cluster.store(A, tokens(160))
    cluster.registry.set_ready(A, False, "restarting")
    decision = cluster.router.route(ask(tokens(161)))
    assert [each.worker_id for each in decision.candidates] == [B]


def test_an_excluded_worker_never_wins_and_the_reason_says_fallback() -> None:
    cluster = Cluster(A, B)
    cluster.store(A, tokens(160))
    query = replace(ask(tokens(161)), excluded=frozenset({A}))
    decision = cluster.router.route(query)
    assert (decision.worker_id, decision.reason) == (B, RouteReason.FALLBACK)


def test_nobody_ready_unknown_and_all_excluded_are_different_errors() -> None:
    cluster = Cluster(A, B)
    with pytest.raises(UnknownModelError):
        cluster.router.route(ask(tokens(5), root=PromptRoot("other")))
    with pytest.raises(UnknownModelError):
        cluster.router.route(ask(tokens(5), root=PromptRoot("m", "no-such-adapter")))
    with pytest.raises(NoWorkerError):
        cluster.router.route(replace(ask(tokens(5)), excluded=frozenset({A, B})))
    for worker_id in (A, B):
        cluster.registry.set_ready(worker_id, False, "down")
    with pytest.raises(NoWorkerError) as raised:
        cluster.router.route(ask(tokens(5)))
    assert (raised.value.model, raised.value.num_known) == ("m", 2)


def test_workers_too_small_for_the_prompt_are_left_out() -> None:
    cluster = Cluster()
    cluster.add(A, served(max_model_len=100))
    cluster.add(B, served(max_model_len=101))
    cluster.store(A, tokens(96))
    assert cluster.router.route(ask(tokens(99))).worker_id == A
    assert cluster.router.route(ask(tokens(100))).worker_id == B
    with pytest.raises(PromptTooLongError) as raised:
        cluster.router.route(ask(tokens(101)))
    assert (raised.value.num_prompt_tokens, raised.value.max_model_len) == (101, 101)


def test_a_prompt_that_only_an_excluded_worker_holds_is_not_too_long() -> None:
    cluster = Cluster()
    cluster.add(A, served(max_model_len=1000))
    cluster.add(B, served(max_model_len=100))
    with pytest.raises(NoWorkerError):
        cluster.router.route(replace(ask(tokens(500)), excluded=frozenset({A})))


def test_limits_are_for_each_prompt_not_for_their_sum() -> None:
    cluster = Cluster()
    cluster.add(A, served(max_model_len=100))
    assert cluster.router.route(ask(tokens(90), tokens(90))).worker_id == A


def test_a_limit_that_is_not_known_is_no_limit() -> None:
    cluster = Cluster()
    cluster.add(A, served(max_model_len=None))
    assert cluster.router.route(ask(tokens(5000))).worker_id == A


def test_room_for_the_whole_answer_is_preferred_then_the_most_room() -> None:
    cluster = Cluster()
    for worker_id, limit in ((A, 100), (B, 300), (C, 200)):
        cluster.add(worker_id, served(max_model_len=limit))
    cluster.store(A, tokens(48))
    fits_all = replace(ask(tokens(49)), max_output_tokens=51)
    fits_two = replace(ask(tokens(49)), max_output_tokens=150)
    fits_none = replace(ask(tokens(49)), max_output_tokens=1000)
    assert cluster.router.route(fits_all).worker_id == A
    assert {each.worker_id for each in cluster.router.route(fits_two).candidates} == {B, C}
    assert [each.worker_id for each in cluster.router.route(fits_none).candidates] == [B]


def test_equal_costs_go_to_more_cached_tokens_then_to_fewer_running_requests() -> None:
    cluster = Cluster(A, B, C)
    prompt = tokens(161)
    cluster.store(C, prompt)
    cluster.registry.load(C).waiting_tokens = 160
    cluster.registry.load(A).num_running = 1
    decision = cluster.router.route(ask(prompt))
    assert [each.worker_id for each in decision.candidates] == [C, B, A]


def test_a_session_key_breaks_ties_the_same_way_each_time() -> None:
    cluster = Cluster(A, B, C)
    chosen = {}
    for number in range(30):
        query = ask(tokens(5, seed=number), session_key=f"session {number}")
        decisions = [cluster.router.route(query) for _ in range(5)]
        assert {each.reason for each in decisions} == {RouteReason.SESSION}
        (chosen[number],) = {each.worker_id for each in decisions}
    assert set(chosen.values()) == {A, B, C}
    cluster.registry.remove(C)
    for number, worker_id in chosen.items():
        again = cluster.router.route(ask(tokens(5), session_key=f"session {number}"))
        assert worker_id in (again.worker_id, C), "only the sessions of C may move"


def test_a_session_key_decides_nothing_else() -> None:
    cluster = Cluster(A, B)
    prompt = tokens(161)
    for number in range(10):
        query = ask(prompt, session_key=str(number))
        favourite = cluster.router.route(query).worker_id
        other = B if favourite == A else A
        cluster.registry.load(favourite).num_running = 1
        decision = cluster.router.route(query)
        assert (decision.worker_id, decision.reason) == (other, RouteReason.LOAD)
        cluster.registry.load(favourite).num_running = 0


def test_cold_requests_spread_over_idle_workers() -> None:
    cluster = Cluster(A, B, C)
    chosen = Counter(
        cluster.router.route(ask(tokens(50, seed=seed))).worker_id for seed in range(300)
    )
    assert min(chosen[worker_id] for worker_id in (A, B, C)) > 60


def test_cold_requests_go_to_each_idle_worker_in_turn() -> None:
    cluster = Cluster(A, B, C)
    chosen = []
    for seed in range(9):
        with cluster.reserve(ask(tokens(50, seed=seed))) as reservation:
            chosen.append(reservation.worker_id)
    assert set(chosen[:3]) == {A, B, C}
    assert chosen == chosen[:3] * 3


def test_a_request_that_finds_its_prefix_takes_no_turn() -> None:
    cluster = Cluster(A, B)
    warm = tokens(161, seed=99)
    cluster.store(A, warm)
    chosen = []
    for seed in range(4):
        with cluster.reserve(ask(tokens(50, seed=seed))) as reservation:
            chosen.append(reservation.worker_id)
        with cluster.reserve(ask(warm)) as reservation:
            assert reservation.worker_id == A
    assert chosen in ([A, B, A, B], [B, A, B, A])


def test_without_tokens_the_least_loaded_worker_wins() -> None:
    cluster = Cluster(A, B)
    cluster.registry.load(A).num_running = 1
    decision = cluster.router.route(ask())
    assert (decision.worker_id, decision.reason) == (B, RouteReason.NO_TOKENS)
    assert decision.predicted_cached_tokens is None
