"""Answering an operator: what is stored, whether it is sound, what has to stay or go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from cache_router.errors import BlockCorruptError, BlockLostError, TierError
from cache_router.types import TierId
from engine_workers.blocks.block_header import BlockHeader, verify
from engine_workers.cache_server.admin_wire import (
    Answer,
    BlockInfo,
    BlockList,
    Changed,
    ClearBlocks,
    Failed,
    GetStats,
    ListBlocks,
    PinBlocks,
    Question,
    Stats,
    TierStats,
    UnpinBlocks,
    Verified,
    VerifyBlocks,
)
from engine_workers.cache_server.cache_parts import CacheParts
from engine_workers.cache_server.catalog import CachedBlock
from engine_workers.cache_server.saving import ARENA
from engine_workers.tiers.tier import Tier

_MAX_LISTED = 10_000
_REMOVED_AT_ONCE = 256


class Admin:
    """Answers questions.

    Args:
        parts: The server's.
        clock: Seconds, monotonic.
    """

    def __init__(self, parts: CacheParts, clock: Callable[[], float]) -> None:
        self._parts = parts
        self._clock = clock
        self._started = clock()

    async def answer(self, question: Question) -> Answer:
        """Do what is asked; what cannot be done is an answer too."""
        try:
            match question:
                case GetStats():
                    return self._stats()
                case ListBlocks(tier, limit):
                    return await self._list(tier, limit)
                case VerifyBlocks(tiers):
                    return await self._verify(tiers)
                case PinBlocks(hashes):
                    return Changed(self._parts.pins.pin(self._matching(hashes)))
                case UnpinBlocks(hashes):
                    pinned = self._parts.pins.pinned()
                    return Changed(self._parts.pins.unpin(_matching(hashes, pinned)))
                case ClearBlocks(tiers):
                    return await self._clear(tiers)
        except TierError as error:
            return Failed(str(error))

    def _stats(self) -> Stats:
        parts = self._parts
        arena = TierStats(
            ARENA, len(parts.catalog), parts.arena.slots.used_bytes, parts.arena.num_bytes, 0
        )
        tiers = [arena]
        for tier in parts.tiers:
            usage = tier.usage()
            tiers.append(
                TierStats(
                    tier.name,
                    usage.num_blocks,
                    usage.used_bytes,
                    usage.capacity_bytes,
                    parts.writer.waiting_bytes(tier),
                )
            )
        return Stats(
            boot_token=parts.boot_token,
            uptime_s=self._clock() - self._started,
            num_engines=len(parts.engines),
            num_leases=parts.leases.num_held,
            num_quarantined_leases=parts.leases.num_quarantined,
            num_pinned=len(parts.pins),
            num_staging=parts.staging.num_running,
            tiers=tiers,
        )

    async def _list(self, name: str, limit: int) -> Answer:
        limit = max(0, min(limit, _MAX_LISTED))
        if name == ARENA:
            infos = [
                _info(block.header, block.source, block.num_pins)
                for block in self._parts.catalog.published()
                if block.header is not None
            ]
            return BlockList(infos[:limit])
        tier = self._tier(name)
        if tier is None:
            return self._unknown(name)
        listed: list[BlockInfo] = []
        if limit > 0:
            async for header in tier.headers():
                listed.append(_info(header, name, 0))
                if len(listed) >= limit:
                    break
        return BlockList(listed)

    async def _verify(self, names: Sequence[str]) -> Answer:
        num_good = num_bad = 0
        for name in names:
            tier = self._tier(name)
            if name == ARENA:
                good, bad = await self._verify_arena()
            elif tier is not None:
                good, bad = await self._verify_tier(tier)
            else:
                return self._unknown(name)
            num_good += good
            num_bad += bad
        return Verified(num_good, num_bad)

    async def _verify_arena(self) -> tuple[int, int]:
        num_good = num_bad = 0
        catalog = self._parts.catalog
        for block in catalog.published():
            if not block.is_listed or block.header is None:
                continue
            catalog.pin(block)
            try:
                await asyncio.to_thread(verify, block.header, block.payload.data, block.name)
                num_good += 1
            except BlockCorruptError:
                catalog.drop(block.name)
                num_bad += 1
            finally:
                catalog.unpin(block)
        return num_good, num_bad

    async def _clear(self, names: Sequence[str]) -> Answer:
        num_cleared = 0
        for name in names:
            tier = self._tier(name)
            if name == ARENA:
                self._parts.pins.unpin(self._parts.pins.pinned())
                num_cleared += sum(
                    self._parts.catalog.drop(block.name)
                    for block in self._parts.catalog.published()
                )
            elif tier is not None:
                num_cleared += await self._clear_tier(tier)
            else:
                return self._unknown(name)
        return Changed(num_cleared)

    async def _clear_tier(self, tier: Tier) -> int:
        names = [header.name async for header in tier.headers()]
        for start in range(0, len(names), _REMOVED_AT_ONCE):
            removed = names[start : start + _REMOVED_AT_ONCE]
            await tier.remove(removed)
            for name in removed:
                self._parts.events.removed(name, TierId(tier.name))
        return len(names)

    async def _verify_tier(self, tier: Tier) -> tuple[int, int]:
        num_good = num_bad = 0
        async for header in tier.headers():
            buffer = np.empty(header.payload_bytes, np.uint8)
            try:
                await tier.load_into(header.name, buffer.data)
                num_good += 1
            except BlockLostError:
                self._parts.events.removed(header.name, TierId(tier.name))
                num_bad += 1
        return num_good, num_bad

    def _matching(self, hashes: Sequence[str]) -> list[CachedBlock]:
        return _matching(hashes, list(self._parts.catalog.published()))

    def _tier(self, name: str) -> Tier | None:
        return next((tier for tier in self._parts.tiers if tier.name == name), None)

    def _unknown(self, name: str) -> Failed:
        known = ", ".join([ARENA, *(tier.name for tier in self._parts.tiers)])
        return Failed(f"there is no tier {name[:64]!r} here, only {known}")


def _matching(hashes: Sequence[str], blocks: Sequence[CachedBlock]) -> list[CachedBlock]:
    prefixes = tuple(prefix.lower() for prefix in hashes if prefix)
    return [block for block in blocks if block.name.block_hash.hex().startswith(prefixes)]


def _info(header: BlockHeader, source: str, num_pins: int) -> BlockInfo:
    return BlockInfo(
        block_hash=header.name.block_hash.hex(),
        parent_hash=None if header.parent_hash is None else header.parent_hash.hex(),
        namespace=header.name.namespace.hex(),
        num_tokens=len(header.token_ids),
        payload_bytes=header.payload_bytes,
        source=source,
        num_pins=num_pins,
    )
