from __future__ import annotations

import pytest

from engine_workers.cache_server.admin_wire import (
    BlockList,
    Changed,
    ClearBlocks,
    Failed,
    GetStats,
    ListBlocks,
    PinBlocks,
    Question,
    Stats,
    UnpinBlocks,
    Verified,
    VerifyBlocks,
)
from engine_workers.cache_wire import Hello
from tests.engine_workers.cache_server.conftest import Running, Serve
from tests.engine_workers.cache_server.memory_tier import MemoryTier
from tests.engine_workers.cache_server.wire_client import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    WireClient,
    block_hash,
    hashes,
    namespace,
    payload,
    raw_connection,
)


async def operator(running: Running) -> WireClient:
    hello = Hello(1, "none", "worker", namespace(), BLOCK_BYTES)
    client = WireClient(await raw_connection(running.path), hello)
    running.clients.append(client)
    return client


async def test_stats_say_how_full_each_tier_is(serve: Serve) -> None:
    async with serve(MemoryTier("ssd")) as running:
        client = await running.client()
        await client.save([1, 2, 3])
        await client.look_up(hashes(2))
        await running.parts.writer.drain()
        stats = await (await operator(running)).ask(GetStats())
        assert isinstance(stats, Stats)
        assert (stats.num_engines, stats.num_leases, stats.num_pinned) == (1, 1, 0)
        assert [(tier.tier, tier.num_blocks) for tier in stats.tiers] == [("ram", 3), ("ssd", 3)]
        assert stats.tiers[1].used_bytes == 3 * BLOCK_BYTES


@pytest.mark.parametrize("tier", ["ram", "ssd"])
async def test_blocks_are_listed_without_their_token_ids(serve: Serve, tier: str) -> None:
    async with serve(MemoryTier("ssd")) as running:
        client = await running.client()
        await client.save([1, 2])
        await running.parts.writer.drain()
        listed = await (await operator(running)).ask(ListBlocks(tier, 10))
        assert isinstance(listed, BlockList)
        second = listed.blocks[1]
        assert second.block_hash == block_hash(2).hex()
        assert second.parent_hash == block_hash(1).hex()
        assert (second.num_tokens, second.payload_bytes) == (BLOCK_SIZE, BLOCK_BYTES)
        short = await (await operator(running)).ask(ListBlocks(tier, 1))
        assert isinstance(short, BlockList)
        assert len(short.blocks) == 1


async def test_verifying_drops_what_is_not_right_and_nothing_else(serve: Serve) -> None:
    ssd = MemoryTier("ssd")
    async with serve(ssd) as running:
        client = await running.client()
        await client.save([1, 2, 3])
        await running.parts.writer.drain()
        blocks = list(running.parts.catalog.published())
        blocks[0].payload[17] ^= 1
        name = blocks[1].name
        ssd.blocks[name] = (ssd.blocks[name][0], payload(9))
        asking = await operator(running)
        assert await asking.ask(VerifyBlocks(["ram", "ssd"])) == Verified(4, 2)
        assert await asking.ask(VerifyBlocks(["ram", "ssd"])) == Verified(4, 0)
        staged = await client.look_up(hashes(3))
        assert staged.sources == ["ssd", "engine", "engine"]
        assert [client.read(offset) for offset in staged.offsets] == [payload(n) for n in (1, 2, 3)]


async def test_pinned_blocks_stay_until_they_are_unpinned(serve: Serve) -> None:
    async with serve(num_slots=64) as running:
        client = await running.client()
        await client.save([1])
        asking = await operator(running)
        prefix = block_hash(1).hex()
        assert await asking.ask(PinBlocks([prefix])) == Changed(1)
        assert await asking.ask(PinBlocks([prefix])) == Changed(0)
        await client.save(range(1000, 1300))
        assert (await client.look_up(hashes(1))).num_blocks == 1
        assert await asking.ask(UnpinBlocks([prefix])) == Changed(1)
        assert await asking.ask(UnpinBlocks([prefix])) == Changed(0)


async def test_pins_leave_half_of_the_arena_to_others(serve: Serve) -> None:
    async with serve(num_slots=64) as running:
        client = await running.client()
        await client.save(range(1, 61))
        assert await (await operator(running)).ask(PinBlocks(["00"])) == Changed(32)
        assert (await client.save(range(100, 160))).num_kept == 60


async def test_an_empty_hash_pins_nothing(running: Running) -> None:
    await (await running.client()).save([1])
    assert await (await operator(running)).ask(PinBlocks(["", "ff"])) == Changed(0)


async def test_clearing_a_tier_leaves_the_others(serve: Serve) -> None:
    ssd = MemoryTier("ssd")
    async with serve(ssd) as running:
        client = await running.client()
        await client.save([1, 2])
        await running.parts.writer.drain()
        asking = await operator(running)
        await asking.ask(PinBlocks([block_hash(1).hex()]))
        assert await asking.ask(ClearBlocks(["ram"])) == Changed(2)
        assert running.parts.arena.slots.used_bytes == 0
        assert len(ssd.blocks) == 2
        assert await asking.ask(ClearBlocks(["ssd"])) == Changed(2)
        assert (await client.look_up(hashes(2))).num_blocks == 0


@pytest.mark.parametrize(
    "question", [ListBlocks("tape", 1), VerifyBlocks(["tape"]), ClearBlocks(["tape"])]
)
async def test_an_unknown_tier_is_named(running: Running, question: Question) -> None:
    answer = await (await operator(running)).ask(question)
    assert isinstance(answer, Failed)
    assert "'tape'" in answer.reason


async def test_a_tier_that_is_down_is_named(serve: Serve) -> None:
    s3 = MemoryTier("s3", is_shared=True)
    async with serve(s3) as running:
        client = await running.client()
        await client.save([1])
        await running.parts.writer.drain()
        s3.is_down = True
        assert await (await operator(running)).ask(VerifyBlocks(["s3"])) == Failed(
            "tier s3: is down"
        )
