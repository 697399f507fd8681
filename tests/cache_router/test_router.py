from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest

from cache_router.errors import NoWorkerError, PromptTooLongError, UnknownModelError
from cache_router.hashing import hash_blocks
from cache_router.kv_events import BlockStored
from cache_router.predictions import Predictions
from cache_router.radix_index import RadixIndex
from cache_router.reservation import Reservation
from cache_router.router import CacheRouter
from cache_router.types import (
    Candidate,
    Medium,
    PromptRoot,
    RouteQuery,
    RouteReason,
    TokenIds,
    Trust,
    WorkerId,
)
from cache_router.worker_registry import ServedModel, WorkerLoad, WorkerRegistry

BLOCK_SIZE = 16
A, B, C = WorkerId("http://a:1"), WorkerId("http://b:1"), WorkerId("http://c:1")
ROOT = PromptRoot("m")


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def served(
    name: str = "m", max_model_len: int | None = 10_000, parent: str | None = None
) -> ServedModel:
    return ServedModel(name, name, max_model_len, parent, 0, "vllm")


class Cluster:
    """A router over workers that a test describes."""

    def __init__(self, *workers: WorkerId, seed: int = 1) -> None:
        self.clock = Clock()
        self.registry = WorkerRegistry()
        self.index = RadixIndex(max_blocks=1_000_000)
        self.predictions = Predictions(self.clock, ttl_s=5.0)
        self.router = CacheRouter(self.registry, self.index, self.predictions, Random(seed))
        for worker_id in workers:
            self.add(worker_id)

    def add(self, worker_id: WorkerId, *models: ServedModel) -> None:
        self.registry.update(worker_id, url=worker_id, models=models or [served()])
        self.registry.set_ready(worker_id, True, "answers")
        self.registry.set_trust(worker_id, Trust.EXACT, "all events applied")

    def store(
        self,
        worker_id: WorkerId,
        tokens: TokenIds,
        *,
        block_size: int = BLOCK_SIZE,
        medium: Medium = Medium.GPU,
        model: str = "m",
        root: PromptRoot = ROOT,
    ) -> None:
        """Report a sequence as cached, as the engine would."""
        num_blocks = len(tokens) // block_size
        lora = [] if root.lora_name is None else [root.lora_name]
        salt = [] if root.cache_salt is None else [root.cache_salt]
        self.index.apply(
            worker_id,
            BlockStored(
                list(hash_blocks(tokens, block_size, root)),
                None,
                tokens[: num_blocks * block_size].tolist(),
                block_size,
                medium,
                root.lora_name,
                [lora + salt if i == 0 else lora for i in range(num_blocks)],
            ),
            model,
        )

    def candidate(self, query: RouteQuery, worker_id: WorkerId) -> Candidate:
        decision = self.router.route(query)
        return next(each for each in decision.candidates if each.worker_id == worker_id)

    def load(self, worker_id: WorkerId) -> tuple[int, int]:
        """Running requests and waiting tokens."""
        load = self.registry.load(worker_id)
        return load.num_running, load.waiting_tokens

    def reserve(self, query: RouteQuery) -> Reservation:
        return self.router.reserve(query, self.router.route(query))


def tokens(num_tokens: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens, dtype=np.uint32)


def ask(*prompts: TokenIds, root: PromptRoot = ROOT, session_key: str | None = None) -> RouteQuery:
    return RouteQuery(root, prompts, session_key=session_key)


def joined(*parts: TokenIds) -> TokenIds:
    return np.concatenate(parts)


# --- what a worker has ---


def test_the_holder_of_the_longest_prefix_wins() -> None:
    cluster = Cluster(A, B, C)
    prompt = tokens(400)
    cluster.store(A, prompt[:160])
    cluster.store(B, prompt[:320])
    decision = cluster.router.route(ask(prompt))
    assert (decision.worker_id, decision.reason) == (B, RouteReason.PREFIX)
    assert decision.predicted_cached_tokens == 320
    assert [each.worker_id for each in decision.candidates] == [B, A, C]
    assert decision.candidates[0] == Candidate(B, 320, 80, 0, 0, Trust.EXACT)


@pytest.mark.parametrize(("num_tokens", "cached"), [(320, 304), (321, 320), (16, 0), (17, 16)])
def test_the_last_prompt_token_is_always_computed(num_tokens: int, cached: int) -> None:
    cluster = Cluster(A)
    cluster.store(A, tokens(320))
    decision = cluster.router.route(ask(tokens(321)[:num_tokens]))
    assert decision.predicted_cached_tokens == cached


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


