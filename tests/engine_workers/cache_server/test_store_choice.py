from __future__ import annotations

from tests.engine_workers.cache_server.conftest import Clock, Serve, until
from tests.engine_workers.cache_server.memory_tier import MemoryTier
from tests.engine_workers.cache_server.wire_client import BLOCK_BYTES, hashes


async def test_what_is_saved_goes_on_to_every_tier_that_has_room(serve: Serve) -> None:
    ssd, s3 = MemoryTier("ssd"), MemoryTier("s3", is_shared=True)
    async with serve(ssd, s3) as running:
        client = await running.client()
        await client.look_up(hashes(20))
        await client.save(range(1, 21))
        await running.parts.writer.drain()
        assert len(ssd.blocks) == len(s3.blocks) == 20


async def test_a_tiers_write_budget_holds_and_what_is_left_out_is_counted(
    serve: Serve, clock: Clock
) -> None:
    ssd = MemoryTier("ssd")
    async with serve(ssd, ssd_write_bytes_per_s=10 * BLOCK_BYTES) as running:
        client = await running.client()
        await client.save(range(1, 101))
        await running.parts.writer.drain()
        # The budget holds four seconds at first.
        assert len(ssd.blocks) == 40
        assert (
            running.count(
                "radixgate_cache_operations_total",
                tier="ssd",
                operation="save",
                result="over_budget",
            )
            == 60
        )
        clock.now += 1.0
        await client.save(range(101, 151))
        await running.parts.writer.drain()
        assert len(ssd.blocks) == 50


async def test_what_was_left_out_is_written_when_it_is_asked_for_and_the_budget_allows(
    serve: Serve, clock: Clock
) -> None:
    ssd = MemoryTier("ssd")
    async with serve(ssd, ssd_write_bytes_per_s=BLOCK_BYTES) as running:
        client = await running.client()
        await client.save(range(1, 9))
        await running.parts.writer.drain()
        assert len(ssd.blocks) == 4
        clock.now += 60.0
        staged = await client.look_up(hashes(8))
        assert staged.num_blocks == 8
        await until(lambda: len(ssd.blocks) == 8)


async def test_blocks_are_not_written_to_a_tier_that_is_slower_than_computing(
    serve: Serve,
) -> None:
    s3 = MemoryTier("s3", is_shared=True)
    async with serve(s3) as running:
        client = await running.client()
        planner, namespace = running.parts.planner, client.hello.namespace.fingerprint
        for _ in range(20):
            planner.note_prefill(namespace, 0, 2048, 0.2)
            planner.note_load("s3", 100 * BLOCK_BYTES, 60.0)
        await client.save(range(1, 11))
        await running.parts.writer.drain()
        assert s3.blocks == {}
        assert len(running.parts.catalog) == 10
