"""Which worker gets a request: the one with the fewest prompt tokens before its first token."""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from random import Random

from xxhash import xxh3_64_intdigest

from cache_router.errors import NoWorkerError, PromptTooLongError, UnknownModelError
from cache_router.predictions import Predictions
from cache_router.prefix_overlap import Overlap, PrefixOverlaps
from cache_router.radix_index import RadixIndex
from cache_router.reservation import Reservation
from cache_router.types import (
    Candidate,
    RouteDecision,
    RouteQuery,
    RouteReason,
    TierId,
    Trust,
    WorkerId,
)
from cache_router.worker_registry import WorkerInfo, WorkerRegistry

# Reservations of a worker, beyond twice those in flight, that are kept before a look through all.
_MANY_PREFILLS = 64


class CacheRouter:
    """Routes by what the workers' caches hold and by what already waits there."""

    def __init__(
        self,
        registry: WorkerRegistry,
        index: RadixIndex,
        predictions: Predictions,
        rng: Random,
    ) -> None:
        """Route over what others keep up to date.

        Args:
            registry: The workers, fed by discovery.
            index: What they hold, fed by the event followers.
            predictions: What routed requests will leave there; fed by our reservations.
            rng: Breaks the last ties.
        """
        self._registry = registry
        self._overlaps = PrefixOverlaps(registry, index, predictions)
        self._index = index
        self._predictions = predictions
        self._rng = rng
        self._prefills: dict[WorkerId, deque[Reservation]] = {}
        self._cold_turns = itertools.count(1)

    def route(self, query: RouteQuery) -> RouteDecision:
        """Choose a worker. Nothing is entered anywhere: see `reserve`.

        A worker's cost is the prompt tokens it must compute before this request's first token:
        the request's own uncached ones and those that wait there for other requests, and a few
        for each request in flight, which slows the others as long as it runs. Prefix
        tokens which this request shares with a prefill in flight there are left out of the
        waiting ones, since it would need them computed anyway, there or elsewhere. So a burst
        of siblings stays with the first of them, as long as their own suffixes, which pile up
        there, are fewer tokens than the shared prefix; then one goes elsewhere, brings the
        prefix there, and from then on they spread over both.

        Equal costs: more cached tokens first, then fewer running requests, then the session
        key's own order of the workers or, without one, whoever has gone longest without a cold
        request, so that new prefixes fill all caches evenly; then chance.

        Raises:
            UnknownModelError: no known worker serves the model.
            NoWorkerError: none that does is ready, or all of those are excluded.
            PromptTooLongError: a prompt leaves no room for an answer on any ready worker.
        """
        eligible = self._eligible(query)
        for info in eligible:
            self._settle_prefills(info.worker_id)
        overlaps = self._overlaps.find(query, eligible)
        ranked = sorted(
            (self._candidate(query, info, overlaps[info.worker_id]) for info in eligible),
            key=lambda candidate: (
                *_rank(candidate),
                self._turn(query.session_key, candidate.worker_id),
                self._rng.random(),
            ),
        )
        best = ranked[0]
        tied = len(ranked) > 1 and _rank(ranked[1]) == _rank(best)
        return RouteDecision(
            worker_id=best.worker_id,
            reason=self._reason(query, best, tied=tied),
            predicted_cached_tokens=_predicted_cached_tokens(query, best),
            candidates=tuple(ranked),
        )

    def reserve(self, query: RouteQuery, decision: RouteDecision) -> Reservation:
        """The context manager to run the request in: its load and its prediction.

        Args:
            query: What was routed.
            decision: What `route` answered, with its candidates.

        Raises:
            NoWorkerError: the chosen worker was removed since.
        """
        info = self._registry.get(decision.worker_id)
        if info is None:
            model = _served_name(query)
            raise NoWorkerError(model, len(self._registry.workers_for(model)))
        load = self._registry.load(info.worker_id)
        if not decision.candidates[0].cached_tokens:
            load.cold_turn = next(self._cold_turns)
        reservation = Reservation(
            info.worker_id,
            load,
            decision.candidates[0].uncached_tokens,
            self._predictions,
            self._overlaps.hash_prompts(query, info),
        )
        prefills = self._prefills.setdefault(info.worker_id, deque())
        prefills.append(reservation)
        if len(prefills) > _MANY_PREFILLS + 2 * load.num_running:
            # Behind one request that hangs, those that are over would gather for as long.
            self._prefills[info.worker_id] = deque(each for each in prefills if each.awaits_prefill)
        return reservation

    def _settle_prefills(self, worker_id: WorkerId) -> None:
        """End the wait of prefills whose blocks events have reported.

        A request that is not streamed shows no first token. Engines prefill in the order in
        which requests came, so the look stops at the first that is not done.
        """
        prefills = self._prefills.get(worker_id)
        while prefills:
            first = prefills[0]
            if first.awaits_prefill:
                blocks = first.last_blocks
                if not blocks or not all(self._index.holds(worker_id, block) for block in blocks):
                    return
                first.prefill_done()
            prefills.popleft()
        self._prefills.pop(worker_id, None)

    def _turn(self, session_key: str | None, worker_id: WorkerId) -> int:
        if session_key is None:
            return self._registry.load(worker_id).cold_turn
        return _session_order(session_key, worker_id)

    def _eligible(self, query: RouteQuery) -> Sequence[WorkerInfo]:
        """Ready workers that can hold the request, those that can hold all of it first."""
        model = _served_name(query)
        known = self._registry.workers_for(model)
        if not known:
            raise UnknownModelError(model)
        ready = [info for info in known if info.ready]
        if not ready:
            raise NoWorkerError(model, len(known))

        longest = max((len(prompt) for prompt in query.prompts), default=0)
        limits = {info.worker_id: _limit_tokens(info, model) for info in ready}
        if longest + 1 > (largest := max(limits.values())):
            raise PromptTooLongError(longest, int(largest))
        usable = [
            info
            for info in ready
            if limits[info.worker_id] >= longest + 1 and info.worker_id not in query.excluded
        ]
        if not usable:
            raise NoWorkerError(model, len(known))
        wanted = min(
            longest + max(1, query.max_output_tokens),
            max(limits[info.worker_id] for info in usable),
        )
        return [info for info in usable if limits[info.worker_id] >= wanted]

    def _candidate(self, query: RouteQuery, info: WorkerInfo, overlap: Overlap) -> Candidate:
        load = self._registry.load(info.worker_id)
        return Candidate(
            worker_id=info.worker_id,
            cached_tokens=overlap.cached_tokens,
            uncached_tokens=query.num_prompt_tokens - overlap.cached_tokens,
            waiting_tokens=max(0, load.waiting_tokens - overlap.in_flight_tokens),
            num_running=load.num_running,
            trust=info.trust,
            load_tokens=overlap.load_tokens,
            tokens_by_tier=overlap.tokens_by_tier,
        )

    def _reason(self, query: RouteQuery, best: Candidate, *, tied: bool) -> RouteReason:
        if best.cached_tokens:
            from_elsewhere = any(tier is not TierId.GPU for tier in best.tokens_by_tier)
            return RouteReason.TIER if from_elsewhere else RouteReason.PREFIX
        if tied and query.session_key is not None:
            return RouteReason.SESSION
        if not query.prompts:
            return RouteReason.NO_TOKENS
        return RouteReason.FALLBACK if query.excluded else RouteReason.LOAD


def _served_name(query: RouteQuery) -> str:
    root = query.root
    return root.model if root.lora_name is None else root.lora_name


def _limit_tokens(info: WorkerInfo, model: str) -> float:
    # A worker that does not say what it can hold is asked; it refuses what it cannot.
    limit = info.max_model_len(model)
    return math.inf if limit is None else limit


def _rank(candidate: Candidate) -> tuple[int, int, int]:
    return candidate.cost_tokens, -candidate.cached_tokens, candidate.num_running


def _session_order(session_key: str, worker_id: WorkerId) -> int:
    """Rendezvous hashing: a worker that comes or goes moves only its own sessions."""
    return xxh3_64_intdigest(
        session_key.encode("utf-8", "surrogatepass"), xxh3_64_intdigest(worker_id.encode())
    )


def _predicted_cached_tokens(query: RouteQuery, chosen: Candidate) -> int | None:
    if not query.prompts:
        return None
    if chosen.trust is Trust.LOAD_ONLY and not chosen.cached_tokens:
        return None
    return chosen.cached_tokens
