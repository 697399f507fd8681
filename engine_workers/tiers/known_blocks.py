"""What this node knows of a store that it shares with others and that evicts without telling."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass

from engine_workers.blocks.block_header import BlockHeader, pack, unpack
from engine_workers.blocks.block_name import BlockName
from engine_workers.tiers.tier import TierUsage

_MAX_KNOWN_BLOCKS = 65_536
_NAMES_AT_ONCE = 512


@dataclass(frozen=True, slots=True)
class _Known:
    packed: bytes
    """The header, packed: a tenth of what its token ids take as Python objects."""
    num_bytes: int


class KnownBlocks:
    """Blocks that this process stored or loaded, in that order; the oldest are forgotten.

    Headers are kept here rather than read back: who can write to the store could have changed them.
    """

    def __init__(self, max_blocks: int = _MAX_KNOWN_BLOCKS) -> None:
        self._max_blocks = max_blocks
        self._blocks: dict[BlockName, _Known] = {}
        self._used_bytes = 0

    def add(self, header: BlockHeader) -> None:
        """Note that a block is there."""
        if header.name not in self._blocks:
            self._blocks[header.name] = _Known(pack(header), header.payload_bytes)
            self._used_bytes += header.payload_bytes
            if len(self._blocks) > self._max_blocks:
                self.discard(next(iter(self._blocks)))

    def discard(self, name: BlockName) -> None:
        """Note that a block is gone; unknown names are ignored."""
        known = self._blocks.pop(name, None)
        if known is not None:
            self._used_bytes -= known.num_bytes

    async def headers(
        self, contains: Callable[[Sequence[BlockName]], Awaitable[list[bool]]]
    ) -> AsyncIterator[BlockHeader]:
        """Yield the headers of those that the store still has, and forget the others."""
        names = list(self._blocks)
        for begin in range(0, len(names) or 1, _NAMES_AT_ONCE):
            part = names[begin : begin + _NAMES_AT_ONCE]
            for name, is_there in zip(part, await contains(part), strict=True):
                known = self._blocks.get(name)
                if not is_there:
                    self.discard(name)
                elif known is not None:
                    yield unpack(known.packed)

    def usage(self) -> TierUsage:
        """Count what is known; the store may have evicted some of it."""
        return TierUsage(len(self._blocks), self._used_bytes, None)
