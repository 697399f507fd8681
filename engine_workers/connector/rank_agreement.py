"""A block counts as stored only when every tensor-parallel rank has stored its part of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

_MAX_WAITING = 64 * 1024


@dataclass(frozen=True, slots=True)
class CommittedBlocks:
    """What ranks report to the scheduler: hashes whose payload the server has taken over."""

    by_rank: Mapping[int, tuple[bytes, ...]]

    def merged(self, other: CommittedBlocks) -> CommittedBlocks:
        """Return both reports as one, whatever the ranks."""
        ranks = {*self.by_rank, *other.by_rank}
        return CommittedBlocks(
            {rank: self.by_rank.get(rank, ()) + other.by_rank.get(rank, ()) for rank in ranks}
        )


class RankAgreement:
    """Waits for the last rank, over as many steps as that takes.

    Args:
        num_ranks: Size of the tensor-parallel group.
        max_waiting: Hashes of which some rank has not reported; the oldest are forgotten first,
            which at worst saves a block once more.
    """

    def __init__(self, num_ranks: int, max_waiting: int = _MAX_WAITING) -> None:
        self._num_ranks = num_ranks
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[bytes, set[int]] = OrderedDict()

    def add(self, report: CommittedBlocks) -> list[bytes]:
        """Take in a report, and return the hashes that all ranks agree on now."""
        agreed: list[bytes] = []
        for rank, block_hashes in report.by_rank.items():
            for block_hash in block_hashes:
                ranks = self._waiting.setdefault(block_hash, set())
                ranks.add(rank)
                if len(ranks) == self._num_ranks:
                    del self._waiting[block_hash]
                    agreed.append(block_hash)
        while len(self._waiting) > self._max_waiting:
            self._waiting.popitem(last=False)
        return agreed

    def forget(self) -> None:
        """Drop what waits: the server that some ranks reported of is gone."""
        self._waiting.clear()
