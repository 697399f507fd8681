from __future__ import annotations

import pytest

from cache_router.types import (
    PromptRoot,
    Trust,
)
from tests.cache_router.cluster import (
    ROOT,
    A,
    B,
    Cluster,
    ask,
    joined,
    served,
    tokens,
)


@pytest.mark.parametrize(("num_tokens", "cached"), [(320, 304), (321, 320), (16, 0), (17, 16)])
def test_the_last_prompt_token_is_always_computed(num_tokens: int, cached: int) -> None:
    cluster = Cluster(A)
    cluster.store(A, tokens(320))
    decision = cluster.router.route(ask(tokens(321)[:num_tokens]))
    assert decision.predicted_cached_tokens == cached


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
