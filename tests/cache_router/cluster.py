"""A router over workers that a test describes."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

import numpy as np

from cache_router.hashing import hash_blocks
from cache_router.kv_events import BlockStored
from cache_router.predictions import Predictions
from cache_router.radix_index import RadixIndex
from cache_router.reservation import Reservation
from cache_router.router import CacheRouter
from cache_router.types import (
    Candidate,
    Medium,
    PromptRoot,
    RouteQuery,
    TokenIds,
    Trust,
    WorkerId,
)
from cache_router.worker_registry import ServedModel, WorkerRegistry

BLOCK_SIZE = 16
A, B, C = WorkerId("http://a:1"), WorkerId("http://b:1"), WorkerId("http://c:1")
ROOT = PromptRoot("m")


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


def served(
    name: str = "m", max_model_len: int | None = 10_000, parent: str | None = None
) -> ServedModel:
    return ServedModel(name, name, max_model_len, parent, 0, "vllm")


class Cluster:
    """A router over workers that a test describes."""

    def __init__(self, *workers: WorkerId, seed: int = 1) -> None:
        self.clock = Clock()
        self.registry = WorkerRegistry()
        self.index = RadixIndex(max_blocks=1_000_000)
        self.predictions = Predictions(self.clock, ttl_s=5.0)
        self.router = CacheRouter(self.registry, self.index, self.predictions, Random(seed))
        for worker_id in workers:
            self.add(worker_id)

    def add(self, worker_id: WorkerId, *models: ServedModel) -> None:
        self.registry.update(worker_id, url=worker_id, models=models or [served()])
        self.registry.set_ready(worker_id, True, "answers")
        self.registry.set_trust(worker_id, Trust.EXACT, "all events applied")

    def store(
        self,
        worker_id: WorkerId,
        tokens: TokenIds,
        *,
        block_size: int = BLOCK_SIZE,
        medium: Medium = Medium.GPU,
        ownership: str | None = None,
        model: str = "m",
        root: PromptRoot = ROOT,
    ) -> None:
        """Report a sequence as cached, as the engine would."""
        num_blocks = len(tokens) // block_size
        lora = [] if root.lora_name is None else [root.lora_name]
        salt = [] if root.cache_salt is None else [root.cache_salt]
        self.index.apply(
            worker_id,
            BlockStored(
                list(hash_blocks(tokens, block_size, root)),
                None,
                tokens[: num_blocks * block_size].tolist(),
                block_size,
                medium,
                root.lora_name,
                [lora + salt if i == 0 else lora for i in range(num_blocks)],
                ownership=ownership,
            ),
            model,
        )

    def candidate(self, query: RouteQuery, worker_id: WorkerId) -> Candidate:
        decision = self.router.route(query)
        return next(each for each in decision.candidates if each.worker_id == worker_id)

    def load(self, worker_id: WorkerId) -> tuple[int, int]:
        """Running requests and waiting tokens."""
        load = self.registry.load(worker_id)
        return load.num_running, load.waiting_tokens

    def reserve(self, query: RouteQuery) -> Reservation:
        return self.router.reserve(query, self.router.route(query))


def tokens(num_tokens: int, seed: int = 0) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 50_000, num_tokens, dtype=np.uint32)


def ask(*prompts: TokenIds, root: PromptRoot = ROOT, session_key: str | None = None) -> RouteQuery:
    return RouteQuery(root, prompts, session_key=session_key)


def joined(*parts: TokenIds) -> TokenIds:
    return np.concatenate(parts)
