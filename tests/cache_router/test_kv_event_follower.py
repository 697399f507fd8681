from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import uvloop
import zmq.asyncio

from cache_router.kv_events import BlockStored
from cache_router.types import Trust
from cache_router.worker_registry import EventEndpoint
from tests.cache_router.event_publisher import CLEARED, EventPublisher, removed, stored
from tests.cache_router.follower_bench import OTHER, Bench, W, address, chain, running


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
