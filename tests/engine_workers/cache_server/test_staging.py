from __future__ import annotations

import asyncio

import pytest

from engine_workers.blocks.block_header import BlockHeader
from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_wire import Lookup, Put, Staged, Staging
from tests.engine_workers.cache_server.conftest import Running, Serve, until
from tests.engine_workers.cache_server.memory_tier import MemoryTier
from tests.engine_workers.cache_server.wire_client import (
    BLOCK_BYTES,
    block_hash,
    hashes,
    header,
    namespace,
    payload,
)


def filled(tier: MemoryTier, *numbers: int) -> MemoryTier:
    for number in numbers:
        block = header(number, namespace())
        tier.blocks[block.name] = (block, payload(number))
    return tier


@pytest.fixture
def ssd() -> MemoryTier:
    return MemoryTier("ssd")


@pytest.fixture
def s3() -> MemoryTier:
    return MemoryTier("s3", is_shared=True)


def loads(running: Running, tier: str, result: str) -> float:
    return running.count(
        "radixgate_cache_operations_total", tier=tier, operation="load", result=result
    )


async def test_a_prefix_is_the_longest_over_the_union_of_arena_and_tiers(
    serve: Serve, ssd: MemoryTier, s3: MemoryTier
) -> None:
    async with serve(filled(ssd, 2, 4), filled(s3, 3, 6)) as running:
        client = await running.client()
        await client.save([1])
        staged = await client.look_up(hashes(6))
        assert staged.num_blocks == 4
        assert staged.sources == ["engine", "ssd", "s3", "ssd"]
        assert [client.read(offset) for offset in staged.offsets] == [
            payload(n) for n in range(1, 5)
        ]


async def test_the_engine_is_told_when_blocks_are_on_their_way(
    serve: Serve, ssd: MemoryTier
) -> None:
    async with serve(filled(ssd, 1), stage_deadline_s=7) as running:
        client = await running.client()
        await client.send(Lookup("r", hashes(1), 0, 128))
        assert (await client.receive(Staging)).wait_s == 7
        assert (await client.receive(Staged)).num_blocks == 1


async def test_what_is_behind_a_gap_is_not_loaded(serve: Serve, ssd: MemoryTier) -> None:
    async with serve(filled(ssd, 1, 3, 4)) as running:
        client = await running.client()
        assert (await client.look_up(hashes(4))).num_blocks == 1
        assert ssd.num_loads == 1


async def test_lookups_of_the_same_blocks_share_one_load(serve: Serve, ssd: MemoryTier) -> None:
    async with serve(filled(ssd, 1, 2)) as running:
        ssd.loads.clear()
        clients = [await running.client(engine_id=name) for name in ("a", "b", "c")]
        waiting = [asyncio.create_task(client.look_up(hashes(2))) for client in clients]
        await until(lambda: ssd.num_running_loads == 2)
        await asyncio.sleep(0)
        ssd.loads.set()
        assert {(await staged).num_blocks for staged in waiting} == {2}
        assert ssd.num_loads == 2


async def test_a_tier_that_does_not_answer_in_time_is_not_waited_for(
    serve: Serve, ssd: MemoryTier, s3: MemoryTier
) -> None:
    s3.answers.clear()
    async with serve(filled(ssd, 1), filled(s3, 1, 2), lookup_deadline_s=0.01) as running:
        client = await running.client()
        assert (await client.look_up(hashes(2))).num_blocks == 1
        assert running.count(
            "radixgate_cache_operations_total", tier="s3", operation="contains", result="late"
        )


async def test_what_a_tier_says_too_late_serves_the_next_prompt_that_begins_alike(
    serve: Serve, s3: MemoryTier
) -> None:
    s3.answers.clear()
    async with serve(filled(s3, 1, 2), lookup_deadline_s=0.01) as running:
        client = await running.client()
        assert (await client.look_up(hashes(2))).num_blocks == 0
        s3.answers.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        s3.answers.clear()
        assert (await client.look_up(hashes(2))).num_blocks == 2
        s3.answers.set()


