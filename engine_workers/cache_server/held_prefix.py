"""The blocks that one lookup has in hand while others are still on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.catalog import CachedBlock, Catalog


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a block was first held, and where its bytes came from."""

    source: str
    time: float


class HeldPrefix:
    """Blocks of one lookup that are in the arena, pinned as they come.

    Args:
        catalog: Where they are.
        names: The prefix that was asked for, beyond what the engine holds itself.
        clock: Seconds, monotonic.
    """

    def __init__(
        self, catalog: Catalog, names: Sequence[BlockName], clock: Callable[[], float]
    ) -> None:
        self._catalog = catalog
        self._names = names
        self._clock = clock
        self._blocks: dict[int, CachedBlock] = {}
        self._arrivals: dict[int, Arrival] = {}
        self._is_open = True

    def hold(self, index: int) -> bool:
        """Pin a block if it is there; say whether it is."""
        if index in self._blocks:
            return True
        block = self._catalog.find(self._names[index])
        if block is None or not self._is_open:
            return False
        self._catalog.pin(block)
        self._blocks[index] = block
        self._arrivals[index] = Arrival(block.source, self._clock())
        return True

    def arrival(self, index: int) -> Arrival | None:
        """Where a block came from and when it was first held here; None if it was not."""
        return self._arrivals.get(index)

    def take(self) -> list[CachedBlock]:
        """Give the longest prefix away, with its pins, and let go of the rest."""
        taken: list[CachedBlock] = []
        while (block := self._blocks.pop(len(taken), None)) is not None:
            taken.append(block)
        self.close()
        return taken

    def close(self) -> None:
        """Let go of all that was not taken; nothing is held from now on."""
        self._is_open = False
        for block in self._blocks.values():
            self._catalog.unpin(block)
        self._blocks.clear()
