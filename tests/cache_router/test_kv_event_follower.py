from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import uvloop
import zmq.asyncio

from cache_router.hashing import hash_blocks
from cache_router.kv_event_follower import KvEventFollower
from cache_router.kv_events import BlockStored, KvEvent
from cache_router.predictions import Predictions
from cache_router.radix_index import Applied, RadixIndex
from cache_router.types import BlockHash, PromptRoot, Trust, WorkerId
from cache_router.worker_registry import EventEndpoint, WorkerRegistry
from tests.cache_router.event_publisher import CLEARED, EventPublisher, removed, stored

W = WorkerId("http://w:1")
OTHER = WorkerId("http://w:2")


class WatchedIndex(RadixIndex):
    """Wakes whoever waits for a change."""

    def __init__(self, max_blocks: int, changed: asyncio.Event) -> None:
        super().__init__(max_blocks)
        self._changed = changed

    def apply(self, worker_id: WorkerId, event: KvEvent, model: str) -> Applied:
        self._changed.set()
        return super().apply(worker_id, event, model)

    def remove_worker(self, worker_id: WorkerId) -> None:
        self._changed.set()
        super().remove_worker(worker_id)


class WatchedRegistry(WorkerRegistry):
    """Wakes whoever waits for a change, and remembers every trust."""

    def __init__(self, changed: asyncio.Event) -> None:
        super().__init__()
        self._changed = changed
        self.history: list[Trust] = []

    def set_trust(self, worker_id: WorkerId, trust: Trust, reason: str) -> None:
        self._changed.set()
        if worker_id == W and self.history[-1:] != [trust]:
            self.history.append(trust)
        super().set_trust(worker_id, trust, reason)


class Bench:
    """What a follower works on, and ways to look at it."""

    def __init__(self, context: zmq.asyncio.Context, max_blocks: int = 100_000) -> None:
        self.context = context
        self.changed = asyncio.Event()
        self.index = WatchedIndex(max_blocks, self.changed)
        self.registry = WatchedRegistry(self.changed)
        self.predictions = Predictions(time.monotonic, ttl_s=1000.0)
        for worker_id in (W, OTHER):
            self.registry.update(worker_id, url=worker_id, models=())

    def follower(
        self, endpoint: EventEndpoint, *, probe_s: float = 100.0, replay_timeout_s: float = 10.0
    ) -> KvEventFollower:
        return KvEventFollower(
            W,
            "m",
            endpoint,
            context=self.context,
            index=self.index,
            registry=self.registry,
            predictions=self.predictions,
            replay_timeout_s=replay_timeout_s,
            probe_s=probe_s,
        )

    def trust(self, worker_id: WorkerId = W) -> Trust:
        info = self.registry.get(worker_id)
        assert info is not None
        return info.trust

    def reason(self) -> str:
        info = self.registry.get(W)
        assert info is not None
        return info.trust_reason

    def held(self, *blocks: int) -> int:
        return self.index.match(chain(*blocks)).get(W, 0)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():
                await self.changed.wait()
                self.changed.clear()


def chain(*blocks: int) -> list[BlockHash]:
    return hash_blocks(np.repeat(np.array(blocks, np.uint32), 2), 2, PromptRoot("m"))


def address(publisher: EventPublisher) -> EventEndpoint:
    return EventEndpoint(publisher.endpoint, publisher.replay_endpoint)


@asynccontextmanager
async def running(follower: KvEventFollower) -> AsyncIterator[KvEventFollower]:
    task = asyncio.create_task(follower.run())
    try:
        yield follower
    finally:
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    # Terminating waits for every socket, so one that was left open fails the test here.
    async with asyncio.timeout(10):
        await asyncio.to_thread(context.term)


@pytest.fixture
async def bench(context: zmq.asyncio.Context) -> Bench:
    return Bench(context)


async def test_live_events_are_applied_in_order_and_trusted(bench: Bench) -> None:
    async with EventPublisher(bench.context) as publisher:
        async with running(bench.follower(address(publisher))) as follower:
            await publisher.subscribed()
            await bench.until(lambda: bench.trust() is Trust.EXACT)
            await publisher.publish(stored(1, 2))
            await publisher.publish(stored(3, after=(1, 2)), removed(1, 2, 3), stored(7))
            await bench.until(lambda: bench.held(7) == 1)
            assert bench.held(1, 2, 3) == 2
            assert bench.trust() is Trust.EXACT
            stats = follower.stats
            assert (stats.batches, stats.stored_events, stats.removed_events) == (2, 3, 1)
            assert (stats.gaps, stats.lost_batches, stats.decode_failures) == (0, 0, 0)
        assert bench.held(1) == 0
        assert bench.trust() is Trust.LOAD_ONLY


