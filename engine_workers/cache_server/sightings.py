"""How often each block was asked for lately: bounded memory, old sightings fade.

A count-min sketch. It never counts too little, apart from what has faded, and seldom too much.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from engine_workers.blocks.block_name import BlockName

Keys = NDArray[np.uint64]
"""64-bit digests of block names, shape (num_blocks,)."""

Counts = NDArray[np.uint8]
"""How often each of some blocks was seen, shape (num_blocks,)."""

_MAX_COUNT = 15
_MULTIPLIERS = np.array(
    [[0x9E3779B97F4A7C15], [0xC2B2AE3D27D4EB4F], [0x165667B19E3779F9], [0xD6E8FEB86659FD93]],
    dtype=np.uint64,
)
"""One odd number a row: the upper bits of a product are a hash."""


def keys_of(names: Sequence[BlockName]) -> Keys:
    """Digest names; (num_blocks,) in their order."""
    digests = (xxhash.xxh3_64_intdigest(name.namespace + name.block_hash) for name in names)
    return np.fromiter(digests, dtype=np.uint64, count=len(names))


class Sightings:
    """Counts up to 15 by key. All counts are halved after half as many sightings as counters.

    Args:
        counters_bits: Each of the four rows has two to this power of bytes. 20 bits remember about
            half a million blocks, in 4 MiB.
    """

    def __init__(self, counters_bits: int = 20) -> None:
        self._shift = np.uint64(64 - counters_bits)
        self._counts = np.zeros((len(_MULTIPLIERS), 1 << counters_bits), dtype=np.uint8)
        self._rows = np.arange(len(_MULTIPLIERS))[:, np.newaxis]
        self._period = (1 << counters_bits) // 2
        self._num_since_halving = 0

    def see(self, keys: Keys) -> Counts:
        """Count one sighting of each key; return the counts, this one included: (num_keys,)."""
        places = self._places(keys)
        counts = self._counts[self._rows, places]
        raised: Counts = np.minimum(counts.min(axis=0) + 1, _MAX_COUNT).astype(np.uint8)
        # Only what is below: a counter that others share is not raised for nothing.
        np.maximum.at(self._counts, (self._rows, places), np.broadcast_to(raised, places.shape))
        self._num_since_halving += len(keys)
        if self._num_since_halving >= self._period:
            self._counts >>= 1
            self._num_since_halving = 0
        return raised

    def count(self, keys: Keys) -> Counts:
        """Sightings of each key, shape (num_keys,)."""
        counts: Counts = self._counts[self._rows, self._places(keys)].min(axis=0)
        return counts

    def _places(self, keys: Keys) -> Keys:
        """Each row's counter of each key, shape (rows, num_keys)."""
        return (keys[np.newaxis, :] * _MULTIPLIERS) >> self._shift
