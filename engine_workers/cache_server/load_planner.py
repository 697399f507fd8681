"""Whether loading pays: what engines and tiers were measured to take, asked for each lookup."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from cache_router.cost import (
    ARENA,
    PrefillRate,
    Prefix,
    Rates,
    TierRun,
    plan_load,
    typical_rate,
)
from cache_router.learned_rates import LearnedPrefill, LearnedTransfer
from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_server.cache_metrics import CacheMetrics

_MAX_NAMESPACES = 64
_TYPICAL_DEPTH_TOKENS = 4096
"""Where in its prompt a stored block is taken to be: it does not know."""
_FORGET_AFTER_REFUSED = 4096
"""Blocks that are not written to a slow tier before it is tried anew."""
_PROBE_EVERY = 32
"""A tier that is not loaded from is not measured either: once in so many times it is, all the same,
so that one that has become faster is noticed."""


@dataclass(frozen=True, slots=True)
class AskedPrefix:
    """A prompt as an engine asks for it."""

    namespace: Fingerprint
    block_size: int
    """Tokens in a block."""
    block_bytes: int
    num_local_blocks: int
    """Leading blocks that the engine holds itself."""
    num_tokens: int
    """Of the prompt; at least those of its full blocks."""


class LoadPlanner:
    """Learns rates, and cuts prefixes by them.

    Args:
        metrics: Counts decisions, and predicted against measured seconds.
    """

    def __init__(self, metrics: CacheMetrics) -> None:
        self._metrics = metrics
        self._prefill: dict[Fingerprint, LearnedPrefill] = {}
        self._transfer: dict[str, LearnedTransfer] = {}
        self._num_declined = 0
        self._num_refused: dict[str, int] = {}

    def note_prefill(
        self,
        namespace: Fingerprint,
        num_cached_tokens: int,
        num_computed_tokens: int,
        seconds: float,
    ) -> None:
        """Learn what an engine of a namespace took to compute tokens."""
        if num_computed_tokens > 0:
            learned = self._prefill.get(namespace, LearnedPrefill())
            # The newest at the end: an engine's rate outlives it, for the one that follows.
            self._prefill.pop(namespace, None)
            self._prefill[namespace] = learned.learn(
                num_cached_tokens, num_computed_tokens, seconds
            )
            if len(self._prefill) > _MAX_NAMESPACES:
                del self._prefill[next(iter(self._prefill))]

    def note_load(self, tier: str, num_bytes: int, seconds: float) -> None:
        """Learn what a tier took to bring blocks into the arena; `num_bytes` is above 0."""
        learned = self._transfer.get(tier) or LearnedTransfer.starting_at(typical_rate(tier))
        self._metrics.predicted_load_seconds.labels(tier).inc(learned.rate.seconds(num_bytes))
        self._metrics.actual_load_seconds.labels(tier).inc(seconds)
        self._transfer[tier] = learned.learn(num_bytes, seconds)
        self._num_refused.pop(tier, None)

    def note_refused(self, tier: str) -> None:
        """Take in that a block was not written to a tier because loads from it do not pay.

        After many of them without any load its rate is forgotten: a tier that gets nothing is not
        loaded from either, and could never show that it has become faster.
        """
        num_refused = self._num_refused.get(tier, 0) + 1
        if num_refused == _FORGET_AFTER_REFUSED:
            self._transfer.pop(tier, None)
            num_refused = 0
        self._num_refused[tier] = num_refused

    def knows_prefill(self, namespace: Fingerprint) -> bool:
        """Whether an engine of a namespace has reported what computing takes."""
        return namespace in self._prefill

    def saved_seconds(
        self, namespace: Fingerprint, tier: str, num_tokens: int, num_bytes: int
    ) -> float:
        """Say what one more block of a load from a tier saves; negative if computing is faster.

        Until an engine has reported, nothing is taken off for the load: a first guess of its speed
        is no reason to forgo a block.
        """
        learned = self._prefill.get(namespace)
        if learned is None:
            return PrefillRate().seconds(0, num_tokens)
        prefill = learned.rate
        compute_s = prefill.seconds(_TYPICAL_DEPTH_TOKENS, num_tokens) - prefill.fixed_s
        rates = self.rates(namespace)
        per_byte_s = rates.of_tier(tier).per_byte_s + rates.of_tier(ARENA).per_byte_s
        return compute_s - per_byte_s * num_bytes

    def num_worth_loading(self, asked: AskedPrefix, sources: Sequence[str]) -> int:
        """Say how many of the blocks that could be loaded are worth it, from the first one on.

        Args:
            asked: The prompt.
            sources: Tier that each block beyond the engine's own would come from, in order.
        """
        runs = [TierRun(tier, len(list(blocks))) for tier, blocks in groupby(sources)]
        prefix = Prefix(
            num_tokens=asked.num_tokens,
            block_size=asked.block_size,
            block_bytes=asked.block_bytes,
            num_local_blocks=asked.num_local_blocks,
            runs=runs,
        )
        num_blocks = plan_load(prefix, self.rates(asked.namespace)).num_blocks
        num_worth = num_blocks - asked.num_local_blocks
        result = "all" if num_worth == len(sources) else "part" if num_worth else "none"
        if result != "all":
            self._num_declined += 1
            if self._num_declined % _PROBE_EVERY == 0:
                num_worth, result = len(sources), "probe"
        self._metrics.load_decisions.labels(result).inc()
        return num_worth

    def rates(self, namespace: Fingerprint) -> Rates:
        """All that is known of loading and computing for a namespace's engines."""
        transfer = {tier: learned.rate for tier, learned in self._transfer.items()}
        return Rates(self._prefill.get(namespace, LearnedPrefill()).rate, transfer)
