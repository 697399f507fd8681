"""What a stored block is called."""

from __future__ import annotations

from dataclasses import dataclass

from engine_workers.blocks.namespace import Fingerprint


@dataclass(frozen=True, slots=True)
class BlockName:
    """A block of one namespace: the engine's own full hash, never one of ours cut to 64 bits."""

    namespace: Fingerprint
    block_hash: bytes
    """The engine's chained hash: 32 bytes with the SHA-256 algorithms."""