async def test_what_is_remembered_and_gone_is_a_miss_once(serve: Serve, s3: MemoryTier) -> None:
    s3.answers.clear()
    async with serve(filled(s3, 1), lookup_deadline_s=0.01) as running:
        client = await running.client()
        await client.look_up(hashes(1))
        s3.answers.set()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        s3.answers.clear()
        s3.blocks.clear()
        assert (await client.look_up(hashes(1))).num_blocks == 0
        assert s3.num_loads == 1
        assert (await client.look_up(hashes(1))).num_blocks == 0
        assert s3.num_loads == 1
        s3.answers.set()


async def test_a_tier_that_hangs_is_asked_only_so_often(serve: Serve, s3: MemoryTier) -> None:
    s3.answers.clear()
    async with serve(s3, lookup_deadline_s=0.001) as running:
        client = await running.client()
        for _ in range(100):
            assert (await client.look_up(hashes(1))).num_blocks == 0
        assert s3.num_questions == 32
        s3.answers.set()


async def test_at_the_stage_deadline_the_answer_is_what_is_there(
    serve: Serve, ssd: MemoryTier, s3: MemoryTier
) -> None:
    s3.loads.clear()
    async with serve(filled(ssd, 1), filled(s3, 2), stage_deadline_s=0.05) as running:
        client = await running.client()
        assert (await client.look_up(hashes(2))).num_blocks == 1
        s3.loads.set()
        await until(lambda: len(running.parts.catalog) == 2)
        assert (await client.look_up(hashes(2))).num_blocks == 2


async def test_a_slow_tier_is_hedged_by_another_one_that_has_the_block(
    serve: Serve, ssd: MemoryTier, s3: MemoryTier
) -> None:
    ssd.loads.clear()
    async with serve(filled(ssd, 1), filled(s3, 1)) as running:
        client = await running.client()
        staged = await client.look_up(hashes(1))
        assert (staged.num_blocks, staged.sources) == (1, ["s3"])
        # The slow one still writes into a slot of its own, which nobody else gets.
        assert running.parts.arena.slots.used_bytes == 2 * 12_288
        ssd.loads.set()
        await until(lambda: running.parts.arena.slots.used_bytes == 12_288)
        assert client.read(staged.offsets[0]) == payload(1)


async def test_a_block_that_one_tier_lost_comes_from_the_next(
    serve: Serve, ssd: MemoryTier, s3: MemoryTier
) -> None:
    filled(ssd, 1)
    (name,) = ssd.blocks
    ssd.blocks[name] = (header(1, namespace()), b"\0" * 10_000)
    async with serve(ssd, filled(s3, 1)) as running:
        client = await running.client()
        staged = await client.look_up(hashes(1))
        assert client.read(staged.offsets[0]) == payload(1)
        assert loads(running, "ssd", "lost") == 1
        assert loads(running, "s3", "ok") == 1


async def test_a_tier_that_answers_with_another_block_is_not_believed(
    serve: Serve, ssd: MemoryTier
) -> None:
    class Confused(MemoryTier):
        async def load_into(self, name: BlockName, payload: memoryview) -> BlockHeader:
            return header(2, namespace())

    confused = Confused("ssd")
    async with serve(filled(confused, 1)) as running:
        client = await running.client()
        assert (await client.look_up(hashes(1))).num_blocks == 0
        assert running.parts.arena.slots.used_bytes == 0


async def test_a_tier_that_is_down_is_a_miss(serve: Serve, ssd: MemoryTier) -> None:
    async with serve(filled(ssd, 1)) as running:
        ssd.is_down = True
        client = await running.client()
        assert (await client.look_up(hashes(1))).num_blocks == 0
        assert (await client.save([2])).num_kept == 1
        await running.parts.writer.drain()
        ssd.is_down = False
        assert (await client.look_up(hashes(2))).num_blocks == 2


async def test_a_lookup_ends_with_its_connection_and_holds_nothing(
    serve: Serve, ssd: MemoryTier
) -> None:
    ssd.loads.clear()
    async with serve(filled(ssd, 1, 2)) as running:
        client = await running.client()
        await client.send(Lookup("r", hashes(2), 0, 256))
        await until(lambda: ssd.num_running_loads == 2)
        client.close()
        await until(lambda: running.server.num_connections == 0)
        ssd.loads.set()
        await until(lambda: len(running.parts.catalog) == 2)
        assert all(block.num_pins == 0 for block in running.parts.catalog.published())
        assert running.parts.leases.num_held == 0


