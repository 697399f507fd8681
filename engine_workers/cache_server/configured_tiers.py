"""From settings to the tiers below the arena."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Sequence

from cache_router.errors import ConfigurationError, TierError
from cache_router.settings import Settings
from cache_router.types import TierId
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.sealing import Seal, configured_seal
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.event_sources import EventSources
from engine_workers.cache_server.eviction import S3Fifo
from engine_workers.cache_server.saving import ARENA
from engine_workers.tiers.breaker import BreakerTier
from engine_workers.tiers.redis import RedisTier
from engine_workers.tiers.redis_client import RedisOptions, configured_url
from engine_workers.tiers.s3 import S3Tier
from engine_workers.tiers.s3_client import S3Options, configured_credentials
from engine_workers.tiers.ssd import SsdOptions, SsdTier
from engine_workers.tiers.tier import Tier
from engine_workers.workspace import Workspace

_SETTING = "RADIXGATE_TIERS"
_KNOWN = ("ssd", "redis", "s3")


def tier_names(settings: Settings) -> list[str]:
    """Return the names of the tiers below the arena, the fastest first.

    Raises:
        ConfigurationError: An unknown name, one that comes twice, or no `ram` in front.
    """
    names = [name.strip() for name in settings.tiers.split(",") if name.strip()]
    if names[:1] != [ARENA]:
        raise ConfigurationError(
            _SETTING, f"begin with {ARENA}, from which engines load; say {ARENA},ssd"
        )
    below = names[1:]
    for name in below:
        if name not in _KNOWN:
            known = ", ".join((ARENA, *_KNOWN))
            raise ConfigurationError(_SETTING, f"there is no tier {name[:64]!r}, only {known}")
    if len(set(below)) < len(below):
        raise ConfigurationError(_SETTING, "name each tier once")
    return below


@contextlib.asynccontextmanager
async def opened_tiers(
    settings: Settings, workspace: Workspace, metrics: CacheMetrics, events: EventSources
) -> AsyncIterator[list[Tier]]:
    """Open the tiers that are configured, and close them at the end.

    Raises:
        ConfigurationError: One of them cannot work with its settings.
    """
    async with contextlib.AsyncExitStack() as stack:
        tiers: list[Tier] = []
        for name in tier_names(settings):
            tier: Tier
            if name == "ssd":
                tier = await _open_ssd(settings, workspace, metrics, events)
            elif name == "redis":
                tier = _redis(settings)
            else:
                tier = _s3(settings)
            guarded = BreakerTier(tier)
            stack.push_async_callback(guarded.close)
            metrics.watch_circuit(name, "read", guarded.reading)
            metrics.watch_circuit(name, "write", guarded.writing)
            tiers.append(guarded)
        yield tiers


async def _open_ssd(
    settings: Settings, workspace: Workspace, metrics: CacheMetrics, events: EventSources
) -> Tier:
    folder = settings.ssd_folder or workspace.state / "ssd"
    options = SsdOptions(folder, settings.ssd_threads, settings.ssd_fsync)

    def evicted(names: Sequence[BlockName]) -> None:
        metrics.evictions.labels(SsdTier.name).inc(len(names))
        for name in names:
            events.removed(name, TierId.SSD)

    try:
        return await SsdTier.open(options, S3Fifo(settings.ssd_capacity_bytes), evicted)
    except TierError as error:
        raise ConfigurationError("RADIXGATE_SSD_FOLDER", f"{folder}: {error.problem}") from error


def _redis(settings: Settings) -> Tier:
    options = RedisOptions(
        configured_url(settings.redis_url, settings.redis_url_file),
        settings.redis_cluster,
        settings.redis_ttl_s,
        settings.redis_timeout_s,
        settings.redis_connections,
    )
    return RedisTier(options, _seal(settings))


def _s3(settings: Settings) -> Tier:
    if settings.s3_bucket is None:
        raise ConfigurationError("RADIXGATE_S3_BUCKET", "name the bucket of the S3 tier")
    options = S3Options(
        settings.s3_bucket,
        settings.s3_prefix,
        settings.s3_endpoint,
        settings.s3_region,
        configured_credentials(
            settings.s3_access_key_id,
            settings.s3_secret_access_key,
            settings.s3_credentials_file,
        ),
        settings.s3_timeout_s,
        settings.s3_concurrency,
    )
    return S3Tier(options, _seal(settings))


def _seal(settings: Settings) -> Seal:
    return configured_seal(settings.tier_key_file, encrypt=settings.tier_encrypt)