async def test_a_late_joiner_gets_everything_that_the_buffer_has(bench: Bench) -> None:
    async with EventPublisher(bench.context) as publisher:
        publisher.buffer(stored(1))
        publisher.buffer(stored(2, after=(1,)))
        async with running(bench.follower(address(publisher))):
            await bench.until(lambda: bench.trust() is Trust.EXACT)
            assert bench.held(1, 2) == 2


async def test_a_late_joiner_beyond_the_buffer_is_degraded(bench: Bench) -> None:
    async with EventPublisher(bench.context, buffer_steps=2) as publisher:
        publisher.buffer(stored(1))
        publisher.buffer(stored(5))
        publisher.buffer(stored(2, after=(1,)))
        async with running(bench.follower(address(publisher))) as follower:
            await bench.until(lambda: bench.trust() is Trust.DEGRADED)
            assert (bench.held(5), bench.held(1, 2)) == (1, 0)
            assert Trust.EXACT not in bench.registry.history
            assert (follower.stats.lost_batches, follower.stats.orphan_events) == (1, 1)


async def test_a_gap_is_filled_by_a_replay(bench: Bench) -> None:
    async with (
        EventPublisher(bench.context) as publisher,
        running(bench.follower(address(publisher))) as follower,
    ):
        await publisher.subscribed()
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        await publisher.publish(stored(1))
        publisher.buffer(stored(2, after=(1,)))
        await publisher.publish(stored(3, after=(1, 2)))
        await bench.until(lambda: bench.held(1, 2, 3) == 3)
        assert bench.registry.history == [Trust.EXACT]
        assert (follower.stats.gaps, follower.stats.lost_batches) == (1, 0)


async def test_a_gap_beyond_the_buffer_degrades_and_goes_on(bench: Bench) -> None:
    async with (
        EventPublisher(bench.context, buffer_steps=1) as publisher,
        running(bench.follower(address(publisher))) as follower,
    ):
        await publisher.subscribed()
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        await publisher.publish(stored(1))
        await bench.until(lambda: bench.held(1) == 1)
        publisher.buffer(removed(1))
        await publisher.publish(stored(3))
        await bench.until(lambda: bench.held(3) == 1)
        assert bench.trust() is Trust.DEGRADED
        assert follower.stats.lost_batches == 1


async def test_reordered_and_repeated_batches_are_applied_once(bench: Bench) -> None:
    async with (
        EventPublisher(bench.context) as publisher,
        running(bench.follower(address(publisher))) as follower,
    ):
        await publisher.subscribed()
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        first = await publisher.publish(stored(1))
        second = publisher.buffer(stored(2, after=(1,)))
        third = publisher.buffer(stored(3, after=(1, 2)))
        await publisher.send(third)
        await bench.until(lambda: bench.held(1, 2, 3) == 3)
        for batch in (second, third, first):
            await publisher.send(batch)
        await publisher.publish(removed(1, 2, 3), stored(9))
        await bench.until(lambda: bench.held(9) == 1)
        assert bench.held(1, 2, 3) == 2
        assert bench.registry.history == [Trust.EXACT]
        assert (follower.stats.batches, follower.stats.duplicates) == (4, 4)
        assert follower.stats.resets == 0


async def test_a_restart_at_the_same_address_begins_from_nothing(bench: Bench) -> None:
    async with EventPublisher(bench.context) as publisher:
        endpoint = address(publisher)
        for block in (1, 2, 3):
            publisher.buffer(stored(block))
        task = asyncio.create_task(bench.follower(endpoint).run())
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        bench.predictions.enter(W, chain(8))
    await bench.until(lambda: bench.trust() is Trust.LOAD_ONLY)
    assert [bench.held(block) for block in (1, 2, 3)] == [0, 0, 0]
    assert bench.predictions.match(chain(8)) == {}
    async with EventPublisher(
        bench.context, endpoint.endpoint, str(endpoint.replay_endpoint)
    ) as publisher:
        publisher.buffer(stored(2))
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        assert [bench.held(block) for block in (1, 2, 3)] == [0, 1, 0]
        task.cancel()
        await asyncio.wait([task])


async def test_a_sequence_that_goes_back_is_another_process(bench: Bench) -> None:
    async with (
        EventPublisher(bench.context) as publisher,
        running(bench.follower(address(publisher))) as follower,
    ):
        await publisher.subscribed()
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        await publisher.publish(stored(1))
        await publisher.publish(stored(2))
        await bench.until(lambda: bench.held(2) == 1)
        await publisher.send((0, b"a batch of the next life"))
        await bench.until(lambda: bench.trust() is Trust.LOAD_ONLY)
        assert "went back from 1 to 0" in bench.reason()
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        assert follower.stats.resets == 1
        assert bench.index.num_blocks(W) == 2


