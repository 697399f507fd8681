"""Steps aside where the tiers make a workload slower: then only a small share of prompts uses them.

What the tiers cost an engine (waiting for lookups, loading, saving) is held against the prefill
seconds that loads saved, over a sliding window. A cost within the tolerance is an investment: what
is saved now may be asked for later. Beyond it prompts go by, apart from a share that keeps
measuring. That share is chosen by a prompt's first block and changes with each window: what is
saved for one prompt must be found by the next one with the same beginning, or no probe could hit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import xxhash

_NUM_SLICES = 12
"""The window slides in steps of a twelfth."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the tiers did to one prompt, in seconds."""

    waited_s: float = 0.0
    """The engine could have begun, but waited for a lookup."""
    load_s: float = 0.0
    """From the decision to load until the blocks were in the engine."""
    save_s: float = 0.0
    """Engine time spent on handing blocks over."""
    saved_s: float = 0.0
    """What computing the loaded blocks would have taken."""
    computed_s: float = 0.0
    """Prefill that was computed all the same."""


class BypassReason(StrEnum):
    """What most of the lost time went into; a label of metrics."""

    LOOKUPS = "lookups"
    LOADS = "loads"
    SAVES = "saves"


@dataclass(frozen=True, slots=True)
class BypassState:
    """Whether the tiers stand aside, and the figures behind it."""

    reason: BypassReason | None
    """None while the tiers are in use."""
    num_changes: int
    """How often the tiers have stepped aside or come back."""
    spent_s: float
    """Of the present window: what the tiers cost."""
    saved_s: float
    """Of the present window: what they saved."""

    @property
    def is_bypassed(self) -> bool:
        """Whether most prompts go by the tiers."""
        return self.reason is not None


@dataclass(frozen=True, slots=True)
class BypassLimits:
    """When to step aside and when to come back."""

    window_s: float = 60.0
    tolerance: float = 0.03
    """Share of the prefill seconds that may be lost before the tiers step aside."""
    return_tolerance: float = 0.01
    """Share that may still be lost when they come back."""
    min_outcomes: int = 16
    """Prompts that have to be measured before anything changes."""
    probing_share: float = 1 / 16
    """Share of prompts that go on using the tiers meanwhile."""
    retry_s: float = 900.0
    """Seconds after which the tiers come back untested: probes may be too few to tell anything."""


@dataclass(slots=True)
class _Slice:
    """Sums over a part of the window."""

    number: int
    num_outcomes: int = 0
    waited_s: float = 0.0
    load_s: float = 0.0
    save_s: float = 0.0
    saved_s: float = 0.0
    computed_s: float = 0.0

    def add(self, outcome: Outcome | _Slice) -> None:
        """Sum up."""
        self.waited_s += outcome.waited_s
        self.load_s += outcome.load_s
        self.save_s += outcome.save_s
        self.saved_s += outcome.saved_s
        self.computed_s += outcome.computed_s

    @property
    def spent_s(self) -> float:
        """What the tiers cost."""
        return self.waited_s + self.load_s + self.save_s

    @property
    def lost_share(self) -> float:
        """What was lost, over what the prompts would have taken without the tiers."""
        plain_s = self.computed_s + self.saved_s
        return (self.spent_s - self.saved_s) / plain_s if plain_s > 0 else 0.0

    @property
    def main_cost(self) -> BypassReason:
        """The largest part of what was spent beyond what it brought."""
        costs = {
            BypassReason.LOOKUPS: self.waited_s,
            BypassReason.LOADS: self.load_s - self.saved_s,
            BypassReason.SAVES: self.save_s,
        }
        return max(costs, key=lambda reason: costs[reason])


class Bypass:
    """Decides for one namespace: engines of different models pay different prices.

    Args:
        limits: When to change.
        clock: Seconds, monotonic.
    """

    def __init__(self, limits: BypassLimits, clock: Callable[[], float]) -> None:
        self._limits = limits
        self._clock = clock
        self._slices: deque[_Slice] = deque(maxlen=_NUM_SLICES)
        self._reason: BypassReason | None = None
        self._num_changes = 0
        self._changed_at = clock()

    def uses_tiers(self, first_block_hash: bytes) -> bool:
        """Whether a prompt is looked up and saved; the same for all prompts that begin alike."""
        now = self._clock()
        if self._reason is not None and now - self._changed_at >= self._limits.retry_s:
            self._change(None)
        if self._reason is None:
            return True
        window_number = int(now / self._limits.window_s)
        place = xxhash.xxh3_64_intdigest(first_block_hash, window_number & (1 << 64) - 1)
        return place < self._limits.probing_share * (1 << 64)

    def report(self, outcome: Outcome) -> None:
        """Take in what became of a prompt that used the tiers."""
        number = self._slice_number()
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(_Slice(number))
        self._slices[-1].add(outcome)
        self._slices[-1].num_outcomes += 1
        self._reconsider()

    @property
    def state(self) -> BypassState:
        """Where it stands now."""
        window, _ = self._window()
        return BypassState(self._reason, self._num_changes, window.spent_s, window.saved_s)

    def _reconsider(self) -> None:
        window, num_outcomes = self._window()
        if num_outcomes < self._limits.min_outcomes:
            return
        if self._reason is None and window.lost_share > self._limits.tolerance:
            self._change(window.main_cost)
        elif self._reason is not None and window.lost_share <= self._limits.return_tolerance:
            self._change(None)

    def _change(self, reason: BypassReason | None) -> None:
        self._reason = reason
        self._num_changes += 1
        self._changed_at = self._clock()
        # What was measured in the other mode says nothing of this one.
        self._slices.clear()

    def _window(self) -> tuple[_Slice, int]:
        """Sums over the window, and the number of outcomes in it."""
        oldest = self._slice_number() - _NUM_SLICES
        total = _Slice(0)
        num_outcomes = 0
        for part in self._slices:
            if part.number > oldest:
                total.add(part)
                num_outcomes += part.num_outcomes
        return total, num_outcomes

    def _slice_number(self) -> int:
        return int(self._clock() * _NUM_SLICES / self._limits.window_s)
