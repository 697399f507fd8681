"""Bringing blocks from the tiers into the arena: each once, whoever asks, from whoever is first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from cache_router.errors import BlockLostError, TierError
from engine_workers.blocks.block_header import BlockHeader, Codec
from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.catalog import CachedBlock, Catalog
from engine_workers.tiers.tier import Tier

_LOADS_PER_TIER = 16
_MAX_WAITING = 4096
_HEDGE_FACTOR = 3.0
_MIN_HEDGE_S = 0.02
_MAX_HEDGE_S = 1.0
_NEW_SHARE = 0.2
"""Weight of the newest load in a tier's average duration."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A block to be staged."""

    name: BlockName
    payload_bytes: int
    tiers: Sequence[Tier]
    """Those that said they have it, the fastest first; at least one."""


@dataclass(slots=True)
class _Lane:
    """A tier's loads: how many may run, and how long one takes."""

    permits: asyncio.Semaphore
    average_s: float = _MIN_HEDGE_S

    def note(self, seconds: float) -> None:
        self.average_s += _NEW_SHARE * (seconds - self.average_s)

    @property
    def hedge_s(self) -> float:
        return min(_MAX_HEDGE_S, max(_MIN_HEDGE_S, _HEDGE_FACTOR * self.average_s))


class Staging:
    """Loads that run now, one a block.

    A load is never cancelled: what writes into the arena must have ended before its slot is used
    again. A tier that hangs keeps its permits and slots, and so can take only that many.

    Args:
        catalog: Where blocks go.
        metrics: Counts loads.
        loaded: Called with each block that came, while it is pinned, and the tier it came from.
        lost: Called with a block that a tier turned out not to have, or not to have sound.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        catalog: Catalog,
        metrics: CacheMetrics,
        loaded: Callable[[CachedBlock, Tier], None],
        lost: Callable[[BlockName, Tier], None],
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._loaded = loaded
        self._lost = lost
        self._clock = clock
        self._lanes: dict[str, _Lane] = {}
        self._running: dict[BlockName, asyncio.Task[None]] = {}
        self._arrived: dict[BlockName, CachedBlock] = {}
        self._loads: set[asyncio.Task[bool]] = set()

    @property
    def num_running(self) -> int:
        """Blocks that are on their way."""
        return len(self._running)

    def is_running(self, name: BlockName) -> bool:
        """Whether a block is on its way."""
        return name in self._running

    def start(self, wanted: Wanted) -> asyncio.Task[None] | None:
        """Start to bring a block, or join whoever does; None if too much is on its way already.

        The task ends when the block is published, or cannot be had. It is shared: wait for it, do
        not cancel it. The block cannot give way before the task's callbacks have run.
        """
        task = self._running.get(wanted.name)
        if task is None:
            if len(self._running) >= _MAX_WAITING:
                return None
            task = asyncio.create_task(self._race(wanted), name="stage")
            self._running[wanted.name] = task
            task.add_done_callback(partial(self._finish, wanted.name))
        return task

    def _finish(self, name: BlockName, _: asyncio.Task[None]) -> None:
        del self._running[name]
        block = self._arrived.pop(name, None)
        if block is not None:
            # After the callbacks of those who wait for it: this one is the first.
            asyncio.get_running_loop().call_soon(self._catalog.unpin, block)

    async def _race(self, wanted: Wanted) -> None:
        """Ask the tiers in turn, the next one when one fails or takes long; the first one wins."""
        waiting = list(wanted.tiers)
        asked: set[asyncio.Task[bool]] = set()
        while asked or waiting:
            hedge_s: float | None = None
            if waiting:
                tier = waiting.pop(0)
                load = asyncio.create_task(self._load(wanted, tier), name=f"load:{tier.name}")
                self._loads.add(load)
                load.add_done_callback(self._loads.discard)
                asked.add(load)
                hedge_s = self._lane(tier).hedge_s if waiting else None
            ended, asked = await asyncio.wait(
                asked, timeout=hedge_s, return_when=asyncio.FIRST_COMPLETED
            )
            if any(load.result() for load in ended):
                return

    async def _load(self, wanted: Wanted, tier: Tier) -> bool:
        """Load a block from one tier; say whether it is published, by this load or another."""
        lane = self._lane(tier)
        async with lane.permits:
            if self._catalog.find(wanted.name) is not None:
                return True
            block = self._catalog.reserve(wanted.name, wanted.payload_bytes)
            if block is None:
                self._metrics.operations.labels(tier.name, "load", "no_room").inc()
                return False
            try:
                started = self._clock()
                header = await self._read(block, tier)
                if header is None:
                    return False
                seconds = self._clock() - started
                lane.note(seconds)
                self._metrics.count_moved(tier.name, "load", wanted.payload_bytes, seconds)
                if self._catalog.publish(block, header, tier.name):
                    self._loaded(block, tier)
                    if wanted.name in self._running and wanted.name not in self._arrived:
                        self._catalog.pin(block)
                        self._arrived[wanted.name] = block
                return self._catalog.find(block.name) is not None
            finally:
                self._catalog.unpin(block)

    async def _read(self, block: CachedBlock, tier: Tier) -> BlockHeader | None:
        try:
            header = await tier.load_into(block.name, block.payload.data)
        except BlockLostError:
            self._metrics.operations.labels(tier.name, "load", "lost").inc()
            self._lost(block.name, tier)
            return None
        except TierError:
            self._metrics.operations.labels(tier.name, "load", "error").inc()
            return None
        # The tier has verified the payload; engines get it as it is, so it must also be theirs.
        if header.name != block.name or header.codec is not Codec.RAW:
            self._metrics.operations.labels(tier.name, "load", "lost").inc()
            return None
        return header

    def _lane(self, tier: Tier) -> _Lane:
        lane = self._lanes.get(tier.name)
        if lane is None:
            lane = self._lanes[tier.name] = _Lane(asyncio.Semaphore(_LOADS_PER_TIER))
        return lane
