"""A tier that is left alone while it fails, so that nobody waits for it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence

from engine_workers.blocks.block_header import BlockHeader
from engine_workers.blocks.block_name import BlockName
from engine_workers.tiers.circuit import Circuit, CircuitLimits
from engine_workers.tiers.tier import Tier, TierUsage


class BreakerTier:
    """A `Tier` around another one: after failures in a row it raises `TierError` at once.

    Reading and writing have a circuit each: a tier that is full can still be read.

    Args:
        tier: What is asked while the circuits are closed; it is closed with this one.
        limits: When they open.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        tier: Tier,
        limits: CircuitLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._tier = tier
        self.name = tier.name
        self.medium = tier.medium
        self.is_shared = tier.is_shared
        limits = limits or CircuitLimits()
        self.reading = Circuit(tier.name, limits, clock)
        self.writing = Circuit(tier.name, limits, clock)

    async def contains(self, names: Sequence[BlockName]) -> list[bool]:
        """Say which blocks are there, if reading works."""
        with self.reading.call():
            return await self._tier.contains(names)

    async def load_into(self, name: BlockName, payload: memoryview) -> BlockHeader:
        """Read and verify a block, if reading works."""
        with self.reading.call():
            return await self._tier.load_into(name, payload)

    async def store(self, header: BlockHeader, payload: memoryview) -> None:
        """Store a block, if writing works."""
        with self.writing.call():
            await self._tier.store(header, payload)

    async def remove(self, names: Sequence[BlockName]) -> None:
        """Delete blocks, whether writing works or not: what has to go is always tried."""
        await self._tier.remove(names)

    async def headers(self) -> AsyncIterator[BlockHeader]:
        """Every block that is known to be there; whoever asks may take any time, so not counted."""
        async for header in self._tier.headers():
            yield header

    def usage(self) -> TierUsage:
        """How full it is."""
        return self._tier.usage()

    async def close(self) -> None:
        """Close the tier."""
        await self._tier.close()
