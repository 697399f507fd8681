from __future__ import annotations

import pytest

from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.load_planner import AskedPrefix, LoadPlanner
from tests.engine_workers.cache_server.conftest import Serve
from tests.engine_workers.cache_server.memory_tier import MemoryTier
from tests.engine_workers.cache_server.wire_client import hashes, header, namespace, payload

ENGINE = Fingerprint(b"engine")
MIB = 1024 * 1024
ASKED = AskedPrefix(ENGINE, block_size=128, block_bytes=MIB, num_local_blocks=0, num_tokens=4000)


@pytest.fixture
def planner() -> LoadPlanner:
    learned = LoadPlanner(CacheMetrics())
    for _ in range(20):
        learned.note_prefill(ENGINE, 0, 2000, 5.0)
        learned.note_prefill(ENGINE, 2000, 1000, 2.5)
    return learned


def test_blocks_that_come_faster_than_they_are_computed_are_loaded(planner: LoadPlanner) -> None:
    assert planner.num_worth_loading(ASKED, ["ram"] * 5 + ["ssd"] * 20) == 25


def test_blocks_of_a_tier_that_was_measured_to_be_slower_than_computing_are_not(
    planner: LoadPlanner,
) -> None:
    for _ in range(30):
        planner.note_load("s3", 10 * MIB, 60.0)
    assert planner.num_worth_loading(ASKED, ["ssd"] * 5 + ["s3"] * 20) == 5


def test_a_tier_that_is_not_worth_it_is_measured_again_now_and_then(planner: LoadPlanner) -> None:
    for _ in range(30):
        planner.note_load("s3", 10 * MIB, 60.0)
    asked = [planner.num_worth_loading(ASKED, ["s3"] * 20) for _ in range(64)]
    assert asked.count(20) == 2
    assert asked.count(0) == 62


def test_a_slow_tier_that_gets_nothing_any_more_is_tried_anew_after_many_blocks(
    planner: LoadPlanner,
) -> None:
    for _ in range(30):
        planner.note_load("s3", 10 * MIB, 60.0)
    num_refused = 0
    while planner.saved_seconds(ENGINE, "s3", 128, MIB) < 0:
        planner.note_refused("s3")
        num_refused += 1
    assert num_refused == 4096


def test_a_block_of_a_fast_tier_saves_nearly_what_computing_it_takes(planner: LoadPlanner) -> None:
    assert 0.2 < planner.saved_seconds(ENGINE, "ssd", 128, MIB) < 0.5
    unknown = Fingerprint(b"unknown")
    assert not planner.knows_prefill(unknown)
    assert planner.saved_seconds(unknown, "s3", 128, 10**12) > 0


def test_what_a_namespaces_engines_were_measured_to_take_counts_for_them_only(
    planner: LoadPlanner,
) -> None:
    fast = Fingerprint(b"fast")
    for _ in range(30):
        planner.note_prefill(fast, 0, 2000, 0.002)
        planner.note_prefill(fast, 2000, 1000, 0.001)
    asked = AskedPrefix(fast, 128, MIB, 0, 4000)
    assert planner.num_worth_loading(asked, ["ssd"] * 20) == 0
    assert planner.num_worth_loading(ASKED, ["ssd"] * 20) == 20


async def test_what_is_not_worth_it_is_not_staged(serve: Serve) -> None:
    s3 = MemoryTier("s3", is_shared=True)
    for number in (1, 2, 3):
        block = header(number, namespace())
        s3.blocks[block.name] = (block, payload(number))
    async with serve(s3) as running:
        for _ in range(30):
            running.parts.planner.note_load("s3", 10_000, 60.0)
        client = await running.client()
        assert (await client.look_up(hashes(3))).num_blocks == 0
        assert s3.num_loads == 0
        assert running.count("radixgate_cache_load_decisions_total", result="none") == 1
