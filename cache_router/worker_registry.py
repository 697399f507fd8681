"""The known workers and what is true of each: models, readiness, trust and live load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cache_router.cost import Rates
from cache_router.errors import UnknownModelError
from cache_router.types import PromptRoot, Trust, WorkerId


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One entry of a worker's model list."""

    name: str
    root: str
    """Where the weights came from: a folder or a hub id."""
    max_model_len: int | None
    """Prompt and answer together, in tokens; None if the worker does not say."""
    parent: str | None
    """The base model's name if this is a LoRA adapter."""
    created: int
    """Seconds since the Unix epoch."""
    owned_by: str


@dataclass(frozen=True, slots=True)
class EventEndpoint:
    """Where a worker publishes its KV events: ZMQ addresses that can be connected to."""

    endpoint: str
    replay_endpoint: str | None = None
    topic: str = ""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker at one moment."""

    worker_id: WorkerId
    url: str
    dp_rank: int | None
    """Data-parallel rank behind the URL, None if there is only one."""
    models: tuple[ServedModel, ...]
    epoch: float | None
    """When the process started, in seconds since the Unix epoch; None if it does not say."""
    event_endpoint: EventEndpoint | None
    ready: bool = False
    ready_reason: str = "not seen yet"
    trust: Trust = Trust.LOAD_ONLY
    trust_reason: str = "no events followed yet"
    cache_source: WorkerId | None = None
    """What its node's cache server holds of its model, None if it has none."""

    @property
    def base_model(self) -> str | None:
        """Name that seeds this worker's block hashes, None while its models are unknown.

        A worker that serves its one model under several names lists them in a fixed order, so
        the first one stands for all of them.
        """
        return next((model.name for model in self.models if model.parent is None), None)

    def serves(self, model: str) -> bool:
        """Whether a model or an adapter of that name is in the worker's list."""
        return any(served.name == model for served in self.models)

    def max_model_len(self, model: str) -> int | None:
        """Limit of the named model in tokens, None if it is unknown.

        Workers list adapters without a limit: theirs is the one of their base model.
        """
        for served in self.models:
            if served.name == model:
                if served.max_model_len is None and served.parent is not None:
                    return self.max_model_len(served.parent)
                return served.max_model_len
        return None


@dataclass(frozen=True, slots=True)
class CacheSource:
    """One cache server's blocks of one model: an event source that requests are not sent to."""

    source_id: WorkerId
    url: str
    """The cache server's."""
    model: str
    """The base model's name, as the workers serve it."""
    block_bytes: int
    """Bytes of a block's KV."""
    rates: Rates
    """What computing and bringing blocks takes on its node, as the server has learned it."""
    event_endpoint: EventEndpoint
    trust: Trust = Trust.LOAD_ONLY
    trust_reason: str = "no events followed yet"


@dataclass(slots=True)
class WorkerLoad:
    """What is in flight on one worker through this gateway, kept up by reservations."""

    num_running: int = 0
    """Requests of any phase."""
    waiting_tokens: int = 0
    """Uncached prompt tokens of requests that have not answered with a first token."""
    cold_turn: int = 0
    """Number of the last request that was sent there with nothing cached, 0 for none yet; the
    worker whose turn is longest ago gets the next one."""


