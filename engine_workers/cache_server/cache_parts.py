"""The parts of one cache server, and how they hang together."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cache_router.settings import Settings
from cache_router.types import TierId
from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.admin_pins import AdminPins
from engine_workers.cache_server.arena import Arena
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.catalog import CachedBlock, Catalog
from engine_workers.cache_server.engines import Engines
from engine_workers.cache_server.event_sources import EventSources
from engine_workers.cache_server.eviction import S3Fifo
from engine_workers.cache_server.leases import Leases
from engine_workers.cache_server.load_planner import LoadPlanner
from engine_workers.cache_server.lookup import Deadlines, Lookups
from engine_workers.cache_server.saving import ARENA, Saver
from engine_workers.cache_server.staging import Staging
from engine_workers.cache_server.store_choice import StoreChoice, WriteLimits
from engine_workers.cache_server.tenant_quota import TenantQuota
from engine_workers.cache_server.tier_questions import TierQuestions
from engine_workers.cache_server.tier_use import TierUse
from engine_workers.cache_server.tier_writer import TierWriter
from engine_workers.tiers.tier import Tier

_PINNED_SHARE = 2
"""An operator may pin this part of the arena."""
_QUEUE_SHARE = 8
"""What waits for one tier may hold this part of the arena: it cannot be evicted meanwhile."""


@dataclass(frozen=True, slots=True)
class CacheParts:
    """Everything that connections share; one event loop owns it."""

    boot_token: str
    arena: Arena
    tiers: Sequence[Tier]
    catalog: Catalog
    leases: Leases
    engines: Engines
    saver: Saver
    staging: Staging
    planner: LoadPlanner
    choice: StoreChoice
    use: TierUse
    lookups: Lookups
    writer: TierWriter
    pins: AdminPins
    events: EventSources
    metrics: CacheMetrics


def build_parts(
    settings: Settings,
    tiers: Sequence[Tier],
    metrics: CacheMetrics,
    events: EventSources,
    clock: Callable[[], float],
) -> CacheParts:
    """Put a server together.

    Args:
        settings: Sizes and deadlines.
        tiers: Those below the arena, the fastest first.
        metrics: What to count with.
        events: Is told which block is where.
        clock: Seconds, monotonic.

    Raises:
        OSError: The system does not give the arena its address space.
    """
    arena = Arena(settings.arena_bytes)

    quota = TenantQuota(int(arena.num_bytes * settings.tenant_quota_share))
    catalog = Catalog(arena, S3Fifo[BlockName](arena.num_bytes), quota, _Watcher(metrics, events))
    max_waiting_bytes = arena.num_bytes // _QUEUE_SHARE
    writer = TierWriter(tiers, catalog, metrics, max_waiting_bytes, events, clock)

    planner = LoadPlanner(metrics)
    limits = WriteLimits(
        local_bytes_per_s=settings.ssd_write_bytes_per_s,
        shared_bytes_per_s=settings.shared_write_bytes_per_s,
        max_waiting_bytes=max_waiting_bytes,
    )
    choice = StoreChoice(tiers, planner, metrics, limits, writer.waiting_bytes, clock)

    def saved(block: CachedBlock) -> None:
        writer.offer(block, choice.tiers_for(block, tiers))

    def used(block: CachedBlock) -> None:
        writer.offer(block, choice.tiers_on_use(block))

    def loaded(block: CachedBlock, source: Tier) -> None:
        # What came from far is kept nearby too: the arena may soon need its place.
        nearer = tiers[: tiers.index(source)]
        local = [tier for tier in nearer if not tier.is_shared]
        writer.offer(block, choice.tiers_for(block, local))

    questions = TierQuestions(tiers, metrics, clock)

    def lost(name: BlockName, tier: Tier) -> None:
        questions.forget(tier, name)
        events.removed(name, TierId(tier.name))

    staging = Staging(catalog, metrics, loaded, lost, clock)
    deadlines = Deadlines(settings.lookup_deadline_s, settings.stage_deadline_s)
    leases = Leases(catalog, settings.lease_ttl_s, clock)
    engines = Engines()
    metrics.watch("radixgate_cache_arena_bytes", "Size of the arena.", lambda: arena.num_bytes)
    metrics.watch(
        "radixgate_cache_arena_used_bytes", "Bytes of taken slots.", lambda: arena.slots.used_bytes
    )
    metrics.watch("radixgate_cache_arena_blocks", "Blocks in the arena.", lambda: len(catalog))
    metrics.watch("radixgate_cache_leases", "Leases in order.", lambda: leases.num_held)
    metrics.watch(
        "radixgate_cache_quarantined_leases",
        "Leases of engines that did not return them and may still run.",
        lambda: leases.num_quarantined,
    )
    metrics.watch("radixgate_cache_engines", "Engines that are connected.", lambda: len(engines))
    return CacheParts(
        boot_token=secrets.token_hex(8),
        arena=arena,
        tiers=tiers,
        catalog=catalog,
        leases=leases,
        engines=engines,
        saver=Saver(catalog, metrics, saved, clock),
        staging=staging,
        planner=planner,
        choice=choice,
        use=TierUse(planner, metrics, clock),
        lookups=Lookups(catalog, staging, questions, deadlines, planner, metrics, used, clock),
        writer=writer,
        pins=AdminPins(catalog, arena.num_bytes // _PINNED_SHARE),
        events=events,
        metrics=metrics,
    )


class _Watcher:
    """Counts and tells what happens in the arena."""

    def __init__(self, metrics: CacheMetrics, events: EventSources) -> None:
        self._metrics = metrics
        self._events = events

    def published(self, block: CachedBlock) -> None:
        """Tell gateways."""
        assert block.header is not None, "it is published"
        self._events.stored(block.header, TierId.RAM)

    def unlisted(self, block: CachedBlock) -> None:
        """Tell gateways."""
        self._events.removed(block.name, TierId.RAM)

    def evicted(self, _: CachedBlock) -> None:
        """Count."""
        self._metrics.evictions.labels(ARENA).inc()
