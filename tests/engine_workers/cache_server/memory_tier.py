"""A tier in this process, for what a real one cannot be made to do on purpose."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

from cache_router.errors import BlockLostError, TierError
from cache_router.types import Medium
from engine_workers.blocks.block_header import BlockHeader, verify
from engine_workers.blocks.block_name import BlockName
from engine_workers.tiers.tier import TierUsage


class MemoryTier:
    """Implements `Tier`; its gates are open until a test closes them."""

    medium = Medium.STORAGE

    def __init__(self, name: str = "ssd", *, is_shared: bool = False) -> None:
        self.name = name
        self.is_shared = is_shared
        self.blocks: dict[BlockName, tuple[BlockHeader, bytes]] = {}
        self.is_down = False
        self.answers = _open_gate()
        self.loads = _open_gate()
        self.stores = _open_gate()
        self.num_questions = 0
        self.num_loads = 0
        self.num_running_loads = 0
        self.is_closed = False

    async def contains(self, names: Sequence[BlockName]) -> list[bool]:
        self.num_questions += 1
        await self.answers.wait()
        self._check()
        return [name in self.blocks for name in names]

    async def load_into(self, name: BlockName, payload: memoryview) -> BlockHeader:
        self.num_loads += 1
        self.num_running_loads += 1
        try:
            await self.loads.wait()
            self._check()
            if name not in self.blocks:
                raise BlockLostError
            header, data = self.blocks[name]
            payload[:] = data
            try:
                verify(header, payload, name)
            except BlockLostError:
                del self.blocks[name]
                raise
            return header
        finally:
            self.num_running_loads -= 1

    async def store(self, header: BlockHeader, payload: memoryview) -> None:
        await self.stores.wait()
        self._check()
        self.blocks.setdefault(header.name, (header, bytes(payload)))

    async def remove(self, names: Sequence[BlockName]) -> None:
        self._check()
        for name in names:
            self.blocks.pop(name, None)

    async def headers(self) -> AsyncIterator[BlockHeader]:
        for header, _ in list(self.blocks.values()):
            yield header

    def usage(self) -> TierUsage:
        used_bytes = sum(len(data) for _, data in self.blocks.values())
        return TierUsage(len(self.blocks), used_bytes, None)

    async def close(self) -> None:
        self.is_closed = True

    def _check(self) -> None:
        if self.is_down:
            raise TierError(self.name, "is down")


def _open_gate() -> asyncio.Event:
    gate = asyncio.Event()
    gate.set()
    return gate
