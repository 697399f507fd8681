"""Where a block's bytes lie in the engine's memory, and copying them as a whole.

Only whole blocks: within one, the order of bytes is the attention kernel's own business, and what
looks like one token's row is not.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """One layer's KV tensor: `num_blocks` runs of bytes at even distances."""

    address: int
    """Of block 0."""
    stride_bytes: int
    """From one block to the next."""
    block_bytes: int
    """Of one block in this layer, contiguous."""


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """All layers of an engine's KV cache; a payload is a block's bytes of each layer, in order."""

    layers: tuple[LayerMemory, ...]
    num_blocks: int

    @property
    def payload_bytes(self) -> int:
        """Bytes of one block, all layers."""
        return sum(layer.block_bytes for layer in self.layers)

    def holds(self, block_ids: Sequence[int]) -> bool:
        """Whether these are blocks of this engine."""
        return all(0 <= block_id < self.num_blocks for block_id in block_ids)

    def checksum(self, block_id: int) -> int:
        """xxh3_64 of the payload as it lies in the engine now."""
        digest = xxhash.xxh3_64()
        for layer in self.layers:
            address = layer.address + block_id * layer.stride_bytes
            digest.update((ctypes.c_char * layer.block_bytes).from_address(address))
        return digest.intdigest()

    def copy_out(self, block_id: int, address: int) -> None:
        """Copy the engine's block to `payload_bytes` bytes of memory at `address`."""
        for layer in self.layers:
            source = layer.address + block_id * layer.stride_bytes
            ctypes.memmove(address, source, layer.block_bytes)
            address += layer.block_bytes

    def copy_in(self, block_id: int, address: int) -> None:
        """Copy a payload at `address` into the engine's block."""
        for layer in self.layers:
            target = layer.address + block_id * layer.stride_bytes
            ctypes.memmove(target, address, layer.block_bytes)
            address += layer.block_bytes