def test_a_slower_medium_is_named_as_a_tier() -> None:
    cluster = Cluster(A)
    cluster.store(A, tokens(160), medium=Medium.CPU)
    assert cluster.router.route(ask(tokens(161))).reason is RouteReason.TIER
    cluster.store(A, tokens(160))
    assert cluster.router.route(ask(tokens(161))).reason is RouteReason.PREFIX


@pytest.mark.parametrize(
    "other",
    [PromptRoot("m", cache_salt="x"), PromptRoot("m", "ad"), PromptRoot("m", "ad", "x")],
)
def test_salts_and_adapters_separate(other: PromptRoot) -> None:
    cluster = Cluster()
    models = [served(), served("ad", None, "m")]
    cluster.add(A, *models)
    cluster.add(B, *models)
    prompt = tokens(161)
    cluster.store(A, prompt, root=ROOT)
    cluster.store(B, prompt, root=other)
    for root, holder in ((ROOT, A), (other, B)):
        decision = cluster.router.route(ask(prompt, root=root))
        assert (decision.worker_id, decision.predicted_cached_tokens) == (holder, 160)
        assert [each.cached_tokens for each in decision.candidates] == [160, 0]


def test_workers_with_different_block_sizes_are_compared_in_tokens() -> None:
    cluster = Cluster(A, B)
    prompt = tokens(200)
    cluster.store(A, prompt, block_size=16)
    cluster.store(B, prompt, block_size=64)
    query = ask(prompt)
    assert cluster.candidate(query, A).cached_tokens == 192
    assert cluster.candidate(query, B).cached_tokens == 192
    longer = ask(joined(prompt[:140], tokens(60, seed=1)))
    assert cluster.candidate(longer, A).cached_tokens == 128
    assert cluster.candidate(longer, B).cached_tokens == 128
    shorter = ask(prompt[:127])
    assert cluster.candidate(shorter, A).cached_tokens == 112
    assert cluster.candidate(shorter, B).cached_tokens == 64


def test_several_prompts_go_to_one_worker_and_add_up() -> None:
    cluster = Cluster(A, B)
    prompts = [tokens(100, seed=1), tokens(100, seed=2), tokens(32, seed=3)]
    cluster.store(A, prompts[0])
    cluster.store(B, prompts[1][:32])
    cluster.store(B, prompts[2])
    query = ask(*prompts)
    assert cluster.router.route(query).worker_id == A
    assert cluster.candidate(query, A).cached_tokens == 96
    assert cluster.candidate(query, B).cached_tokens == 32 + 16
    assert cluster.candidate(query, B).uncached_tokens == 232 - 48


def test_a_worker_hashes_with_its_own_name_for_a_model_that_has_several() -> None:
    cluster = Cluster()
    cluster.add(A, served("path/m"), served("m"))
    cluster.store(A, tokens(160), model="path/m", root=PromptRoot("path/m"))
    assert cluster.router.route(ask(tokens(161))).predicted_cached_tokens == 160


def test_degraded_entries_count_and_load_only_ones_do_not() -> None:
    cluster = Cluster(A, B)
    prompt = tokens(161)
    cluster.store(A, prompt)
    cluster.registry.set_trust(A, Trust.DEGRADED, "lost some")
    assert cluster.candidate(ask(prompt), A).cached_tokens == 160
    cluster.registry.set_trust(A, Trust.LOAD_ONLY, "stream broke")
    assert cluster.candidate(ask(prompt), A).cached_tokens == 0


def test_of_a_load_only_worker_nothing_is_predicted_but_what_was_routed() -> None:
    cluster = Cluster(A)
    cluster.registry.set_trust(A, Trust.LOAD_ONLY, "no events")
    query = ask(tokens(161))
    assert cluster.router.route(query).predicted_cached_tokens is None
    with cluster.reserve(query):
        assert cluster.router.route(query).predicted_cached_tokens == 160


# --- who may be chosen ---


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


# --- ties ---


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


# --- load and prediction ---


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
        assert cluster.candidate(sibling, A) == Candidate(A, 160, 30, 40, 1, Trust.EXACT)
        stranger = ask(tokens(30, seed=3))
        assert cluster.candidate(stranger, A) == Candidate(A, 0, 30, 200, 1, Trust.EXACT)
        cluster.store(A, shared[:64])  # half way, events have come for a part
        assert cluster.candidate(sibling, A).waiting_tokens == 200 - 96
        reservation.prefill_done()
        cluster.registry.load(A).waiting_tokens = 500  # others, that share nothing
        assert cluster.candidate(sibling, A) == Candidate(A, 160, 30, 500, 1, Trust.EXACT)


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