class WorkerRegistry:
    """Every known worker. Discovery writes facts and readiness, the event followers trust."""

    def __init__(self) -> None:
        self._workers: dict[WorkerId, WorkerInfo] = {}
        self._loads: dict[WorkerId, WorkerLoad] = {}
        self._cache_sources: dict[WorkerId, CacheSource] = {}

    def update_cache_source(self, source: CacheSource) -> None:
        """Enter what a cache server says; what is known of its trust stays."""
        known = self._cache_sources.get(source.source_id)
        if known is not None:
            source = replace(source, trust=known.trust, trust_reason=known.trust_reason)
        self._cache_sources[source.source_id] = source

    def remove_cache_source(self, source_id: WorkerId) -> None:
        """Forget a cache server's blocks of a model."""
        self._cache_sources.pop(source_id, None)

    def cache_source(self, source_id: WorkerId) -> CacheSource | None:
        """What is known of a cache server's blocks of a model, None if nothing is."""
        return self._cache_sources.get(source_id)

    def cache_sources(self) -> tuple[CacheSource, ...]:
        """All of them, in the order in which they were found."""
        return tuple(self._cache_sources.values())

    def update(
        self,
        worker_id: WorkerId,
        *,
        url: str,
        models: Sequence[ServedModel],
        dp_rank: int | None = None,
        epoch: float | None = None,
        event_endpoint: EventEndpoint | None = None,
        cache_source: WorkerId | None = None,
    ) -> WorkerInfo:
        """Enter what discovery found; a new worker starts not ready and load-only."""
        known = self._workers.get(worker_id)
        facts = WorkerInfo(
            worker_id,
            url,
            dp_rank,
            tuple(models),
            epoch,
            event_endpoint,
            cache_source=cache_source,
        )
        if known is not None:
            facts = replace(
                facts,
                ready=known.ready,
                ready_reason=known.ready_reason,
                trust=known.trust,
                trust_reason=known.trust_reason,
            )
        self._loads.setdefault(worker_id, WorkerLoad())
        self._workers[worker_id] = facts
        return facts

    def remove(self, worker_id: WorkerId) -> None:
        """Forget a worker; reservations that it still has are released into nothing."""
        self._workers.pop(worker_id, None)
        self._loads.pop(worker_id, None)

    # The name is fixed by what discovery calls; the flag is the fact that is set.
    def set_ready(self, worker_id: WorkerId, ready: bool, reason: str) -> None:
        """Say whether the worker may get requests, and why.

        Raises:
            KeyError: the worker is not known.
        """
        self._workers[worker_id] = replace(
            self._workers[worker_id], ready=ready, ready_reason=reason
        )

    def set_trust(self, worker_id: WorkerId, trust: Trust, reason: str) -> None:
        """Say how far the index may be believed about a worker or a cache source.

        Nothing happens if it is not known.
        """
        if worker_id in self._workers:
            self._workers[worker_id] = replace(
                self._workers[worker_id], trust=trust, trust_reason=reason
            )
        elif worker_id in self._cache_sources:
            self._cache_sources[worker_id] = replace(
                self._cache_sources[worker_id], trust=trust, trust_reason=reason
            )

    def get(self, worker_id: WorkerId) -> WorkerInfo | None:
        """What is known of one worker, None if it is not known at all."""
        return self._workers.get(worker_id)

    def workers(self) -> tuple[WorkerInfo, ...]:
        """All known workers, ready or not, in the order in which they were found."""
        return tuple(self._workers.values())

    def workers_for(self, model: str) -> tuple[WorkerInfo, ...]:
        """All known workers, ready or not, that list this model or adapter."""
        return tuple(info for info in self._workers.values() if info.serves(model))

    def models(self) -> tuple[ServedModel, ...]:
        """Every served model once, with the largest limit that any worker has for it."""
        union: dict[str, ServedModel] = {}
        for info in self._workers.values():
            for model in info.models:
                known = union.setdefault(model.name, model)
                if (known.max_model_len or 0) < (model.max_model_len or 0):
                    union[model.name] = replace(known, max_model_len=model.max_model_len)
        return tuple(union.values())

    def prompt_root(self, model: str, cache_salt: str | None = None) -> PromptRoot:
        """What seeds the block hashes of a request for this model or adapter.

        Raises:
            UnknownModelError: no known worker lists the name.
        """
        for info in self._workers.values():
            for served in info.models:
                if served.name == model:
                    if served.parent is not None:
                        return PromptRoot(served.parent, model, cache_salt)
                    return PromptRoot(model, None, cache_salt)
        raise UnknownModelError(model)

    def load(self, worker_id: WorkerId) -> WorkerLoad:
        """The worker's live counters, for reservations to change and the router to read.

        Raises:
            KeyError: the worker is not known.
        """
        return self._loads[worker_id]
