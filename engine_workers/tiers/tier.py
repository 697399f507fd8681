"""The seam: what the cache server asks of every tier below its arena."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cache_router.types import Medium
from engine_workers.blocks.block_header import BlockHeader
from engine_workers.blocks.block_name import BlockName


@dataclass(frozen=True, slots=True)
class TierUsage:
    """How full a tier is; shared tiers know only what this node put there."""

    num_blocks: int
    used_bytes: int
    capacity_bytes: int | None
    """None where the store does its own evicting."""


class Tier(Protocol):
    """Stores whole blocks by name. Safe to call from many tasks of one event loop.

    No method blocks the loop. A method that is cancelled leaves no half-written block visible, and
    ends only when nothing of it touches the caller's memory any more, so that may be reused. All of
    them raise `TierError` when the tier cannot be asked (down, full, refusing credentials);
    what is simply not there is an answer, never an error.
    """

    name: str
    """`ssd`, `redis`, `s3`: the `ownership` of its KV events."""
    medium: Medium
    is_shared: bool
    """Whether other nodes read and write the same store."""

    async def contains(self, names: Sequence[BlockName]) -> list[bool]:
        """Say which blocks are there: one answer a name, in order."""

    async def load_into(self, name: BlockName, payload: memoryview) -> BlockHeader:
        """Read a block's payload into `payload`, which has exactly its size, and verify it.

        Raises:
            BlockLostError: Not there, cut short, of another name or namespace, or not what its
                checksum or MAC says; it has been deleted if it was there. `payload` is undefined.
        """

    async def store(self, header: BlockHeader, payload: memoryview) -> None:
        """Store a block; one that is there already is left as it is.

        When it returns, `contains` says yes, here and on every node of a shared tier.
        """

    async def remove(self, names: Sequence[BlockName]) -> None:
        """Delete blocks; those that are not there are no error."""

    def headers(self) -> AsyncIterator[BlockHeader]:
        """Every block that this node knows to be there, parents before children where it can."""

    def usage(self) -> TierUsage:
        """How full it is."""

    async def close(self) -> None:
        """Finish what is being written and let go of files and connections."""