async def test_a_hanging_tier_takes_only_a_few_slots_of_the_arena(
    serve: Serve, ssd: MemoryTier
) -> None:
    ssd.loads.clear()
    async with serve(filled(ssd, *range(1, 101)), stage_deadline_s=0.05) as running:
        client = await running.client()
        assert (await client.look_up(hashes(100))).num_blocks == 0
        assert running.parts.arena.slots.used_bytes == 16 * 12_288
        assert (await client.save(range(200, 300))).num_kept == 100
        ssd.loads.set()


async def test_a_prefix_larger_than_the_arena_is_cut_where_it_is_full(
    serve: Serve, ssd: MemoryTier
) -> None:
    async with serve(filled(ssd, *range(1, 101)), num_slots=64) as running:
        client = await running.client()
        staged = await client.look_up(hashes(100))
        assert staged.num_blocks == 64
        assert [client.read(offset) for offset in staged.offsets] == [
            payload(n) for n in range(1, 65)
        ]


async def test_what_is_saved_is_written_through_to_every_tier(
    serve: Serve, ssd: MemoryTier, s3: MemoryTier
) -> None:
    async with serve(ssd, s3) as running:
        client = await running.client()
        await client.save([1, 2])
        await running.parts.writer.drain()
        assert [data for _, data in ssd.blocks.values()] == [payload(1), payload(2)]
        assert ssd.blocks == s3.blocks


async def test_what_came_from_far_is_kept_nearby_but_not_sent_elsewhere(
    serve: Serve, ssd: MemoryTier, s3: MemoryTier
) -> None:
    redis = MemoryTier("redis", is_shared=True)
    async with serve(ssd, redis, filled(s3, 1)) as running:
        client = await running.client()
        await client.look_up(hashes(1))
        await running.parts.writer.drain()
        assert (len(ssd.blocks), len(redis.blocks)) == (1, 0)


async def test_a_tier_that_takes_nothing_costs_dropped_saves_and_no_engine_waits(
    serve: Serve, ssd: MemoryTier
) -> None:
    ssd.stores.clear()
    async with serve(ssd, num_slots=64) as running:
        client = await running.client()
        assert (await client.save(range(1, 41))).num_kept == 40
        dropped = running.count(
            "radixgate_cache_operations_total", tier="ssd", operation="save", result="backpressure"
        )
        num_waiting = running.parts.arena.num_bytes // 8 // BLOCK_BYTES
        assert dropped == 40 - num_waiting
        ssd.stores.set()
        await running.parts.writer.drain()
        assert len(ssd.blocks) == num_waiting


async def test_forgotten_blocks_are_removed_from_the_tiers_too(
    serve: Serve, ssd: MemoryTier
) -> None:
    async with serve(ssd) as running:
        client = await running.client()
        await client.save([1, 2])
        await running.parts.writer.drain()
        await client.forget(1)
        await client.look_up([])
        await running.parts.writer.drain()
        assert [name.block_hash for name in ssd.blocks] == [block_hash(2)]
        assert (await client.look_up(hashes(2))).num_blocks == 0


async def test_a_block_that_an_engine_saves_while_a_tier_loads_it_is_there_once(
    serve: Serve, ssd: MemoryTier
) -> None:
    ssd.loads.clear()
    async with serve(filled(ssd, 1)) as running:
        reader = await running.client(engine_id="reader")
        writer = await running.client(engine_id="writer")
        waiting = asyncio.create_task(reader.look_up(hashes(1)))
        await until(lambda: ssd.num_running_loads == 1)
        writer.write(0, header(1, namespace()), payload(1))
        await writer.send(Put([0], hashes(1)))
        await until(lambda: len(running.parts.catalog) == 1)
        ssd.loads.set()
        staged = await waiting
        assert reader.read(staged.offsets[0]) == payload(1)
        assert running.parts.arena.slots.used_bytes == 12_288
