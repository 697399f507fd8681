"""How much of a request's prompts each worker has, or is about to have, in its cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from cache_router.hashing import hash_blocks
from cache_router.predictions import Predictions
from cache_router.radix_index import RadixIndex
from cache_router.types import BlockHash, PromptRoot, RouteQuery, TierId, Trust, WorkerId
from cache_router.worker_registry import WorkerInfo

# vLLM's own default on GPUs. It only shapes predictions about a worker that has not sent an
# event; the first one brings the true size.
_UNSEEN_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Overlap:
    """What one worker need not compute for a request."""

    cached_tokens: int
    """Prompt tokens, indexed or predicted, of all prompts."""
    in_flight_tokens: int
    """The part of them that is still being computed there, for other requests."""
    cached_hashes: Sequence[Sequence[BlockHash]]
    """For each prompt, at least the blocks of `cached_tokens`, parent first."""
    cached_blocks: Sequence[int]
    """For each prompt, how many of those hashes count."""


@dataclass(frozen=True, slots=True)
class _PromptMatch:
    """One prompt cut into blocks, and each worker's number of leading ones."""

    hashes: Sequence[BlockHash]
    max_cached_blocks: int
    indexed: dict[WorkerId, int]
    predicted: dict[WorkerId, int]
    computed: dict[WorkerId, int]
    """Predicted by requests whose prefill is done."""


class PrefixOverlaps:
    """Merges the index and the predictions, each worker by its own block size and model name."""

    def __init__(self, index: RadixIndex, predictions: Predictions) -> None:
        """Look into these two; nothing is changed in them."""
        self._index = index
        self._predictions = predictions

    def find(self, query: RouteQuery, workers: Iterable[WorkerInfo]) -> dict[WorkerId, Overlap]:
        """The overlap with each worker; a prompt is hashed once per model name and block size."""
        matches: dict[tuple[PromptRoot, int], list[_PromptMatch]] = {}
        overlaps: dict[WorkerId, Overlap] = {}
        for info in workers:
            key = self._hash_inputs(query, info)
            if key not in matches:
                matches[key] = self._match(query, *key)
            overlaps[info.worker_id] = _overlap(info, matches[key], block_size=key[1])
        return overlaps

    def hash_prompts(self, query: RouteQuery, info: WorkerInfo) -> list[list[BlockHash]]:
        """Block hashes of each prompt, as the worker's events would have them."""
        root, block_size = self._hash_inputs(query, info)
        return [hash_blocks(prompt, block_size, root) for prompt in query.prompts]

    def slowest_tier(self, worker_id: WorkerId, overlap: Overlap) -> TierId:
        """The slowest tier that the cached blocks must be read from."""
        return self._index.slowest_tier(
            worker_id,
            [
                block_hash
                for hashes, num_blocks in zip(
                    overlap.cached_hashes, overlap.cached_blocks, strict=True
                )
                for block_hash in hashes[:num_blocks]
            ],
        )

    def _hash_inputs(self, query: RouteQuery, info: WorkerInfo) -> tuple[PromptRoot, int]:
        # The request may use any of the names under which a worker serves its one base model;
        # that worker's hashes are seeded with the first.
        root = replace(query.root, model=info.base_model or query.root.model)
        return root, self._index.block_size_of(info.worker_id) or _UNSEEN_BLOCK_SIZE

    def _match(self, query: RouteQuery, root: PromptRoot, block_size: int) -> list[_PromptMatch]:
        matches = []
        for prompt in query.prompts:
            hashes = hash_blocks(prompt, block_size, root)
            matches.append(
                _PromptMatch(
                    hashes,
                    # A full hit still recomputes the last token: without it there are no
                    # logits to sample from.
                    max_cached_blocks=max(0, len(prompt) - 1) // block_size,
                    indexed=self._index.match(hashes),
                    predicted=self._predictions.match(hashes),
                    computed=self._predictions.match_computed(hashes),
                )
            )
        return matches


def _overlap(info: WorkerInfo, matches: Sequence[_PromptMatch], block_size: int) -> Overlap:
    worker_id = info.worker_id
    cached_blocks: list[int] = []
    in_flight_blocks = 0
    for match in matches:
        # What is indexed of a load-only worker may be of an earlier life, or half read.
        indexed = 0 if info.trust is Trust.LOAD_ONLY else match.indexed.get(worker_id, 0)
        computed = max(indexed, match.computed.get(worker_id, 0))
        cached = max(computed, match.predicted.get(worker_id, 0))
        cached_blocks.append(min(cached, match.max_cached_blocks))
        in_flight_blocks += cached_blocks[-1] - min(computed, match.max_cached_blocks)
    return Overlap(
        cached_tokens=sum(cached_blocks) * block_size,
        in_flight_tokens=in_flight_blocks * block_size,
        cached_hashes=[match.hashes for match in matches],
        cached_blocks=cached_blocks,
    )
