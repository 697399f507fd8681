"""Where one engine puts blocks to be saved. It may write at any time, so nothing is believed twice.

A header is read into memory of our own before it is looked at, and a payload is copied into the
arena before it is verified: what is verified is what is published.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cache_router.errors import BlockCorruptError
from engine_workers.blocks.block_header import BlockHeader, pack, unpack
from engine_workers.cache_server.sealed_memory import SealedMemory
from engine_workers.cache_server.slots import slot_bytes_for

MAX_HEADER_BYTES = 64 * 1024
_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64
_MAC_BYTES = 64


def ring_slot_bytes(block_bytes: int) -> int:
    """Return the size of a ring slot that holds any header and a payload of `block_bytes`."""
    return slot_bytes_for(_LENGTH.size + MAX_HEADER_BYTES + _ALIGNMENT + block_bytes)


@dataclass(frozen=True, slots=True)
class RingBlock:
    """What an engine says lies in a slot: the header is ours, the payload still in its hands."""

    header: BlockHeader
    payload: NDArray[np.uint8]
    """Shape (header.payload_bytes,), read-only here and liable to change while it is read."""


class WriteRing:
    """A worker's ring.

    Args:
        num_slots: How many blocks can wait in it.
        block_bytes: Payload of each.
        block_size: Tokens of each.

    Raises:
        OSError: The system does not give that much address space.
    """

    def __init__(self, num_slots: int, block_bytes: int, block_size: int) -> None:
        self.num_slots = num_slots
        self.slot_bytes = ring_slot_bytes(block_bytes)
        self._block_bytes = block_bytes
        self._block_size = block_size
        self._memory = SealedMemory.written_elsewhere("radixgate-ring", num_slots * self.slot_bytes)

    @property
    def fd(self) -> int:
        """The descriptor that this one worker gets."""
        return self._memory.fd

    def read(self, slot: int) -> RingBlock:
        """Read the header in `slot`, which is one of `num_slots`, and find its payload.

        Raises:
            BlockCorruptError: A length that cannot be, a broken header, or another size of block.
        """
        data = self._memory.data[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]
        (header_bytes,) = _LENGTH.unpack(data[: _LENGTH.size].tobytes())
        if not 0 < header_bytes <= MAX_HEADER_BYTES:
            raise BlockCorruptError("header length")
        end = _LENGTH.size + header_bytes
        header = unpack(data[_LENGTH.size : end].tobytes())
        if header.payload_bytes != self._block_bytes:
            raise BlockCorruptError("payload length")
        if len(header.token_ids) != self._block_size:
            raise BlockCorruptError("number of tokens")
        _require_storable(header)
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        return RingBlock(header, data[start : start + self._block_bytes])

    def close(self) -> None:
        """Let go of the memory once nothing looks into it."""
        self._memory.close()


def _require_storable(header: BlockHeader) -> None:
    """Check that tiers can store the header, with the MAC that shared ones may add.

    Raises:
        BlockCorruptError: They could not; an engine of ours sends none like that.
    """
    try:
        pack(replace(header, mac=bytes(_MAC_BYTES)))
    except ValueError as error:
        raise BlockCorruptError("header cannot be stored") from error
