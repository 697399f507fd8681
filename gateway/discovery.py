"""The workers: who is up, what they serve, where requests for them go."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from cache_router.kv_event_follower import FollowerStats
from cache_router.settings import Settings
from cache_router.types import Trust, WorkerId
from cache_router.worker_registry import EventEndpoint, ServedModel, WorkerRegistry
from gateway.cache_server_watch import CacheServerWatch, cache_source_id
from gateway.upstream_client import Origin, UpstreamClient
from gateway.worker_probe import WorkerProbe
from gateway.worker_spec import WorkerSpec
from gateway.worker_watch import FollowerFactory, ModelLearner, WorkerWatch


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send a request for a worker."""

    origin: Origin
    dp_rank: int | None


class Discovery:
    """Looks at every worker again and again, each in a task of its own."""

    def __init__(
        self,
        specs: Sequence[WorkerSpec],
        registry: WorkerRegistry,
        client: UpstreamClient,
        settings: Settings,
        make_follower: FollowerFactory,
        learn_models: ModelLearner,
    ) -> None:
        """Watch `specs` and write what is found into `registry`."""
        self._registry = registry
        self._client = client
        self._targets: dict[WorkerId, Target] = {}
        self._watches = [
            WorkerWatch(
                self,
                WorkerProbe(client, spec.url, settings.worker_probe_timeout_s),
                spec,
                settings,
                make_follower,
                learn_models,
            )
            for spec in specs
        ]
        cache_urls = dict.fromkeys(spec.cache_url for spec in specs if spec.cache_url is not None)
        self._cache_watches = [
            CacheServerWatch(url, registry, client, settings, make_follower) for url in cache_urls
        ]

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for cache_watch in self._cache_watches:
                tasks.create_task(cache_watch.run(tasks), name=f"watch:{cache_watch.url}")
            for watch in self._watches:
                tasks.create_task(watch.run(tasks), name=f"watch:{watch.spec.url}")

    @property
    def num_urls(self) -> int:
        """Configured workers, seen or not."""
        return len(self._watches)

    @property
    def first_round_done(self) -> bool:
        """Whether every configured worker has been looked at once."""
        return all(watch.looked_once for watch in self._watches)

    @property
    def all_seen(self) -> bool:
        """Whether every configured worker has said what it serves, now or before."""
        return all(watch.seen for watch in self._watches)

    def problems(self) -> dict[str, str]:
        """Why a configured worker is not usable, by URL; for `/health`."""
        return {
            watch.spec.url: watch.problem for watch in self._watches if watch.problem is not None
        }

    def cache_problems(self) -> dict[str, str]:
        """Why a configured cache server is not usable, by URL; for `/health`."""
        return {
            watch.url: watch.problem for watch in self._cache_watches if watch.problem is not None
        }

    def target(self, worker_id: WorkerId) -> Target:
        """Where to send a request for a worker that the registry knows."""
        return self._targets[worker_id]

    def suspect(self, worker_id: WorkerId) -> None:
        """Take no more requests there until another look says it is up.

        For what a request found out: the connection was refused or reset.
        """
        target = self._targets.get(worker_id)
        for watch in self._watches:
            if target is not None and watch.spec.origin == target.origin:
                watch.suspect()

    def event_stats(self) -> dict[WorkerId, FollowerStats]:
        """Counters of every event stream that is followed."""
        stats: dict[WorkerId, FollowerStats] = {}
        for watch in self._watches:
            stats |= watch.event_stats()
        for cache_watch in self._cache_watches:
            stats |= cache_watch.event_stats()
        return stats

    # --- for the watches ---

    def enter(
        self,
        worker_id: WorkerId,
        spec: WorkerSpec,
        dp_rank: int | None,
        models: Sequence[ServedModel],
        epoch: float | None,
        endpoint: EventEndpoint | None,
    ) -> None:
        """Write a worker that is up."""
        self._targets[worker_id] = Target(spec.origin, dp_rank)
        base = next((model.name for model in models if model.parent is None), None)
        cache_source = None
        if spec.cache_url is not None and base is not None:
            cache_source = cache_source_id(spec.cache_url, base)
        self._registry.update(
            worker_id,
            url=spec.url,
            models=models,
            dp_rank=dp_rank,
            epoch=epoch,
            event_endpoint=endpoint,
            cache_source=cache_source,
        )
        self._registry.set_ready(worker_id, True, "up")

    def lose(self, worker_id: WorkerId, spec: WorkerSpec, reason: str) -> None:
        """Write that a worker is not up; it stays known, so that its models are."""
        self._registry.set_ready(worker_id, False, reason)
        self._client.forget(spec.origin)

    def remove(self, worker_id: WorkerId) -> None:
        """Forget a worker that does not exist any more."""
        self._targets.pop(worker_id, None)
        self._registry.remove(worker_id)

    def distrust(self, worker_id: WorkerId, reason: str) -> None:
        """Write that no events can be followed."""
        self._registry.set_trust(worker_id, Trust.LOAD_ONLY, reason)
