"""Watching one worker's URL: a look every second, sooner when a request failed there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cache_router.errors import UpstreamError, UpstreamProtocolError
from cache_router.kv_event_follower import FollowerStats
from cache_router.settings import Settings
from cache_router.types import WorkerId
from cache_router.worker_registry import EventEndpoint, ServedModel
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


class Findings(Protocol):
    """Takes what a watch finds out."""

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

    def lose(self, worker_id: WorkerId, spec: WorkerSpec, reason: str) -> None:
        """Write that a worker is not up; it stays known, so that its models are."""

    def remove(self, worker_id: WorkerId) -> None:
        """Forget a worker that does not exist any more."""

    def distrust(self, worker_id: WorkerId, reason: str) -> None:
        """Write that no events can be followed."""


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


class WorkerWatch:
    """One URL: a look every second, sooner when a request failed there."""

    def __init__(
        self,
        findings: Findings,
        probe: WorkerProbe,
        spec: WorkerSpec,
        settings: Settings,
        make_follower: FollowerFactory,
        learn_models: ModelLearner,
    ) -> None:
        self.spec = spec
        self.looked_once = False
        self.problem: str | None = "not looked at yet"
        self._findings = findings
        self._probe = probe
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
        """Watch until cancelled; followers of events run in `tasks` beside it."""
        while True:
            try:
                await self._look(tasks)
            except UpstreamError as error:
                self._failed(error)
            except Exception as error:
                # One worker's odd answer must not end the watching of all others.
                logger.exception("looking at worker %s failed in the gateway", self.spec.url)
                self._failed(UpstreamProtocolError(self.spec.url, f"cannot be read: {error!r}"))
            self.looked_once = True
            try:
                async with asyncio.timeout(self._poll_s):
                    await self._look_now.wait()
            except TimeoutError:
                pass
            self._look_now.clear()

    @property
    def seen(self) -> bool:
        """Whether the worker has said what it serves, now or before."""
        return bool(self._ranks)

    def event_stats(self) -> dict[WorkerId, FollowerStats]:
        """Counters of each event stream of this URL that is followed."""
        return {
            rank.worker_id: rank.follower.stats
            for rank in self._ranks.values()
            if rank.follower is not None
        }

    def suspect(self) -> None:
        """Count it as down, and look again now."""
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
            self._findings.remove(gone.worker_id)
        for rank, endpoint in by_rank.items():
            worker_id = WorkerId(self.spec.url if rank is None else f"{self.spec.url}#dp{rank}")
            self._findings.enter(worker_id, self.spec, rank, self._models, self._epoch, endpoint)
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
            self._findings.distrust(worker_id, reason)
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
            self._findings.lose(rank.worker_id, self.spec, reason)
