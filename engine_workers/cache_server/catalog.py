"""Which blocks lie in the arena, who holds them, and who has to go for a new one.

A block is first reserved, then filled and verified by whoever reserved it, then published: only a
published block can be found. What is pinned keeps its memory, even if it is dropped meanwhile.
Nothing here waits, so no one sees a change half done. Not safe for threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from engine_workers.blocks.block_header import BlockHeader
from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.arena import Arena
from engine_workers.cache_server.eviction import EvictionPolicy
from engine_workers.cache_server.slots import Slot, slot_bytes_for
from engine_workers.cache_server.tenant_quota import TenantQuota


@dataclass(slots=True, eq=False)
class CachedBlock:
    """A block of the arena: a handle that stays good while it is pinned.

    Only the catalog changes it.
    """

    name: BlockName
    slot: Slot
    payload: NDArray[np.uint8]
    """Shape (payload_bytes,); written by whoever reserved it, by nobody once it is published."""
    header: BlockHeader | None = None
    """None until the block is published."""
    source: str = ""
    """Where its bytes came from: `engine`, or the tier they were loaded from."""
    num_pins: int = 0
    is_listed: bool = False
    """Whether it can be found."""


class CatalogWatcher(Protocol):
    """Is told what happens, after it has."""

    def published(self, block: CachedBlock) -> None:
        """A block can be found now."""

    def unlisted(self, block: CachedBlock) -> None:
        """A block can no longer be found."""

    def evicted(self, block: CachedBlock) -> None:
        """It gave way to others; `unlisted` was told before."""


class Catalog:
    """The arena's blocks by name.

    Args:
        arena: Where they lie.
        policy: Who gives way, sized by the arena.
        quota: What one tenant may hold of it.
        watcher: Is told of every change.
    """

    def __init__(
        self,
        arena: Arena,
        policy: EvictionPolicy[BlockName],
        quota: TenantQuota,
        watcher: CatalogWatcher,
    ) -> None:
        self._arena = arena
        self._policy = policy
        self._quota = quota
        self._watcher = watcher
        self._blocks: dict[BlockName, CachedBlock] = {}
        self._by_offset: dict[int, CachedBlock] = {}

    def __len__(self) -> int:
        """Blocks that can be found."""
        return len(self._blocks)

    def find(self, name: BlockName) -> CachedBlock | None:
        """Find a published block."""
        return self._blocks.get(name)

    def published(self) -> Iterator[CachedBlock]:
        """All blocks that can be found, the oldest first."""
        return iter(list(self._blocks.values()))

    def touch(self, name: BlockName) -> None:
        """Note that a block was asked for and found."""
        self._policy.touch(name)
        self._quota.touch(name)

    def reserve(self, name: BlockName, payload_bytes: int) -> CachedBlock | None:
        """Make room for a block; the handle comes pinned, and nobody else finds it.

        Two may fill the same block at once, each in a place of its own.

        Returns:
            None if nothing can give way for it: all else is in use, or it is too large.
        """
        slots = self._arena.slots
        slot_bytes = slot_bytes_for(payload_bytes)
        if not slots.slots_per_segment(slot_bytes):
            return None
        slot = slots.take(slot_bytes) or self._make_room(slot_bytes)
        if slot is None:
            return None
        block = CachedBlock(name, slot, self._arena.view(slot, payload_bytes), num_pins=1)
        self._by_offset[slot.offset] = block
        return block

    def publish(self, block: CachedBlock, header: BlockHeader, source: str) -> bool:
        """Let a reserved block be found: its payload is complete and verified. It stays pinned.

        Returns:
            False if it is there already, or too much is pinned of the arena or of its tenant's
            part; its memory then goes with its pins.
        """
        assert not block.is_listed, "published twice"
        name = block.name
        if name in self._blocks:
            return False
        share_bytes = self._arena.slots.share_bytes(block.slot.num_bytes)
        over_quota = self._quota.add(header, share_bytes)
        for victim in over_quota:
            if victim != name:
                self._policy.remove(victim)
                self._evict(victim)
        if name in over_quota:
            return False
        victims = self._policy.insert(name, share_bytes, header.parent_name)
        for victim in victims:
            if victim != name:
                self._evict(victim)
        if name in victims:
            self._quota.remove(name)
            return False
        block.header = header
        block.source = source
        block.is_listed = True
        self._blocks[name] = block
        for _ in range(block.num_pins):
            self._policy.pin(name)
            self._quota.pin(name)
        self._watcher.published(block)
        return True

    def pin(self, block: CachedBlock) -> None:
        """Keep a block's memory as it is until it was unpinned as often."""
        block.num_pins += 1
        if block.is_listed:
            self._policy.pin(block.name)
            self._quota.pin(block.name)

    def unpin(self, block: CachedBlock) -> None:
        """Undo one `pin`; the last one frees the memory of a block that was dropped."""
        block.num_pins -= 1
        assert block.num_pins >= 0, "unpinned more often than pinned"
        if block.is_listed:
            self._policy.unpin(block.name)
            self._quota.unpin(block.name)
        elif block.num_pins == 0:
            self._free(block)

    def drop(self, name: BlockName) -> bool:
        """Let a block no longer be found; its memory is free once nobody holds it.

        Returns:
            Whether it was there.
        """
        block = self._blocks.get(name)
        if block is None:
            return False
        self._policy.remove(name)
        self._unlist(block)
        return True

    def _evict(self, name: BlockName) -> None:
        block = self._blocks[name]
        self._unlist(block)
        self._watcher.evicted(block)

    def _unlist(self, block: CachedBlock) -> None:
        del self._blocks[block.name]
        self._quota.remove(block.name)
        block.is_listed = False
        self._watcher.unlisted(block)
        if block.num_pins == 0:
            self._free(block)

    def _free(self, block: CachedBlock) -> None:
        del self._by_offset[block.slot.offset]
        self._arena.slots.give_back(block.slot)

    def _make_room(self, slot_bytes: int) -> Slot | None:
        """Evict for a slot: what the policy says first.

        That may free slots of other sizes only; then a whole segment of those has to go.
        """
        slots = self._arena.slots
        for victim in self._policy.evict(slots.share_bytes(slot_bytes)):
            self._evict(victim)
        slot = slots.take(slot_bytes)
        if slot is not None:
            return slot
        for offsets in slots.segments_of_other_size(slot_bytes):
            inside = [self._by_offset[offset] for offset in offsets]
            if all(block.num_pins == 0 for block in inside):
                for block in inside:
                    self._policy.remove(block.name)
                    self._evict(block.name)
                return slots.take(slot_bytes)
        return None