async def test_a_new_epoch_empties_the_worker_before_the_call_returns(bench: Bench) -> None:
    async with EventPublisher(bench.context) as publisher:
        publisher.buffer(stored(1))
        async with running(bench.follower(address(publisher))) as follower:
            follower.note_epoch(1.0)
            await bench.until(lambda: bench.trust() is Trust.EXACT)
            follower.note_epoch(1.0)
            assert bench.held(1) == 1
            bench.predictions.enter(W, chain(8))
            follower.note_epoch(2.0)
            assert bench.held(1) == 0
            assert bench.predictions.match(chain(8)) == {}
            assert bench.trust() is Trust.LOAD_ONLY
            follower.note_epoch(3.0)
            await bench.until(lambda: bench.trust() is Trust.EXACT)
            assert bench.held(1) == 1


async def test_a_lost_last_batch_is_found_when_the_source_is_quiet(bench: Bench) -> None:
    async with (
        EventPublisher(bench.context) as publisher,
        running(bench.follower(address(publisher), probe_s=0.02)) as follower,
    ):
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        publisher.buffer(stored(1))
        await bench.until(lambda: bench.held(1) == 1)
        assert bench.registry.history == [Trust.EXACT]
        assert follower.stats.gaps == 0


async def test_a_publisher_may_appear_after_its_follower(bench: Bench) -> None:
    async with EventPublisher(bench.context) as publisher:
        endpoint = address(publisher)
    async with running(bench.follower(endpoint)):
        await asyncio.sleep(0)  # one turn of the loop: it begins to connect
        assert bench.trust() is Trust.LOAD_ONLY
        async with EventPublisher(
            bench.context, endpoint.endpoint, str(endpoint.replay_endpoint)
        ) as publisher:
            publisher.buffer(stored(1))
            await bench.until(lambda: bench.trust() is Trust.EXACT)
            assert bench.held(1) == 1


async def test_a_batch_that_cannot_be_read_degrades_and_the_next_is_applied(bench: Bench) -> None:
    async with (
        EventPublisher(bench.context) as publisher,
        running(bench.follower(address(publisher))) as follower,
    ):
        await publisher.subscribed()
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        await publisher.send(publisher.buffer_raw(b"\xc1 garbage"))
        await bench.until(lambda: bench.trust() is Trust.DEGRADED)
        await publisher.publish(stored(1))
        await bench.until(lambda: bench.held(1) == 1)
        assert follower.stats.decode_failures == 1


@pytest.mark.parametrize(
    "frames", [[b"alone"], [b"", b"short", b""], [b"", b"12345678", b"", b"more"]]
)
async def test_messages_that_are_no_batches_are_counted_and_skipped(
    bench: Bench, frames: list[bytes]
) -> None:
    async with (
        EventPublisher(bench.context) as publisher,
        running(bench.follower(address(publisher))) as follower,
    ):
        await publisher.subscribed()
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        await publisher.send_frames(frames)
        await publisher.publish(stored(1))
        await bench.until(lambda: bench.held(1) == 1)
        assert bench.registry.history == [Trust.EXACT]
        assert follower.stats.decode_failures == 1


async def test_an_unknown_event_type_is_counted_and_harmless(bench: Bench) -> None:
    async with (
        EventPublisher(bench.context) as publisher,
        running(bench.follower(address(publisher))) as follower,
    ):
        publisher.buffer({"type": "FromTheFuture"}, stored(1))
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        assert bench.held(1) == 1
        assert follower.stats.unknown_events == 1


async def test_without_a_replay_endpoint_the_worker_is_degraded_until_it_is_empty(
    bench: Bench,
) -> None:
    async with EventPublisher(bench.context) as publisher:
        endpoint = replace(address(publisher), replay_endpoint=None)
        async with running(bench.follower(endpoint, probe_s=0.01)):
            await publisher.subscribed()
            await bench.until(lambda: bench.trust() is Trust.DEGRADED)
            await publisher.publish(stored(1))
            publisher.buffer(stored(2))
            await publisher.publish(stored(3))
            await bench.until(lambda: bench.held(3) == 1)
            assert (bench.held(1), bench.held(2)) == (1, 0)
            await publisher.publish(CLEARED, stored(4))
            await bench.until(lambda: bench.held(4) == 1)
            assert bench.trust() is Trust.EXACT
            assert bench.held(1) == 0


