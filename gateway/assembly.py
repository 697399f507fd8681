"""Putting one gateway together, and taking it apart again."""

from __future__ import annotations

import asyncio
import importlib.metadata
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from random import Random

import zmq.asyncio

from cache_router.kv_event_follower import KvEventFollower
from cache_router.predictions import Predictions
from cache_router.radix_index import RadixIndex
from cache_router.router import CacheRouter
from cache_router.settings import Settings
from cache_router.types import WorkerId
from cache_router.worker_registry import EventEndpoint, WorkerRegistry
from gateway.discovery import Discovery
from gateway.intake import Intake
from gateway.live_metrics import LiveMetrics
from gateway.metrics import Metrics
from gateway.request_tokens import EngineTokenizer, RequestTokens
from gateway.services import Services
from gateway.upstream_client import UpstreamClient
from gateway.worker_spec import WorkerSpec


@asynccontextmanager
async def assemble(
    settings: Settings,
    specs: Sequence[WorkerSpec],
    *,
    clock: Callable[[], float],
    rng: Random,
) -> AsyncIterator[Services]:
    """Build a gateway's parts and run what watches the workers, for the length of a block.

    Args:
        settings: Every limit.
        specs: The workers.
        clock: Seconds that only go forward, for what expires.
        rng: Breaks ties and samples.
    """
    registry = WorkerRegistry()
    index = RadixIndex(settings.index_max_blocks)
    predictions = Predictions(clock, settings.prediction_ttl_s)
    client = UpstreamClient(settings)
    context = zmq.asyncio.Context()

    def follow(worker_id: WorkerId, model: str, endpoint: EventEndpoint) -> KvEventFollower:
        return KvEventFollower(
            worker_id,
            model,
            endpoint,
            context=context,
            index=index,
            registry=registry,
            predictions=predictions,
            replay_timeout_s=settings.kv_event_replay_timeout_s,
            probe_s=settings.kv_event_probe_s,
        )

    router = CacheRouter(registry, index, predictions, rng)
    tokens = RequestTokens(settings, registry, EngineTokenizer(registry, router, client), rng)
    discovery = Discovery(specs, registry, client, settings, follow, tokens.learn)
    services = Services(
        version=importlib.metadata.version("radixgate"),
        settings=settings,
        registry=registry,
        index=index,
        router=router,
        tokenizer=tokens,
        discovery=discovery,
        client=client,
        metrics=Metrics(importlib.metadata.version("radixgate")),
        intake=Intake(lambda: settings.max_inflight_per_worker * max(1, discovery.num_urls)),
    )
    services.metrics.registry.register(LiveMetrics(services))
    try:
        async with tokens, asyncio.TaskGroup() as tasks:
            watching = tasks.create_task(discovery.run(), name="discovery")
            try:
                yield services
            finally:
                watching.cancel()
    finally:
        client.close()
        context.destroy(linger=0)
