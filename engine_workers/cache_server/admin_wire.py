"""What `radixgate cache` and the cache server say to each other, in frames as on the engines' wire.

One question, one answer, over the same socket; whoever may open the socket may ask.
"""

from __future__ import annotations

import msgspec


class _Message(msgspec.Struct, frozen=True, tag=True):
    """Base of all messages: a map tagged by `type`."""


# --- questions ---


class GetStats(_Message, frozen=True):
    """How full everything is."""


class ListBlocks(_Message, frozen=True):
    """Blocks of one tier."""

    tier: str
    limit: int
    """Most blocks to list."""


class VerifyBlocks(_Message, frozen=True):
    """Read every block of some tiers again; what is not right is dropped."""

    tiers: list[str]


class PinBlocks(_Message, frozen=True):
    """Keep blocks of the arena from being evicted."""

    hashes: list[str]
    """First digits of block hashes, hexadecimal."""


class UnpinBlocks(_Message, frozen=True):
    """Undo PinBlocks."""

    hashes: list[str]


class ClearBlocks(_Message, frozen=True):
    """Forget all blocks that this node knows in some tiers."""

    tiers: list[str]


# --- answers ---


class TierStats(msgspec.Struct, frozen=True):
    """One tier."""

    tier: str
    num_blocks: int
    used_bytes: int
    capacity_bytes: int | None
    waiting_bytes: int
    """What is queued to be written to it."""


class Stats(_Message, frozen=True):
    """Answer to GetStats."""

    boot_token: str
    uptime_s: float
    num_engines: int
    num_leases: int
    num_quarantined_leases: int
    num_pinned: int
    num_staging: int
    tiers: list[TierStats]


class BlockInfo(msgspec.Struct, frozen=True):
    """One block; its token ids stay in the server."""

    block_hash: str
    parent_hash: str | None
    namespace: str
    num_tokens: int
    payload_bytes: int
    source: str
    num_pins: int


class BlockList(_Message, frozen=True):
    """Answer to ListBlocks."""

    blocks: list[BlockInfo]


class Verified(_Message, frozen=True):
    """Answer to VerifyBlocks."""

    num_good: int
    num_bad: int


class Changed(_Message, frozen=True):
    """Answer to PinBlocks, UnpinBlocks and ClearBlocks: how many blocks were."""

    num_blocks: int


class Failed(_Message, frozen=True):
    """What was asked cannot be done."""

    reason: str


Question = GetStats | ListBlocks | VerifyBlocks | PinBlocks | UnpinBlocks | ClearBlocks
Answer = Stats | BlockList | Verified | Changed | Failed
