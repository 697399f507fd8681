"""The words that both sides share: small, immutable, free of I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

import numpy as np
from numpy.typing import NDArray

WorkerId = NewType("WorkerId", str)
"""A routing target: the worker's base URL, with `#dpN` behind it if the URL has several
data-parallel ranks. Stable over restarts; two engines on one host differ by their port."""

BlockHash = NewType("BlockHash", int)
"""Our own chained 64-bit hash of a block and all that precedes it; for routing only, where a
collision costs a detour. Stored KV is named by the engine's full hashes, never by these."""

EngineBlockHash = int | bytes
"""An engine's name for a block. Opaque: version and settings decide what it is made of."""

TokenIds = NDArray[np.uint32]
"""Token ids of one sequence, shape (num_tokens,)."""


class Medium(StrEnum):
    """What a tier is made of, as KV events spell it; fastest first."""

    GPU = "GPU"
    CPU = "CPU"
    STORAGE = "STORAGE"


class TierId(StrEnum):
    """A rung of block storage, fastest first: what a block has to be brought from."""

    GPU = "gpu"
    """The engine's own KV cache, whatever it is made of."""
    RAM = "ram"
    """Memory of the node: no copy over a network."""
    SSD = "ssd"
    REDIS = "redis"
    S3 = "s3"
    OTHER = "other"
    """Storage that says nothing we know about itself: taken for the slowest."""

    @property
    def is_shared(self) -> bool:
        """Whether every node of the cluster reaches what lies there."""
        return self in (TierId.REDIS, TierId.S3)


def tier_of(medium: Medium, ownership: str | None) -> TierId:
    """Name the tier of an event's blocks: storage is told apart by who owns it."""
    if medium is Medium.GPU:
        return TierId.GPU
    if medium is Medium.CPU:
        return TierId.RAM
    return next((tier for tier in _STORAGE if tier == ownership), TierId.OTHER)


_STORAGE = (TierId.SSD, TierId.REDIS, TierId.S3)


class Trust(StrEnum):
    """How far the index may be believed about one worker."""

    EXACT = "exact"
    """Every event since the worker's start (or since its cache was last empty) was applied."""
    DEGRADED = "degraded"
    """Some events are missing: what is indexed may be gone, and more may be there."""
    LOAD_ONLY = "load-only"
    """No event stream: the worker's cache is unknown, which is not the same as empty."""


class RouteReason(StrEnum):
    """Why a worker was chosen; the value of `x-radixgate-route`."""

    PREFIX = "prefix"
    TIER = "tier"
    SESSION = "session"
    LOAD = "load"
    NO_TOKENS = "no_tokens"
    FALLBACK = "fallback"


@dataclass(frozen=True, slots=True)
class PromptRoot:
    """What a prompt's block hashes are seeded with, apart from its tokens."""

    model: str
    """The base model's name, as its workers serve it."""
    lora_name: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class RouteQuery:
    """All that the router may know of a request."""

    root: PromptRoot
    prompts: Sequence[TokenIds]
    """One array a prompt, empty if the tokens are not known. They go to one worker together."""
    max_output_tokens: int = 0
    """What the request may generate at most, 0 if it does not say."""
    session_key: str | None = None
    """A hint that breaks ties (`prompt_cache_key`); never an isolation boundary."""
    excluded: frozenset[WorkerId] = frozenset()
    """Workers that already failed this request."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of all prompts together, 0 if they are not known."""
        return sum(len(prompt) for prompt in self.prompts)


TOKENS_PER_RUNNING_REQUEST = 32
"""What a request in flight is worth in the cost, in tokens. It slows every step of its worker a
little for as long as it runs; without it, a trickle of requests that share a prefix, each of them
prefilled before the next one comes, would all go to the prefix's one holder."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One worker as the router saw it for one request; the terms of its cost, in tokens."""

    worker_id: WorkerId
    cached_tokens: int
    """Prompt tokens that this worker will not compute again: indexed or predicted."""
    uncached_tokens: int
    waiting_tokens: int
    """Prompt tokens of other requests that wait there for their prefill. What they share with
    this request is not counted: it would have to be computed for it anyway."""
    num_running: int
    """Requests in flight there through this gateway, of any phase."""
    trust: Trust
    load_tokens: int = 0
    """What bringing cached tokens from other tiers costs, in tokens computed meanwhile."""
    tokens_by_tier: Mapping[TierId, int] = field(default_factory=dict)
    """The cached tokens, by where they come from."""

    @property
    def cost_tokens(self) -> int:
        """Tokens to compute before this request's first token, and the price of company."""
        return self.uncached_tokens + self.load_tokens + self.waiting_tokens + self.running_tokens

    @property
    def running_tokens(self) -> int:
        """What the requests in flight there are worth."""
        return self.num_running * TOKENS_PER_RUNNING_REQUEST


@dataclass(frozen=True, slots=True)
class RouteDecision:
    """The chosen worker, and everything needed to explain the choice."""

    worker_id: WorkerId
    reason: RouteReason
    predicted_cached_tokens: int | None
    """None if nothing can be said: no tokens, or no event stream from the worker."""
    candidates: Sequence[Candidate] = field(default=())
    """Every worker that was considered, the chosen one first, then by rising cost."""