async def test_while_replay_fails_the_worker_is_load_only(bench: Bench) -> None:
    async with EventPublisher(bench.context) as publisher:
        publisher.answers_replay.clear()
        publisher.buffer(stored(1))
        follower = bench.follower(address(publisher), replay_timeout_s=0.05)
        async with running(follower):
            await publisher.subscribed()
            await publisher.publish(stored(2))
            await bench.until(lambda: "a replay was silent" in bench.reason())
            assert (bench.held(1), bench.held(2)) == (0, 0)
            publisher.answers_replay.set()
            await bench.until(lambda: bench.trust() is Trust.EXACT)
            assert (bench.held(1), bench.held(2)) == (1, 1)
            assert bench.registry.history == [Trust.LOAD_ONLY, Trust.EXACT]


async def test_a_gap_that_no_replay_fills_makes_the_worker_load_only(bench: Bench) -> None:
    async with (
        EventPublisher(bench.context) as publisher,
        running(bench.follower(address(publisher), replay_timeout_s=0.1)),
    ):
        await publisher.subscribed()
        publisher.buffer(stored(1))
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        publisher.answers_replay.clear()
        publisher.buffer(stored(2))
        await publisher.publish(stored(3))
        await bench.until(lambda: bench.trust() is Trust.LOAD_ONLY)
        assert [bench.held(block) for block in (1, 2, 3)] == [0, 0, 0]
        publisher.answers_replay.set()
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        assert [bench.held(block) for block in (1, 2, 3)] == [1, 1, 1]


async def test_an_orphan_degrades(bench: Bench) -> None:
    async with EventPublisher(bench.context) as publisher:
        publisher.buffer(stored(2, after=(1,)))
        async with running(bench.follower(address(publisher))) as follower:
            await bench.until(lambda: bench.trust() is Trust.DEGRADED)
            assert follower.stats.orphan_events == 1


async def test_an_answer_longer_than_the_publisher_can_queue_is_whole_in_the_end(
    bench: Bench,
) -> None:
    async with EventPublisher(bench.context) as publisher:
        for block in range(4000):
            publisher.buffer(stored(block))
        async with running(bench.follower(address(publisher), replay_timeout_s=0.5)) as follower:
            await bench.until(lambda: bench.trust() is Trust.EXACT)
            assert bench.index.num_blocks(W) == 4000
            assert (follower.stats.batches, follower.stats.lost_batches) == (4000, 0)


async def test_a_full_index_degrades_the_worker_that_gave_way(
    context: zmq.asyncio.Context,
) -> None:
    bench = Bench(context, max_blocks=3)
    bench.index.apply(OTHER, BlockStored([1, 2], None, [1, 1, 2, 2], 2), "m")
    bench.registry.set_trust(OTHER, Trust.EXACT, "as if followed")
    async with EventPublisher(context) as publisher:
        publisher.buffer(stored(3), stored(4))
        async with running(bench.follower(address(publisher))):
            await bench.until(lambda: bench.trust() is Trust.EXACT)
            assert bench.trust(OTHER) is Trust.DEGRADED
            assert bench.index.num_blocks(OTHER) == 0


async def test_a_worker_that_alone_fills_the_index_is_degraded(
    context: zmq.asyncio.Context,
) -> None:
    bench = Bench(context, max_blocks=3)
    async with EventPublisher(context) as publisher:
        publisher.buffer(stored(1, 2, 3), stored(4))
        async with running(bench.follower(address(publisher))):
            await bench.until(lambda: bench.trust() is Trust.DEGRADED)
            assert Trust.EXACT not in bench.registry.history
            assert (bench.held(1), bench.held(4)) == (0, 1)


async def test_an_address_that_is_none_leaves_the_worker_load_only(bench: Bench) -> None:
    async with running(bench.follower(EventEndpoint("tcp://*:5557", "tcp://*:5558"))):
        await bench.until(lambda: "cannot connect" in bench.reason())
        assert bench.trust() is Trust.LOAD_ONLY


def test_a_follower_runs_on_uvloop() -> None:
    async def scenario() -> None:
        context = zmq.asyncio.Context()
        bench = Bench(context)
        async with EventPublisher(context) as publisher:
            publisher.buffer(stored(1))
            async with running(bench.follower(address(publisher))):
                await publisher.subscribed()
                await bench.until(lambda: bench.trust() is Trust.EXACT)
                publisher.buffer(stored(2))
                await publisher.publish(stored(3))
                await bench.until(lambda: bench.held(3) == 1)
                assert [bench.held(block) for block in (1, 2)] == [1, 1]
        await asyncio.to_thread(context.term)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(asyncio.wait_for(scenario(), 30))
