"""Whether a block is worth its place and its write in one tier.

While a tier has free room and may be written to, everything is taken in. A full tier takes what
repeats, what continues something that does, and new content only while a trial in miniature says
that it earns its room. Where writing gets scarce, because the budget runs low or too much waits,
the seconds that a byte is expected to save decide.

The arena needs none of this but the quota: its writes cost a copy.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.admission_trial import AdmissionTrial, is_repeated
from engine_workers.cache_server.sightings import Counts, Keys, Sightings, keys_of
from engine_workers.cache_server.write_budget import WriteBudget

_PLENTY = 0.5
"""While this much of the budget, or of the queue, is left, nothing is scarce."""
_VALUE_WEIGHT = 0.02
"""What one offer counts for the mean value: it follows about fifty of them."""


class Verdict(StrEnum):
    """What becomes of a block, and why; a label of metrics."""

    ADMITTED = "admitted"
    NOT_WORTH_LOADING = "not_worth_loading"
    """Computing it again is as fast as loading it from here."""
    BACKPRESSURE = "backpressure"
    """Too much waits to be written already."""
    OVER_BUDGET = "over_budget"
    """The tier has been written to as fast as it may."""
    LOW_VALUE = "low_value"
    """Writing is scarce, and others are worth more."""
    NOT_REPEATED = "not_repeated"
    """The tier is full, and new content does not earn its room there at present."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A block that could be stored."""

    name: BlockName
    parent: BlockName | None
    size_bytes: int
    """Above 0."""
    saved_s: float
    """Seconds by which loading it from this tier beats computing it, each time it is needed."""


@dataclass(frozen=True, slots=True)
class Room:
    """How the tier stands at this moment."""

    free_bytes: int | None
    """None for a store that does its own evicting: it counts as never full."""
    waiting_bytes: int
    """Of blocks that are admitted and not written yet."""
    max_waiting_bytes: int


class Admission:
    """One tier's doorkeeper. One event loop owns it.

    Args:
        sightings: What was asked for, of all tiers together; whoever handles lookups counts there.
        trial: Whether new content earns its room; of this tier's capacity. None for a store that
            does its own evicting.
        budget: What may be written.
    """

    def __init__(
        self, sightings: Sightings, trial: AdmissionTrial | None, budget: WriteBudget
    ) -> None:
        self._sightings = sightings
        self._trial = trial
        self._budget = budget
        self._mean_value = 0.0

    def look_up(self, keys: Keys, counts: Counts, size_bytes: int) -> None:
        """Learn from one prompt that was looked up.

        Args:
            keys: `keys_of` its blocks, parent first.
            counts: What `Sightings.see` said of them, same shape.
            size_bytes: Of each block.
        """
        if self._trial is not None:
            self._trial.look_up(keys, counts, size_bytes)

    def decide(self, offer: Offer, room: Room) -> Verdict:
        """Judge one block; one that is admitted has spent its part of the budget."""
        names = [offer.name] if offer.parent is None else [offer.name, offer.parent]
        counts = self._sightings.count(keys_of(names)).tolist()
        verdict = self._judge(offer, room, counts[0], counts[-1] if offer.parent else 0)
        if verdict is Verdict.ADMITTED:
            self._budget.spend(offer.size_bytes)
        return verdict

    def _judge(self, offer: Offer, room: Room, count: int, parent_count: int) -> Verdict:
        if offer.saved_s <= 0:
            return Verdict.NOT_WORTH_LOADING
        # Without any sighting it was still computed once.
        value = max(1, count) * offer.saved_s / offer.size_bytes
        self._mean_value += _VALUE_WEIGHT * (value - self._mean_value)
        if room.waiting_bytes + offer.size_bytes > room.max_waiting_bytes:
            return Verdict.BACKPRESSURE
        if not self._budget.allows(offer.size_bytes):
            return Verdict.OVER_BUDGET
        left = min(self._budget.fill(), 1 - room.waiting_bytes / room.max_waiting_bytes)
        scarcity = max(0.0, 1 - left / _PLENTY)
        if value < scarcity * self._mean_value:
            return Verdict.LOW_VALUE
        is_full = room.free_bytes is not None and room.free_bytes < offer.size_bytes
        takes_new = self._trial is None or self._trial.takes_everything
        if is_full and not takes_new and not is_repeated(count, parent_count):
            return Verdict.NOT_REPEATED
        return Verdict.ADMITTED
