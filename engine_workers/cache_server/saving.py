"""Taking blocks out of a worker's write ring: copy first, then verify the copy, then publish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

import numpy as np

from cache_router.errors import BlockCorruptError
from engine_workers.blocks.block_header import Codec, verify
from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.catalog import CachedBlock, Catalog
from engine_workers.cache_server.write_ring import RingBlock, WriteRing

ENGINE = "engine"
"""Source of blocks that an engine computed."""
ARENA = "ram"
"""Tier name of the arena."""


class Saver:
    """Saves blocks of all engines.

    Args:
        catalog: Where they go.
        metrics: Counts them.
        saved: Called with each block that is new, while it is pinned.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        catalog: Catalog,
        metrics: CacheMetrics,
        saved: Callable[[CachedBlock], None],
        clock: Callable[[], float],
    ) -> None:
        self._catalog = catalog
        self._metrics = metrics
        self._saved = saved
        self._clock = clock
        self._saving: set[BlockName] = set()

    async def save(self, ring: WriteRing, puts: Iterable[tuple[int, BlockName]]) -> int:
        """Save what lies in some slots of a ring, in the order of the chain.

        Returns:
            How many of the blocks are there now, whoever saved them.
        """
        num_kept = 0
        for slot, name in puts:
            result = await self._save_one(ring, slot, name)
            num_kept += result in ("ok", "duplicate")
            if result != "ok":
                self._metrics.operations.labels(ARENA, "save", result).inc()
        return num_kept

    async def _save_one(self, ring: WriteRing, slot: int, name: BlockName) -> str:
        # Two engines that compute the same prompt save the same block at the same time.
        if self._catalog.find(name) is not None or name in self._saving:
            return "duplicate"
        started = self._clock()
        try:
            found = ring.read(slot)
        except BlockCorruptError:
            return "corrupt"
        if found.header.codec is not Codec.RAW or found.header.mac is not None:
            return "corrupt"
        block = self._catalog.reserve(name, found.header.payload_bytes)
        if block is None:
            return "no_room"
        self._saving.add(name)
        try:
            # Not cancelled on the way: the slot is not free before the thread has left it.
            await asyncio.to_thread(_copy_and_verify, found, block)
            if not self._catalog.publish(block, found.header, ENGINE):
                return "no_room"
            self._saved(block)
        except BlockCorruptError:
            return "corrupt"
        finally:
            self._saving.discard(name)
            self._catalog.unpin(block)
        self._metrics.count_moved(ARENA, "save", len(block.payload), self._clock() - started)
        return "ok"


def _copy_and_verify(found: RingBlock, block: CachedBlock) -> None:
    """Copy a payload into the arena, and check what arrived there.

    Raises:
        BlockCorruptError: It is not what its header or the message says.
    """
    np.copyto(block.payload, found.payload)
    verify(found.header, block.payload.data, block.name)
