"""The publisher against the gateway's own follower, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import zmq.asyncio

from cache_router.types import TierId, Trust
from cache_router.worker_registry import EventEndpoint
from engine_workers.blocks.block_header import BlockHeader, Codec
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_server.kv_event_publisher import KvEventPublisher, Located
from tests.cache_router.follower_bench import Bench, W, chain, running

SPACE = Fingerprint(b"n" * 16)


def block(*numbers: int) -> BlockHeader:
    """The last of these blocks of two tokens."""
    parent = repr(numbers[:-1]).encode() if len(numbers) > 1 else None
    return BlockHeader(
        BlockName(SPACE, repr(numbers).encode()),
        parent,
        (numbers[-1], numbers[-1]),
        (),
        None,
        Codec.RAW,
        8,
        0,
    )


class Store:
    """What is there, told to a publisher as it changes."""

    def __init__(self) -> None:
        self.located: list[Located] = []
        self.publisher: KvEventPublisher | None = None

    def put(self, *numbers: int, tier: TierId = TierId.RAM) -> None:
        located = Located(block(*numbers), tier)
        self.located.append(located)
        if self.publisher is not None:
            self.publisher.stored(located)

    def drop(self, *numbers: int, tier: TierId = TierId.RAM) -> None:
        self.located.remove(Located(block(*numbers), tier))
        if self.publisher is not None:
            self.publisher.removed(block(*numbers).name.block_hash, tier)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    context = zmq.asyncio.Context()
    yield Bench(context)
    context.destroy(linger=0)


@asynccontextmanager
async def publishing(
    bench: Bench, store: Store, folder: Path, *, buffer_steps: int = 100
) -> AsyncIterator[EventEndpoint]:
    publisher = KvEventPublisher(
        bench.context,
        f"ipc://{folder}/events",
        f"ipc://{folder}/replay",
        lambda: list(store.located),
        lambda: 1.0,
        buffer_steps,
    )
    store.publisher = publisher
    task = asyncio.create_task(publisher.run())
    try:
        yield EventEndpoint(publisher.endpoint, publisher.replay_endpoint)
    finally:
        store.publisher = None
        task.cancel()
        await asyncio.wait({task})


async def test_what_is_stored_and_removed_is_followed_by_tier(bench: Bench, tmp_path: Path) -> None:
    store = Store()
    async with (
        publishing(bench, store, tmp_path) as endpoint,
        running(bench.follower(endpoint)),
    ):
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        store.put(1)
        store.put(1, tier=TierId.S3)
        store.put(1, 2, tier=TierId.SSD)
        await bench.until(lambda: bench.held(1, 2) == 2)
        spans = bench.index.spans(chain(1, 2))
        lanes = bench.index.lane(W)
        assert [bench.index.fastest_tier(s.holders, lanes) for s in spans] == [
            TierId.RAM,
            TierId.SSD,
        ]
        store.drop(1)
        await bench.until(
            lambda: (
                bench.index.fastest_tier(bench.index.spans(chain(1))[0].holders, lanes) is TierId.S3
            )
        )
        store.drop(1, 2, tier=TierId.SSD)
        await bench.until(lambda: bench.held(1, 2) == 1)


async def test_what_was_there_before_anyone_listened_is_told(bench: Bench, tmp_path: Path) -> None:
    store = Store()
    # Children first, as a disk's index may have them, and one without a parent.
    store.put(1, 2, 3, tier=TierId.SSD)
    store.put(9, 9, tier=TierId.SSD)
    store.put(1, 2, tier=TierId.SSD)
    store.put(1, tier=TierId.SSD)
    async with (
        publishing(bench, store, tmp_path) as endpoint,
        running(bench.follower(endpoint)) as follower,
    ):
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        assert bench.held(1, 2, 3) == 3
        assert follower.stats.orphan_events == 0


async def test_a_late_joiner_beyond_the_buffer_is_exact(bench: Bench, tmp_path: Path) -> None:
    store = Store()
    async with publishing(bench, store, tmp_path, buffer_steps=2) as endpoint:
        for number in range(5):
            store.put(number)
            # One batch each. Nobody listens yet, so there is no event to wait for.
            while store.publisher is not None and store.publisher.num_pending:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        async with running(bench.follower(endpoint)):
            await bench.until(lambda: bench.trust() is Trust.EXACT)
            assert [bench.held(number) for number in range(5)] == [1] * 5
            store.drop(3)
            await bench.until(lambda: bench.held(3) == 0)
            assert bench.trust() is Trust.EXACT


async def test_another_life_at_the_address_is_followed_anew(bench: Bench, tmp_path: Path) -> None:
    store = Store()
    store.put(1)
    async with publishing(bench, store, tmp_path) as endpoint:
        following = running(bench.follower(endpoint))
        await following.__aenter__()
        await bench.until(lambda: bench.held(1) == 1)
    store.located.clear()
    store.put(2, tier=TierId.SSD)
    async with publishing(bench, store, tmp_path):
        await bench.until(lambda: bench.held(2) == 1)
        assert bench.held(1) == 0
        await following.__aexit__(None, None, None)


async def test_a_burst_that_does_not_fit_is_told_as_a_whole(bench: Bench, tmp_path: Path) -> None:
    store = Store()
    async with (
        publishing(bench, store, tmp_path) as endpoint,
        running(bench.follower(endpoint)),
    ):
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        for number in range(70_000):
            store.put(number)
        await bench.until(lambda: bench.held(69_999) == 1)
        assert bench.held(0) == 1
        assert bench.trust() is Trust.EXACT
