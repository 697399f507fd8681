"""The node's shared memory: written here, read by every engine, cut into slots."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_workers.cache_server.sealed_memory import SealedMemory
from engine_workers.cache_server.slots import PAGE_BYTES, Slot, SlotAllocator

_NUM_SEGMENTS = 64
_MAX_SEGMENT_BYTES = 256 * 1024 * 1024


class Arena:
    """Memory and its slots. Costs address space at once, and pages only as they are used.

    Args:
        num_bytes: How large it may become, rounded down to whole segments.

    Raises:
        OSError: The system does not give that much address space.
    """

    def __init__(self, num_bytes: int) -> None:
        pages = max(1, min(num_bytes // _NUM_SEGMENTS, _MAX_SEGMENT_BYTES) // PAGE_BYTES)
        segment_bytes = pages * PAGE_BYTES
        self.slots = SlotAllocator(max(1, num_bytes // segment_bytes), segment_bytes)
        self._memory = SealedMemory.written_here("radixgate-arena", self.num_bytes)

    @property
    def num_bytes(self) -> int:
        """Size of the mapping."""
        return self.slots.num_segments * self.slots.segment_bytes

    @property
    def fd(self) -> int:
        """The descriptor that engines get; they can map it, but not for writing."""
        return self._memory.fd

    def view(self, slot: Slot, payload_bytes: int) -> NDArray[np.uint8]:
        """Look at a slot's payload, shape (payload_bytes,), writable."""
        return self._memory.data[slot.offset : slot.offset + payload_bytes]

    def close(self) -> None:
        """Let go of the memory once nothing looks into it."""
        self._memory.close()
