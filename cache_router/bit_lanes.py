"""Who holds a block, as the bits of one integer: a lane a worker, in it one bit a tier."""

from __future__ import annotations

from dataclasses import dataclass

from cache_router.types import TierId

RANK = {tier: rank for rank, tier in enumerate(TierId)}
"""A tier's bit within a lane, the fastest lowest."""
LANE = len(RANK)
"""Bits of a lane."""
LANE_MASK = (1 << LANE) - 1
assert LANE == 6, "`on_any_tier` folds six bits"


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive blocks of a prompt that have the same holders."""

    num_blocks: int
    holders: int
    """Bits for `RadixIndex.lane`, `shared_lanes` and `fastest_tier`; nothing to read otherwise."""


def on_any_tier(bits: int) -> int:
    """Put a worker's lowest bit wherever any bit of its lane is set; other bits are garbage."""
    bits |= bits >> 3
    return bits | bits >> 1 | bits >> 2
