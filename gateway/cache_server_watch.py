"""Watching one cache server: whose models' blocks it has, how fast, and where its events are."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

import msgspec

from cache_router.cost import Rates
from cache_router.errors import UpstreamError, UpstreamProtocolError
from cache_router.kv_event_follower import FollowerStats
from cache_router.settings import Settings
from cache_router.types import WorkerId
from cache_router.worker_registry import CacheSource, EventEndpoint, WorkerRegistry
from gateway.upstream_client import Origin, UpstreamClient, UpstreamRequest
from gateway.worker_probe import reachable
from gateway.worker_watch import Follower, FollowerFactory

logger = logging.getLogger(__name__)

_MAX_BYTES = 1024 * 1024
_FAILURES_TO_LOSE = 3


class _Source(msgspec.Struct):
    models: list[str]
    block_bytes: int
    endpoint: str
    replay_endpoint: str
    rates: Rates = msgspec.field(default_factory=Rates)


class _Sources(msgspec.Struct):
    sources: list[_Source]


_DECODER = msgspec.json.Decoder(_Sources)


def cache_source_id(cache_url: str, base_model: str) -> WorkerId:
    """Name what a cache server holds of a model."""
    return WorkerId(f"{cache_url}#{base_model}")


@dataclass(slots=True)
class _Followed:
    endpoint: EventEndpoint
    follower: Follower
    task: asyncio.Task[None]


class CacheServerWatch:
    """One URL: a look every second. A cache server that is down costs its hits and nothing else."""

    def __init__(
        self,
        url: str,
        registry: WorkerRegistry,
        client: UpstreamClient,
        settings: Settings,
        make_follower: FollowerFactory,
    ) -> None:
        self.url = url
        self.problem: str | None = "not looked at yet"
        self._origin = Origin.parse(url)
        self._registry = registry
        self._client = client
        self._poll_s = settings.worker_poll_s
        self._timeout_s = settings.worker_probe_timeout_s
        self._make_follower = make_follower
        self._followed: dict[WorkerId, _Followed] = {}
        self._num_failures = 0

    async def run(self, tasks: asyncio.TaskGroup) -> None:
        """Watch until cancelled; followers of events run in `tasks` beside it."""
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    sources = await self._ask()
            except UpstreamError as error:
                self._failed(error.problem)
            except TimeoutError:
                self._failed(f"did not answer in {self._timeout_s:g} s")
            else:
                self._num_failures = 0
                self.problem = None
                self._follow(tasks, sources)
            await asyncio.sleep(self._poll_s)

    def event_stats(self) -> dict[WorkerId, FollowerStats]:
        """Counters of each event stream of this server that is followed."""
        return {source_id: each.follower.stats for source_id, each in self._followed.items()}

    async def _ask(self) -> list[_Source]:
        request = UpstreamRequest(self.url, self._origin, b"GET", "/kv_event_sources")
        response = await self._client.send_repeatable(request)
        try:
            body = await response.read_all(_MAX_BYTES)
        finally:
            response.close()
        try:
            return _DECODER.decode(body).sources
        except msgspec.MsgspecError as error:
            raise UpstreamProtocolError(
                self.url, f"answers /kv_event_sources with status {response.status} and no sources"
            ) from error

    def _follow(self, tasks: asyncio.TaskGroup, sources: list[_Source]) -> None:
        """Make the registry and the followers match what was found."""
        # The first name that engines serve a model under seeds their blocks' hashes.
        found = {cache_source_id(self.url, each.models[0]): each for each in sources if each.models}
        for source_id in set(self._followed) - set(found):
            self._forget(source_id)
        for source_id, each in found.items():
            endpoint = EventEndpoint(
                reachable(each.endpoint, self.url), reachable(each.replay_endpoint, self.url)
            )
            self._registry.update_cache_source(
                CacheSource(
                    source_id, self.url, each.models[0], each.block_bytes, each.rates, endpoint
                )
            )
            known = self._followed.get(source_id)
            if known is None or known.endpoint != endpoint:
                if known is not None:
                    known.task.cancel()
                follower = self._make_follower(source_id, each.models[0], endpoint)
                task = tasks.create_task(follower.run(), name=f"kv-events:{source_id}")
                self._followed[source_id] = _Followed(endpoint, follower, task)
                logger.info("cache server %s: following its blocks of %s", self.url, each.models[0])

    def _failed(self, problem: str) -> None:
        self._num_failures += 1
        if self.problem is None or self._num_failures == 1:
            logger.warning("cache server %s: %s", self.url, problem)
        if self._num_failures >= _FAILURES_TO_LOSE:
            self.problem = problem
            for source_id in list(self._followed):
                self._forget(source_id)

    def _forget(self, source_id: WorkerId) -> None:
        # A follower that ends takes its entries out of the index.
        self._followed.pop(source_id).task.cancel()
        self._registry.remove_cache_source(source_id)
