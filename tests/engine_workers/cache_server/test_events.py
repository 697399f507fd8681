"""What gateways are told of a running server, by the gateway's own follower."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import numpy as np
import zmq.asyncio

from cache_router.cost import Rates
from cache_router.hashing import hash_blocks
from cache_router.types import PromptRoot
from cache_router.worker_registry import EventEndpoint
from engine_workers.cache_server.admin_wire import ClearBlocks
from engine_workers.cache_wire import Hello
from tests.cache_router.follower_bench import Bench, W
from tests.cache_router.follower_bench import running as following
from tests.engine_workers.cache_server.conftest import Running, Serve
from tests.engine_workers.cache_server.memory_tier import MemoryTier
from tests.engine_workers.cache_server.wire_client import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    WireClient,
    namespace,
    raw_connection,
)

# Every block of the wire client's chain has the same tokens.
PROMPT = np.tile(np.arange(BLOCK_SIZE, dtype=np.uint32), 100)


def held(bench: Bench) -> int:
    """Blocks of the prompt that the index knows to be here."""
    return bench.index.match(hash_blocks(PROMPT, BLOCK_SIZE, PromptRoot("m"))).get(W, 0)


@contextlib.asynccontextmanager
async def gateway(running: Running) -> AsyncIterator[Bench]:
    """Follow the one stream that the server has."""
    described = json.loads(running.parts.events.describe(lambda _: Rates()))
    (source,) = described["sources"]
    assert source["models"] == ["m"]
    assert source["block_bytes"] == BLOCK_BYTES
    context = zmq.asyncio.Context()
    bench = Bench(context)
    endpoint = EventEndpoint(source["endpoint"], source["replay_endpoint"])
    async with following(bench.follower(endpoint)):
        yield bench
    context.destroy(linger=0)


async def test_saved_blocks_are_told_and_evicted_ones_too(serve: Serve) -> None:
    async with serve(num_slots=64) as running:
        client = await running.client(served_models=["m"])
        await client.save(range(1, 11))
        async with gateway(running) as bench:
            await bench.until(lambda: held(bench) == 10)
            await client.save(range(11, 21))
            await bench.until(lambda: held(bench) == 20)
            await client.save(range(500, 600))
            num_left = sum(
                int.from_bytes(block.name.block_hash, "big") <= 20
                for block in running.parts.catalog.published()
            )
            assert num_left < 20
            await bench.until(lambda: held(bench) == num_left)


async def test_a_block_counts_until_it_has_left_its_last_tier(serve: Serve) -> None:
    ssd = MemoryTier("ssd")
    async with serve(ssd) as running:
        client = await running.client(served_models=["m"])
        await client.save([1, 2])
        await running.parts.writer.drain()
        hello = Hello(1, "none", "worker", namespace(), BLOCK_BYTES)
        operator = WireClient(await raw_connection(running.path), hello)
        running.clients.append(operator)
        async with gateway(running) as bench:
            await bench.until(lambda: held(bench) == 2)
            await operator.ask(ClearBlocks(["ram"]))
            await client.save([3])
            await bench.until(lambda: held(bench) == 3)
            await client.forget(2)
            await bench.until(lambda: held(bench) == 1)


async def test_what_a_tier_kept_from_an_earlier_life_is_told(serve: Serve) -> None:
    ssd = MemoryTier("ssd")
    async with serve(ssd) as running:
        client = await running.client()
        await client.save([1, 2, 3])
        await running.parts.writer.drain()
    async with serve(ssd) as running:
        await running.client(served_models=["m"])
        async with gateway(running) as bench:
            await bench.until(lambda: held(bench) == 3)


async def test_what_is_cleared_on_a_tier_is_told(serve: Serve) -> None:
    ssd = MemoryTier("ssd")
    async with serve(ssd) as running:
        client = await running.client(served_models=["m"])
        await client.save([1, 2])
        await running.parts.writer.drain()
        hello = Hello(1, "none", "worker", namespace(), BLOCK_BYTES)
        operator = WireClient(await raw_connection(running.path), hello)
        running.clients.append(operator)
        async with gateway(running) as bench:
            await bench.until(lambda: held(bench) == 2)
            await operator.ask(ClearBlocks(["ram", "ssd"]))
            await bench.until(lambda: held(bench) == 0)
