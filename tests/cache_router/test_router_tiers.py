from __future__ import annotations

from dataclasses import replace

import pytest

from cache_router.cost import PrefillRate, Rates, TransferRate
from cache_router.types import Candidate, Medium, RouteReason, TierId, TokenIds, Trust, WorkerId
from cache_router.worker_registry import CacheSource, EventEndpoint
from tests.cache_router.cluster import A, B, C, Cluster, ask, joined, served, tokens

CACHE_A, CACHE_B = WorkerId("http://a:9#m"), WorkerId("http://b:9#m")
PROMPT = tokens(1_600)
# A thousand tokens a second; a block of 16 is loaded in a twentieth of the time it is computed in.
RATES = Rates(
    prefill=PrefillRate(fixed_s=0.0, per_token_s=1e-3, per_pair_s=0.0),
    transfer={
        tier: TransferRate(latency_s=1e-3, per_byte_s=8e-4 / 1_000)
        for tier in ("ram", "ssd", "redis")
    }
    | {"s3": TransferRate(latency_s=0.2, per_byte_s=8e-3 / 1_000)},
)


def source(source_id: WorkerId) -> CacheSource:
    return CacheSource(source_id, source_id, "m", 1_000, RATES, EventEndpoint("ipc:///none"))


def tiered(*, trust: Trust = Trust.EXACT) -> Cluster:
    """A and B each with a cache server on its node, C with none."""
    cluster = Cluster(A, B, C)
    for worker_id, source_id in ((A, CACHE_A), (B, CACHE_B)):
        cluster.registry.update_cache_source(source(source_id))
        cluster.registry.set_trust(source_id, trust, "told by the test")
        cluster.registry.update(worker_id, url=worker_id, models=[served()], cache_source=source_id)
    return cluster


def keep(cluster: Cluster, source_id: WorkerId, prompt: TokenIds, tier: TierId) -> None:
    medium = Medium.CPU if tier is TierId.RAM else Medium.STORAGE
    cluster.store(source_id, prompt, medium=medium, ownership=tier.value)


def candidates(cluster: Cluster) -> dict[WorkerId, Candidate]:
    decision = cluster.router.route(ask(PROMPT))
    return {candidate.worker_id: candidate for candidate in decision.candidates}


def test_what_a_nodes_cache_server_holds_counts_for_its_workers_at_its_price() -> None:
    cluster = tiered()
    keep(cluster, CACHE_A, PROMPT, TierId.RAM)
    decision = cluster.router.route(ask(PROMPT))
    assert (decision.worker_id, decision.reason) == (A, RouteReason.TIER)
    best = decision.candidates[0]
    # The last block is computed: without it there are no logits.
    assert best.tokens_by_tier == {TierId.RAM: 1_584}
    assert (best.cached_tokens, best.uncached_tokens) == (1_584, 16)
    assert 0 < best.load_tokens < 200
    assert best.cost_tokens == best.uncached_tokens + best.load_tokens
    assert candidates(cluster)[B].cached_tokens == candidates(cluster)[C].cached_tokens == 0


@pytest.mark.parametrize("tier", [TierId.REDIS, TierId.S3])
def test_a_shared_tier_serves_every_node_that_has_a_cache_server(tier: TierId) -> None:
    cluster = tiered()
    keep(cluster, CACHE_A, PROMPT, tier)
    found = candidates(cluster)
    assert found[A].cached_tokens == found[B].cached_tokens > 0
    assert found[C].cached_tokens == 0


def test_another_nodes_disk_is_out_of_reach() -> None:
    cluster = tiered()
    keep(cluster, CACHE_A, PROMPT, TierId.SSD)
    found = candidates(cluster)
    assert found[A].tokens_by_tier == {TierId.SSD: 1_584}
    assert found[B].cached_tokens == 0


def test_an_engine_continues_its_own_prefix_from_tiers_run_by_run() -> None:
    cluster = tiered()
    cluster.store(A, PROMPT[:160])
    keep(cluster, CACHE_A, PROMPT[:480], TierId.RAM)
    keep(cluster, CACHE_B, PROMPT[:800], TierId.REDIS)
    assert candidates(cluster)[A].tokens_by_tier == {
        TierId.GPU: 160,
        TierId.RAM: 320,
        TierId.REDIS: 320,
    }
    assert candidates(cluster)[B].tokens_by_tier == {TierId.REDIS: 800}


def test_a_hole_ends_what_can_be_loaded() -> None:
    cluster = tiered()
    keep(cluster, CACHE_A, PROMPT[:480], TierId.RAM)
    keep(cluster, CACHE_A, joined(tokens(16, seed=9), PROMPT[:480]), TierId.SSD)
    assert candidates(cluster)[A].cached_tokens == 480


def test_an_engines_own_copy_beats_a_load_and_a_load_beats_computing() -> None:
    cluster = tiered()
    keep(cluster, CACHE_B, PROMPT, TierId.RAM)
    cluster.store(A, PROMPT)
    decision = cluster.router.route(ask(PROMPT))
    assert [c.worker_id for c in decision.candidates] == [A, B, C]
    assert decision.reason is RouteReason.PREFIX


def test_a_load_that_costs_more_than_computing_is_not_counted() -> None:
    cluster = tiered()
    slow = replace(RATES, transfer={"s3": TransferRate(latency_s=9.0, per_byte_s=1.0)})
    cluster.registry.update_cache_source(replace(source(CACHE_A), rates=slow))
    keep(cluster, CACHE_A, PROMPT, TierId.S3)
    assert candidates(cluster)[A].cached_tokens == 0
    assert candidates(cluster)[A].load_tokens == 0


def test_a_cache_server_that_cannot_be_believed_counts_for_nothing() -> None:
    cluster = tiered(trust=Trust.LOAD_ONLY)
    keep(cluster, CACHE_A, PROMPT, TierId.RAM)
    assert all(candidate.cached_tokens == 0 for candidate in candidates(cluster).values())


def test_a_forgotten_cache_server_counts_for_nothing() -> None:
    cluster = tiered()
    keep(cluster, CACHE_A, PROMPT, TierId.RAM)
    cluster.registry.remove_cache_source(CACHE_A)
    assert candidates(cluster)[A].cached_tokens == 0


def test_waiting_tokens_send_a_request_to_a_node_that_can_load() -> None:
    cluster = tiered()
    cluster.store(A, PROMPT)
    keep(cluster, CACHE_B, PROMPT, TierId.REDIS)
    cluster.registry.load(A).waiting_tokens = 1_000
    decision = cluster.router.route(ask(PROMPT))
    assert (decision.worker_id, decision.reason) == (B, RouteReason.TIER)
