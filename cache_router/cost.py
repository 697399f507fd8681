"""What a prefix costs: loading its first blocks and computing the rest, cut where that is cheapest.

Engines take blocks from elsewhere only as one prefix, so there is one cut: blocks before it are
loaded, tokens behind it are computed. Gateway and cache server ask the same function.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PrefillRate:
    """What an engine needs to compute tokens: linear, and quadratic where attention counts."""

    fixed_s: float = 5e-3
    """Seconds of a prefill of any size."""
    per_token_s: float = 5e-4
    per_pair_s: float = 1e-8
    """Seconds of attention for each pair of a computed token and one that it looks back at."""

    def seconds(self, num_cached_tokens: float, num_new_tokens: float) -> float:
        """Seconds to compute `num_new_tokens` behind `num_cached_tokens` that are there."""
        return (
            self.fixed_s
            + self.per_token_s * num_new_tokens
            + self.per_pair_s * num_pairs(num_cached_tokens, num_new_tokens)
        )


def num_pairs(num_cached_tokens: float, num_new_tokens: float) -> float:
    """Pairs of a new token and one before it, what attention's work grows with."""
    return num_new_tokens * (num_cached_tokens + num_new_tokens / 2)


@dataclass(frozen=True, slots=True)
class TransferRate:
    """What it takes to bring bytes from one place to another."""

    latency_s: float
    """Seconds until the first byte."""
    per_byte_s: float
    """Seconds for each byte once it flows; decoding and verifying are in it."""
    spread: float = 0.0
    """Standard deviation of measured over predicted seconds."""

    def seconds(self, num_bytes: float) -> float:
        """Mean seconds for `num_bytes`."""
        return self.latency_s + self.per_byte_s * num_bytes


ARENA = "ram"
"""The tier that every block passes through: engines copy from the node's arena."""

_TYPICAL = {
    ARENA: TransferRate(latency_s=1e-3, per_byte_s=1 / 2e9),
    "ssd": TransferRate(latency_s=1e-3, per_byte_s=1 / 1e9),
    "redis": TransferRate(latency_s=2e-3, per_byte_s=1 / 4e8),
    "s3": TransferRate(latency_s=3e-2, per_byte_s=1 / 1e8),
}
_TYPICAL_OF_OTHERS = TransferRate(latency_s=3e-2, per_byte_s=1 / 1e8)


def typical_rate(tier: str) -> TransferRate:
    """Where learning starts for a tier that has not been measured."""
    return _TYPICAL.get(tier, _TYPICAL_OF_OTHERS)


@dataclass(frozen=True, slots=True)
class Rates:
    """Everything learned that a decision needs. Tiers that are missing count as typical."""

    prefill: PrefillRate = field(default_factory=PrefillRate)
    transfer: Mapping[str, TransferRate] = field(default_factory=dict)
    """By tier; `ram` is the copy from the arena into the engine."""

    def of_tier(self, tier: str) -> TransferRate:
        """The tier's rate, or a typical one."""
        return self.transfer.get(tier) or typical_rate(tier)


@dataclass(frozen=True, slots=True)
class Caution:
    """How sure a load must be of paying."""

    num_deviations: float = 0.5
    """Standard deviations that predicted loads are made longer by: a load that may take long is
    worth less than one that is sure to take its mean."""
    margin: float = 0.03
    """Share of computing everything that a load has to save."""
    min_saved_s: float = 1e-3
    """Seconds that a load has to save: what asking for it costs the engine's scheduler."""


