"""The header before every stored block: what it is, and how to tell that it still is that."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from engine_workers.blocks.block_name import BlockName


class Codec(IntEnum):
    """How a payload is encoded."""

    RAW = 0
    """The engine's own bytes."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Everything that is known of a stored block."""

    name: BlockName
    parent_hash: bytes | None
    """None for the first block of a prompt."""
    token_ids: tuple[int, ...]
    extra_keys: tuple[object, ...]
    """The engine's extra hash keys of this block as its KV events carry them: adapter, salt, ..."""
    lora_name: str | None
    codec: Codec
    payload_bytes: int
    checksum: int
    """xxh3_64 of the payload as stored."""
    mac: bytes | None = None
    """Keyed digest over header and payload, on shared tiers that are configured with a key."""
