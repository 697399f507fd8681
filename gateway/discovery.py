"""Watching the workers: who is up, what they serve, and whose events are followed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cache_router.errors import UpstreamError
from cache_router.kv_event_follower import FollowerStats
from cache_router.settings import Settings
from cache_router.types import Trust, WorkerId
from cache_router.worker_registry import EventEndpoint, ServedModel, WorkerRegistry
from gateway.upstream_client import Origin, UpstreamClient
from gateway.worker_probe import EventSources, WorkerProbe
from gateway.worker_spec import WorkerSpec

logger = logging.getLogger(__name__)

_FAILURES_TO_LOSE = 2
# Looks between two at what changes rarely: the model list, the process's start time.
_LOOKS_TO_REFRESH = 5


class Follower(Protocol):
    """Follows one worker's KV events into the index until it is cancelled."""

    stats: FollowerStats

    async def run(self) -> None:
        """Follow; returns only by cancellation."""

    def note_epoch(self, epoch: float) -> None:
        """Hear when the process that answers at the worker's address started."""


FollowerFactory = Callable[[WorkerId, str, EventEndpoint], Follower]
"""Makes a follower of a worker, given its base model's name and its endpoint."""

ModelLearner = Callable[[Sequence[ServedModel]], Awaitable[None]]
"""Gets ready for requests to these models; a worker that serves them waits for it."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send a request for a worker."""

    origin: Origin
    dp_rank: int | None


@dataclass(slots=True)
class _Rank:
    """One worker behind a URL, and the task that follows its events."""

    worker_id: WorkerId
    followed: tuple[str, EventEndpoint] | None
    """The model and the endpoint that the follower was made for."""
    follower: Follower | None
    task: asyncio.Task[None] | None

    def stop(self) -> None:
        if self.task is not None:
            self.task.cancel()


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
            _Watch(self, spec, settings, make_follower, learn_models) for spec in specs
        ]

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as tasks:
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
        return {
            rank.worker_id: rank.follower.stats
            for watch in self._watches
            for rank in watch.ranks
            if rank.follower is not None
        }

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
        self._registry.update(
            worker_id,
            url=spec.url,
            models=models,
            dp_rank=dp_rank,
            epoch=epoch,
            event_endpoint=endpoint,
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

    @property
    def client(self) -> UpstreamClient:
        """What probes ask with."""
        return self._client


class _Watch:
    """One URL: a look every second, sooner when a request failed there."""

    def __init__(
        self,
        discovery: Discovery,
        spec: WorkerSpec,
        settings: Settings,
        make_follower: FollowerFactory,
        learn_models: ModelLearner,
    ) -> None:
        self.spec = spec
        self.looked_once = False
        self.problem: str | None = "not looked at yet"
        self._discovery = discovery
        self._probe = WorkerProbe(discovery.client, spec.url, settings.worker_probe_timeout_s)
        self._poll_s = settings.worker_poll_s
        self._make_follower = make_follower
        self._learn_models = learn_models
        self._ranks: dict[int | None, _Rank] = {}
        self._models: Sequence[ServedModel] = ()
        self._sources = EventSources({}, None)
        self._epoch: float | None = None
        self._look_now = asyncio.Event()
        self._num_failures = 0
        self._looks_since_refresh = _LOOKS_TO_REFRESH

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            try:
                await self._look(tasks)
            except UpstreamError as error:
                self._failed(error)
            self.looked_once = True
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._look_now.wait()
            except TimeoutError:
                pass
            self._look_now.clear()

    @property
    def seen(self) -> bool:
        return bool(self._ranks)

    @property
    def ranks(self) -> Iterable[_Rank]:
        return self._ranks.values()

    def suspect(self) -> None:
        self._num_failures = _FAILURES_TO_LOSE
        self._lose("a request could not reach it")
        self._look_now.set()

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        await self._probe.check_health()
        if self._looks_since_refresh >= _LOOKS_TO_REFRESH:
            await self._refresh()
        self._looks_since_refresh += 1
        if self.problem is not None:
            logger.info("worker %s is up", self.spec.url)
        self.problem = None
        self._num_failures = 0
        self._follow(tasks)

    async def _refresh(self) -> None:
        models = [self.spec.model] if self.spec.model else await self._probe.models()
        if self.spec.events is not None:
            sources = EventSources({0: self.spec.events}, None)
        else:
            sources = await self._probe.event_sources()
        self._epoch = await self._probe.process_start_s()
        await self._learn_models(models)
        self._models, self._sources = models, sources
        self._looks_since_refresh = 0

    def _follow(self, tasks: asyncio.TaskGroup) -> None:
        """Make the registry and the followers match what was found."""
        sources = self._sources.by_rank
        by_rank: dict[int | None, EventEndpoint | None] = {
            # A rank that is alone needs no name of its own.
            (rank if len(sources) > 1 else None): endpoint
            for rank, endpoint in sources.items()
        } or {None: None}
        for rank in set(self._ranks) - set(by_rank):
            gone = self._ranks.pop(rank)
            gone.stop()
            self._discovery.remove(gone.worker_id)
        for rank, endpoint in by_rank.items():
            worker_id = WorkerId(self.spec.url if rank is None else f"{self.spec.url}#dp{rank}")
            self._discovery.enter(worker_id, self.spec, rank, self._models, self._epoch, endpoint)
            model = next((model.name for model in self._models if model.parent is None), None)
            followed = None if endpoint is None or model is None else (model, endpoint)
            known = self._ranks.get(rank)
            if known is None or known.followed != followed:
                if known is not None:
                    known.stop()
                known = self._ranks[rank] = self._start(tasks, worker_id, followed)
            if known.follower is not None and self._epoch is not None:
                known.follower.note_epoch(self._epoch)

    def _start(
        self,
        tasks: asyncio.TaskGroup,
        worker_id: WorkerId,
        followed: tuple[str, EventEndpoint] | None,
    ) -> _Rank:
        if followed is None:
            reason = self._sources.problem or "it serves no base model"
            logger.warning("worker %s: %s", worker_id, reason)
            self._discovery.distrust(worker_id, reason)
            return _Rank(worker_id, None, None, None)
        follower = self._make_follower(worker_id, *followed)
        task = tasks.create_task(follower.run(), name=f"kv-events:{worker_id}")
        return _Rank(worker_id, followed, follower, task)

    def _failed(self, error: UpstreamError) -> None:
        self._num_failures += 1
        if self.problem is None or self._num_failures == 1:
            logger.warning("worker %s: %s", self.spec.url, error.problem)
        if self._num_failures >= _FAILURES_TO_LOSE or not self._ranks:
            self._lose(error.problem)

    def _lose(self, reason: str) -> None:
        self.problem = reason
        # Another process may come back at this address: look at everything again.
        self._looks_since_refresh = _LOOKS_TO_REFRESH
        for rank in self._ranks.values():
            self._discovery.lose(rank.worker_id, self.spec, reason)
