"""Blocks that an operator wants to stay in the arena."""

from __future__ import annotations

from collections.abc import Iterable

from engine_workers.cache_server.catalog import CachedBlock, Catalog


class AdminPins:
    """Pins by name, each once, for as long as the server lives.

    Args:
        catalog: Holds the pins.
        max_bytes: What may be pinned, so that room is left for what comes.
    """

    def __init__(self, catalog: Catalog, max_bytes: int) -> None:
        self._catalog = catalog
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pinned: dict[CachedBlock, None] = {}

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._pinned)

    def __contains__(self, block: object) -> bool:
        """Whether a block is pinned here."""
        return block in self._pinned

    def pin(self, blocks: Iterable[CachedBlock]) -> int:
        """Pin blocks that can be found, as far as they fit; say how many are pinned newly."""
        num_new = 0
        for block in blocks:
            num_bytes = block.slot.num_bytes
            if block not in self._pinned and self._num_bytes + num_bytes <= self._max_bytes:
                self._catalog.pin(block)
                self._pinned[block] = None
                self._num_bytes += num_bytes
                num_new += 1
        return num_new

    def unpin(self, blocks: Iterable[CachedBlock]) -> int:
        """Undo `pin`; say how many were pinned."""
        known = [block for block in blocks if block in self._pinned]
        for block in known:
            del self._pinned[block]
            self._num_bytes -= block.slot.num_bytes
            self._catalog.unpin(block)
        return len(known)

    def pinned(self) -> list[CachedBlock]:
        """All of them."""
        return list(self._pinned)
