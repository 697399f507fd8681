"""Whether what was never asked for before earns its room in a full tier: tried out in miniature.

Both answers can be wrong by a lot. Where most content is never asked for again it pushes out what
is; where most of it is asked for once more, refusing it forgoes that one hit. So two small models
of the tier, over an eighth of all blocks, see every lookup: one takes everything, one only what
repeats. The one with more hits of late is followed.
"""

from __future__ import annotations

import numpy as np

from engine_workers.cache_server.eviction import S3Fifo
from engine_workers.cache_server.sightings import Counts, Keys

REPEATED = 2
"""Sightings from which on a block counts as repeated: the lookup that it came with is one."""

_SAMPLING_BITS = 3
_SAMPLED_SHARE = 1 / (1 << _SAMPLING_BITS)
_LEAD = 1.03
_LEAD_HITS = 3.0
"""A model has to be ahead by this factor and these hits before the other is left."""
_MEMORY = 4
"""Hits fade over this many times the blocks that a model holds."""


class _Model:
    """The tier in small."""

    def __init__(self, capacity_bytes: int, takes_everything: bool) -> None:
        self._policy = S3Fifo[int](capacity_bytes)
        self._takes_everything = takes_everything
        self._hits = 0.0

    def look_up(self, keys: list[int], counts: list[int], size_bytes: int) -> float:
        """Replay one prompt, save what is missing; return the faded number of hits."""
        policy = self._policy
        blocks_held = max(1, policy.capacity_bytes // size_bytes)
        self._hits *= max(0.0, 1 - len(keys) / (_MEMORY * blocks_held))
        self._hits += next((n for n, key in enumerate(keys) if key not in policy), len(keys))
        parent: int | None = None
        parent_count = 0
        for key, count in zip(keys, counts, strict=True):
            if key in policy:
                policy.touch(key)
            elif (
                self._takes_everything
                or policy.used_bytes + size_bytes <= policy.capacity_bytes
                or is_repeated(count, parent_count)
            ):
                policy.insert(key, size_bytes, parent)
            else:
                break
            parent, parent_count = key, count
        return self._hits


def is_repeated(count: int, parent_count: int) -> bool:
    """Whether a block repeats, or continues a prefix that does: it may be its next turn."""
    return count >= REPEATED or parent_count >= REPEATED


class AdmissionTrial:
    """One tier's two models.

    Args:
        capacity_bytes: Of the tier.
    """

    def __init__(self, capacity_bytes: int) -> None:
        sample_bytes = int(capacity_bytes * _SAMPLED_SHARE)
        self._taking = _Model(sample_bytes, takes_everything=True)
        self._refusing = _Model(sample_bytes, takes_everything=False)
        self.takes_everything = True
        """Whether new content earns its room, as far as is known."""

    def look_up(self, keys: Keys, counts: Counts, size_bytes: int) -> None:
        """Take in one prompt's lookup.

        Args:
            keys: Of its blocks, parent first.
            counts: How often each was seen, this lookup included; same shape.
            size_bytes: Of each block.
        """
        is_sampled = keys >> np.uint64(64 - _SAMPLING_BITS) == 0
        if not is_sampled.any():
            return
        sampled, seen = keys[is_sampled].tolist(), counts[is_sampled].tolist()
        taking = self._taking.look_up(sampled, seen, size_bytes)
        refusing = self._refusing.look_up(sampled, seen, size_bytes)
        if self.takes_everything:
            self.takes_everything = refusing <= taking * _LEAD + _LEAD_HITS
        else:
            self.takes_everything = taking > refusing * _LEAD + _LEAD_HITS
