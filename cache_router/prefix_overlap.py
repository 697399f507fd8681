"""How much of a request's prompts each worker has, or is about to have, in its cache."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cache_router.bit_lanes import Span
from cache_router.cost import Prefix, TierRun, plan_load
from cache_router.hashing import hash_blocks
from cache_router.predictions import Predictions
from cache_router.radix_index import RadixIndex
from cache_router.types import BlockHash, PromptRoot, RouteQuery, TierId, Trust, WorkerId
from cache_router.worker_registry import CacheSource, WorkerInfo, WorkerRegistry

# vLLM's own default on GPUs. It only shapes predictions about a worker that has not sent an
# event; the first one brings the true size.
_UNSEEN_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Overlap:
    """What one worker need not compute for a request, all its prompts together."""

    tokens_by_tier: Mapping[TierId, int]
    """Prompt tokens by where they come from, fastest first: indexed or predicted on the worker
    itself, or worth loading from its node's cache server."""
    in_flight_tokens: int
    """The part of them that is still being computed there, for other requests."""
    load_tokens: int
    """What bringing them from elsewhere costs, in tokens that could be computed meanwhile."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that are not computed."""
        return sum(self.tokens_by_tier.values())


@dataclass(frozen=True, slots=True)
class _PromptMatch:
    """One prompt cut into blocks, and what the index and the predictions say of them."""

    num_tokens: int
    hashes: Sequence[BlockHash]
    max_cached_blocks: int
    spans: Sequence[Span]
    predicted: Mapping[WorkerId, int]
    computed: Mapping[WorkerId, int]
    """Predicted by requests whose prefill is done."""


@dataclass(frozen=True, slots=True)
class _Reach:
    """What one worker can use blocks of."""

    worker_id: WorkerId
    own_lanes: int
    """Where it looks itself; 0 if the index is not to be believed about it."""
    source: CacheSource | None
    source_lanes: int
    """What its cache server can bring it, shared tiers that others filled included."""


class PrefixOverlaps:
    """Merges the index and the predictions, each worker by its own block size and model name."""

    def __init__(
        self, registry: WorkerRegistry, index: RadixIndex, predictions: Predictions
    ) -> None:
        """Look into these; nothing is changed in them."""
        self._registry = registry
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
            overlaps[info.worker_id] = self._overlap(self._reach(info), matches[key], key[1])
        return overlaps

    def hash_prompts(self, query: RouteQuery, info: WorkerInfo) -> list[list[BlockHash]]:
        """Block hashes of each prompt, as the worker's events would have them."""
        root, block_size = self._hash_inputs(query, info)
        return [hash_blocks(prompt, block_size, root) for prompt in query.prompts]

    def _hash_inputs(self, query: RouteQuery, info: WorkerInfo) -> tuple[PromptRoot, int]:
        # The request may use any of the names under which a worker serves its one base model;
        # that worker's hashes are seeded with the first.
        root = replace(query.root, model=info.base_model or query.root.model)
        block_size = self._index.block_size_of(info.worker_id)
        if block_size is None and info.cache_source is not None:
            block_size = self._index.block_size_of(info.cache_source)
        return root, block_size or _UNSEEN_BLOCK_SIZE

    def _match(self, query: RouteQuery, root: PromptRoot, block_size: int) -> list[_PromptMatch]:
        matches = []
        for prompt in query.prompts:
            hashes = hash_blocks(prompt, block_size, root)
            matches.append(
                _PromptMatch(
                    len(prompt),
                    hashes,
                    # A full hit still recomputes the last token: without it there are no
                    # logits to sample from.
                    max_cached_blocks=max(0, len(prompt) - 1) // block_size,
                    spans=self._index.spans(hashes),
                    predicted=self._predictions.match(hashes),
                    computed=self._predictions.match_computed(hashes),
                )
            )
        return matches

    def _reach(self, info: WorkerInfo) -> _Reach:
        # What is indexed of a load-only worker may be of an earlier life, or half read.
        own = 0 if info.trust is Trust.LOAD_ONLY else self._index.lane(info.worker_id)
        source = None
        if info.cache_source is not None:
            source = self._registry.cache_source(info.cache_source)
        if source is None or source.trust is Trust.LOAD_ONLY:
            return _Reach(info.worker_id, own, None, 0)
        lanes = self._index.lane(source.source_id) | self._index.shared_lanes()
        return _Reach(info.worker_id, own, source, lanes)

    def _overlap(self, reach: _Reach, matches: Sequence[_PromptMatch], block_size: int) -> Overlap:
        blocks_by_tier: Counter[TierId] = Counter()
        in_flight_blocks = 0
        load_tokens = 0
        for match in matches:
            limit = match.max_cached_blocks
            indexed = self._runs(match.spans, reach.own_lanes, 0, limit)
            computed = max(_num_blocks(indexed), match.computed.get(reach.worker_id, 0))
            local = min(max(computed, match.predicted.get(reach.worker_id, 0)), limit)
            in_flight_blocks += local - min(computed, limit)
            for tier, num_blocks in indexed:
                blocks_by_tier[tier] += num_blocks
            # What is only predicted is where the engine puts it: on itself.
            blocks_by_tier[TierId.GPU] += local - _num_blocks(indexed)
            if reach.source is not None:
                elsewhere = self._runs(match.spans, reach.source_lanes, local, limit)
                loaded, price = _worth_loading(match, reach.source, local, elsewhere, block_size)
                load_tokens += price
                for tier, num_blocks in loaded:
                    blocks_by_tier[tier] += num_blocks
        return Overlap(
            tokens_by_tier={
                tier: blocks_by_tier[tier] * block_size for tier in TierId if blocks_by_tier[tier]
            },
            in_flight_tokens=in_flight_blocks * block_size,
            load_tokens=load_tokens,
        )

    def _runs(self, spans: Sequence[Span], lanes: int, begin: int, end: int) -> list[_Run]:
        """Where the blocks `begin .. end` are within `lanes`, up to the first that is nowhere."""
        runs: list[_Run] = []
        depth = 0
        for span in spans:
            first, depth = depth, depth + span.num_blocks
            if depth <= begin:
                continue
            tier = self._index.fastest_tier(span.holders, lanes)
            if tier is None or first >= end:
                break
            runs.append((tier, min(depth, end) - max(first, begin)))
        return runs


_Run = tuple[TierId, int]


def _num_blocks(runs: Iterable[_Run]) -> int:
    return sum(num_blocks for _, num_blocks in runs)


def _worth_loading(
    match: _PromptMatch,
    source: CacheSource,
    num_local_blocks: int,
    runs: Sequence[_Run],
    block_size: int,
) -> tuple[list[_Run], int]:
    """Cut `runs` where computing gets cheaper; return them and the price of loading in tokens."""
    if not runs:
        return [], 0
    plan = plan_load(
        Prefix(
            match.num_tokens,
            block_size,
            source.block_bytes,
            num_local_blocks,
            [TierRun(tier.value, num_blocks) for tier, num_blocks in runs],
        ),
        source.rates,
    )
    left = plan.num_blocks - num_local_blocks
    loaded: list[_Run] = []
    for tier, num_blocks in runs:
        if left <= 0:
            break
        loaded.append((tier, min(num_blocks, left)))
        left -= num_blocks
    return loaded, math.ceil(plan.load_s / source.rates.prefill.per_token_s)
