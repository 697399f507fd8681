"""Writing through: what is saved in the arena goes on to the tiers, as fast as they take it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cache_router.errors import TierError
from cache_router.types import TierId
from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.catalog import CachedBlock, Catalog
from engine_workers.cache_server.event_sources import EventSources
from engine_workers.tiers.tier import Tier

_WRITES_PER_TIER = 4
_MAX_REMOVALS = 65_536


@dataclass(frozen=True, slots=True)
class _Removal:
    names: Sequence[BlockName]


class _TierQueue:
    """What waits to be written to, or removed from, one tier, in order."""

    def __init__(self, tier: Tier, max_bytes: int) -> None:
        self.tier = tier
        self.max_bytes = max_bytes
        self.waiting: asyncio.Queue[CachedBlock | _Removal] = asyncio.Queue()
        self.num_bytes = 0
        self.num_removals = 0


class TierWriter:
    """Queues of a fixed number of bytes, one a tier. What does not fit is not written: counted.

    A block that waits is pinned: its bytes are the arena's.

    Args:
        tiers: Where to write.
        catalog: Holds the pins.
        metrics: Counts writes.
        max_bytes: What may wait for one tier.
        events: Is told what tiers hold.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        catalog: Catalog,
        metrics: CacheMetrics,
        max_bytes: int,
        events: EventSources,
        clock: Callable[[], float],
    ) -> None:
        self._events = events
        self._queues = {tier.name: _TierQueue(tier, max_bytes) for tier in tiers}
        self._catalog = catalog
        self._metrics = metrics
        self._clock = clock

    def offer(self, block: CachedBlock, tiers: Iterable[Tier]) -> None:
        """Queue a published block for some tiers, or drop it where too much waits."""
        num_bytes = len(block.payload)
        for tier in tiers:
            queue = self._queues[tier.name]
            if queue.num_bytes + num_bytes > queue.max_bytes:
                self._metrics.operations.labels(tier.name, "save", "backpressure").inc()
                continue
            self._catalog.pin(block)
            queue.num_bytes += num_bytes
            queue.waiting.put_nowait(block)

    def remove(self, names: Sequence[BlockName]) -> None:
        """Queue a removal from all tiers, behind what was offered before."""
        for queue in self._queues.values():
            if queue.num_removals + len(names) > _MAX_REMOVALS:
                self._metrics.operations.labels(queue.tier.name, "remove", "backpressure").inc()
                continue
            queue.num_removals += len(names)
            queue.waiting.put_nowait(_Removal(names))

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the writers; they end when they are cancelled."""
        for queue in self._queues.values():
            for _ in range(_WRITES_PER_TIER):
                tasks.create_task(self._write_all(queue), name=f"write:{queue.tier.name}")

    async def drain(self) -> None:
        """Wait until everything that was queued is done."""
        for queue in self._queues.values():
            await queue.waiting.join()

    def waiting_bytes(self, tier: Tier) -> int:
        """What waits for one tier, or is being written to it."""
        return self._queues[tier.name].num_bytes

    async def _write_all(self, queue: _TierQueue) -> None:
        while True:
            item = await queue.waiting.get()
            try:
                if isinstance(item, _Removal):
                    await self._remove(queue, item)
                else:
                    await self._write(queue, item)
            finally:
                queue.waiting.task_done()

    async def _write(self, queue: _TierQueue, block: CachedBlock) -> None:
        name, num_bytes, started = queue.tier.name, len(block.payload), self._clock()
        try:
            # Dropped while it waited: somebody found it unusable.
            if block.is_listed and block.header is not None:
                await queue.tier.store(block.header, block.payload.data)
                self._metrics.count_moved(name, "save", num_bytes, self._clock() - started)
                self._events.stored(block.header, TierId(name))
        except TierError:
            self._metrics.operations.labels(name, "save", "error").inc()
        finally:
            queue.num_bytes -= num_bytes
            self._catalog.unpin(block)

    async def _remove(self, queue: _TierQueue, removal: _Removal) -> None:
        name = queue.tier.name
        try:
            await queue.tier.remove(removal.names)
            for removed in removal.names:
                self._events.removed(removed, TierId(name))
            self._metrics.operations.labels(name, "remove", "ok").inc(len(removal.names))
        except TierError:
            self._metrics.operations.labels(name, "remove", "error").inc(len(removal.names))
        finally:
            queue.num_removals -= len(removal.names)
