"""Which tiers a block of the arena is written to: each tier's admission, asked with its figures.

What a tier refused is remembered while it may still be in the arena, and offered again when it is
asked for: by then it repeats.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.admission import Admission, Offer, Room, Verdict
from engine_workers.cache_server.admission_trial import AdmissionTrial
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.catalog import CachedBlock
from engine_workers.cache_server.load_planner import LoadPlanner
from engine_workers.cache_server.sightings import Sightings, keys_of
from engine_workers.cache_server.write_budget import WriteBudget
from engine_workers.tiers.tier import Tier

_BURST_S = 4.0
"""Seconds of a tier's write budget that may be spent at once: a long prompt is one burst."""
_MAX_REFUSED = 65_536


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """How much may be written to tiers."""

    local_bytes_per_s: float
    """To each tier of this node."""
    shared_bytes_per_s: float
    """To each tier that other nodes write to as well."""
    max_waiting_bytes: int
    """What may wait for one tier."""


class StoreChoice:
    """Asks each tier's doorkeeper.

    Args:
        tiers: All below the arena.
        planner: Says what loading a block saves.
        metrics: Counts what is refused, by verdict.
        limits: How much may be written.
        waiting_bytes: What waits for a tier now.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        tiers: Sequence[Tier],
        planner: LoadPlanner,
        metrics: CacheMetrics,
        limits: WriteLimits,
        waiting_bytes: Callable[[Tier], int],
        clock: Callable[[], float],
    ) -> None:
        self._planner = planner
        self._metrics = metrics
        self._limits = limits
        self._waiting_bytes = waiting_bytes
        self._sightings = Sightings()
        self._doors = {tier.name: self._door(tier, clock) for tier in tiers}
        self._refused: OrderedDict[BlockName, list[Tier]] = OrderedDict()

    def look_up(self, names: Sequence[BlockName], size_bytes: int) -> None:
        """Learn from a prompt that was looked up.

        Args:
            names: All its full blocks, parent first.
            size_bytes: Of each of them.
        """
        if not self._doors or not names:
            return
        keys = keys_of(names)
        counts = self._sightings.see(keys)
        for door in self._doors.values():
            door.look_up(keys, counts, size_bytes)

    def tiers_for(self, block: CachedBlock, tiers: Iterable[Tier]) -> list[Tier]:
        """Choose among some tiers for a published block that is in none of them."""
        taking: list[Tier] = []
        refusing: list[Tier] = []
        for tier in tiers:
            verdict = self._decide(block, tier)
            if verdict is Verdict.ADMITTED:
                taking.append(tier)
                continue
            self._metrics.operations.labels(tier.name, "save", verdict).inc()
            if verdict is Verdict.NOT_WORTH_LOADING:
                self._planner.note_refused(tier.name)
            else:
                refusing.append(tier)
        if refusing:
            self._refused[block.name] = refusing
            if len(self._refused) > _MAX_REFUSED:
                self._refused.popitem(last=False)
        return taking

    def tiers_on_use(self, block: CachedBlock) -> list[Tier]:
        """Choose again for a published block that was found: tiers that refused it may take it."""
        refusing = self._refused.pop(block.name, None)
        return self.tiers_for(block, refusing) if refusing else []

    def _decide(self, block: CachedBlock, tier: Tier) -> Verdict:
        header = block.header
        assert header is not None, "it is published"
        size_bytes = len(block.payload)
        namespace, num_tokens = block.name.namespace, len(header.token_ids)
        saved_s = self._planner.saved_seconds(namespace, tier.name, num_tokens, size_bytes)
        offer = Offer(block.name, header.parent_name, size_bytes, saved_s)
        usage = tier.usage()
        waiting_bytes = self._waiting_bytes(tier)
        free_bytes = (
            None
            if usage.capacity_bytes is None
            else usage.capacity_bytes - usage.used_bytes - waiting_bytes
        )
        room = Room(free_bytes, waiting_bytes, self._limits.max_waiting_bytes)
        return self._doors[tier.name].decide(offer, room)

    def _door(self, tier: Tier, clock: Callable[[], float]) -> Admission:
        limits = self._limits
        per_s = limits.shared_bytes_per_s if tier.is_shared else limits.local_bytes_per_s
        capacity_bytes = tier.usage().capacity_bytes
        trial = None if capacity_bytes is None else AdmissionTrial(capacity_bytes)
        return Admission(self._sightings, trial, WriteBudget(per_s, _BURST_S, clock))
