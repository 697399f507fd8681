"""A follower, what it works on, and ways to wait for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import numpy as np
import zmq.asyncio

from cache_router.hashing import hash_blocks
from cache_router.kv_event_follower import KvEventFollower
from cache_router.kv_events import KvEvent
from cache_router.predictions import Predictions
from cache_router.radix_index import Applied, RadixIndex
from cache_router.types import BlockHash, PromptRoot, Trust, WorkerId
from cache_router.worker_registry import EventEndpoint, WorkerRegistry
from tests.cache_router.event_publisher import EventPublisher

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