@dataclass(frozen=True, slots=True)
class TierRun:
    """Consecutive blocks that one tier holds."""

    tier: str
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prompt, and where its first blocks are for one candidate engine."""

    num_tokens: int
    """Of the prompt; what is behind its last full block is always computed."""
    block_size: int
    """Tokens in a block."""
    block_bytes: int
    """Bytes of a block's KV."""
    num_local_blocks: int
    """Leading blocks that the engine itself holds: they cost nothing."""
    runs: Sequence[TierRun] = ()
    """Where the blocks behind those are, in order. Blocks behind the last run are nowhere."""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Load up to the cut, compute the rest."""

    num_blocks: int
    """The cut: blocks of the prompt that are not computed, local ones included."""
    load_s: float
    """Predicted seconds until the last loaded block is in the engine; 0 if none is loaded."""
    recompute_s: float
    """Predicted seconds to compute what is behind the cut."""
    compute_all_s: float
    """Predicted seconds without any load, for comparison."""

    @property
    def total_s(self) -> float:
        """Predicted seconds to the first token, without any queue."""
        return self.load_s + self.recompute_s

    @property
    def saved_s(self) -> float:
        """What the load is expected to save."""
        return self.compute_all_s - self.total_s


_DEFAULT_CAUTION = Caution()


def plan_load(prefix: Prefix, rates: Rates, caution: Caution = _DEFAULT_CAUTION) -> LoadPlan:
    """Find the cheapest cut of `prefix`; O(blocks) in numpy.

    Tiers deliver at the same time, so bringing blocks into the arena takes as long as the slowest
    of them; all blocks are then copied into the engine. A prompt's last token is always computed:
    without it there are no logits to sample from.

    Raises:
        ValueError: The runs hold more than the prompt's full blocks.
    """
    sizes = [run.num_blocks for run in prefix.runs]
    num_loadable = sum(sizes)
    local = prefix.num_local_blocks
    if (local + num_loadable) * prefix.block_size > prefix.num_tokens:
        raise ValueError(
            f"{local} local and {num_loadable} other blocks of {prefix.block_size} tokens are "
            f"more than a prompt of {prefix.num_tokens} tokens has"
        )
    recompute_s = _recompute_seconds(prefix, num_loadable, rates.prefill)
    mean_s, careful_s = _load_seconds(prefix, num_loadable, rates, caution.num_deviations)
    best = int(np.argmin(careful_s + recompute_s))
    compute_all_s = float(recompute_s[0])
    saved_s = compute_all_s - float(careful_s[best] + recompute_s[best])
    if saved_s < max(caution.min_saved_s, caution.margin * compute_all_s):
        best = 0
    return LoadPlan(
        num_blocks=local + best,
        load_s=float(mean_s[best]),
        recompute_s=float(recompute_s[best]),
        compute_all_s=compute_all_s,
    )


def _recompute_seconds(prefix: Prefix, num_loadable: int, rate: PrefillRate) -> Seconds:
    """Seconds to compute what is behind each cut, shape (num_loadable + 1,)."""
    cuts = np.arange(prefix.num_local_blocks, prefix.num_local_blocks + num_loadable + 1)
    cached = np.minimum(cuts * prefix.block_size, max(0, prefix.num_tokens - 1)).astype(np.float64)
    new = prefix.num_tokens - cached
    pairs = new * (cached + new / 2)
    return np.asarray(rate.fixed_s + rate.per_token_s * new + rate.per_pair_s * pairs)


def _load_seconds(
    prefix: Prefix, num_loadable: int, rates: Rates, num_deviations: float
) -> tuple[Seconds, Seconds]:
    """Seconds to load up to each cut, mean and careful, both of shape (num_loadable + 1,)."""
    holders = np.repeat(
        np.arange(len(prefix.runs)), [run.num_blocks for run in prefix.runs]
    )  # (num_loadable,): index of the run that holds each block
    fetch_mean_s = np.zeros(num_loadable + 1)
    fetch_careful_s = np.zeros(num_loadable + 1)
    for tier in {run.tier for run in prefix.runs} - {ARENA}:
        is_of_tier = np.array([run.tier == tier for run in prefix.runs])
        num_from_tier = np.concatenate(([0], np.cumsum(is_of_tier[holders])))
        rate = rates.of_tier(tier)
        seconds = _transfer_seconds(num_from_tier * prefix.block_bytes, rate)
        fetch_mean_s = np.maximum(fetch_mean_s, seconds)
        fetch_careful_s = np.maximum(fetch_careful_s, seconds * (1 + num_deviations * rate.spread))
    copy = rates.of_tier(ARENA)
    copy_s = _transfer_seconds(np.arange(num_loadable + 1) * prefix.block_bytes, copy)
    return fetch_mean_s + copy_s, fetch_careful_s + copy_s * (1 + num_deviations * copy.spread)


def _transfer_seconds(num_bytes: NDArray[np.int64], rate: TransferRate) -> Seconds:
    seconds = rate.latency_s + rate.per_byte_s * num_bytes
    return np.where(num_bytes > 0, seconds, 0.0)
