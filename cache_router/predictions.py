"""What routed requests will leave in the caches of their workers, before any event says so.

Without it a burst of siblings would scatter: the engine reports a block only once it is
computed, and by then the rest of the burst has been routed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto

from cache_router.types import BlockHash, WorkerId

_DEFAULT_MAX_BLOCKS = 1_000_000


class _Phase(Enum):
    IN_FLIGHT = auto()
    COMPUTED = auto()
    GONE = auto()


@dataclass(slots=True)
class _Counts:
    """How many predictions name each block.

    A prediction names a prefix from its first block on, so a block that is here has all its
    ancestors here too, and the longest run can be found by bisection.
    """

    of: dict[BlockHash, int] = field(default_factory=dict)

    def add(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            self.of[block_hash] = self.of.get(block_hash, 0) + 1

    def release(self, hashes: Sequence[BlockHash]) -> None:
        for block_hash in hashes:
            if self.of[block_hash] == 1:
                del self.of[block_hash]
            else:
                self.of[block_hash] -= 1

    def run(self, hashes: Sequence[BlockHash]) -> int:
        """Number of leading blocks that are here."""
        present, absent = 0, len(hashes) + 1
        while absent - present > 1:
            middle = (present + absent) // 2
            if hashes[middle - 1] in self.of:
                present = middle
            else:
                absent = middle
        return present


@dataclass(slots=True)
class _Expected:
    """One worker's predicted blocks: whose prefill is in flight, and whose is done."""

    in_flight: _Counts = field(default_factory=_Counts)
    computed: _Counts = field(default_factory=_Counts)

    def num_blocks(self) -> int:
        return len(self.in_flight.of) + len(self.computed.of)


class Prediction:
    """One request's predicted blocks. Made by `Predictions.enter`; every call is idempotent."""

    __slots__ = ("_expected", "_expire_later", "_hashes", "_phase")

    def __init__(
        self,
        expected: _Expected,
        hashes: Sequence[BlockHash],
        expire_later: Callable[[Prediction], None],
    ) -> None:
        self._expected = expected
        self._hashes = hashes
        self._expire_later = expire_later
        self._phase = _Phase.IN_FLIGHT
        expected.in_flight.add(hashes)

    def prefill_done(self) -> None:
        """The first token came: the blocks exist, and events will take over within the TTL."""
        if self._phase is _Phase.IN_FLIGHT:
            self._expected.in_flight.release(self._hashes)
            self._expected.computed.add(self._hashes)
            self._phase = _Phase.COMPUTED
            self._expire_later(self)

    def drop(self) -> None:
        """The request failed: gone at once, except what other requests predicted as well."""
        if self._phase is _Phase.IN_FLIGHT:
            self._expected.in_flight.release(self._hashes)
        elif self._phase is _Phase.COMPUTED:
            self._expected.computed.release(self._hashes)
        self._phase = _Phase.GONE
        self._hashes = ()


class Predictions:
    """Predicted blocks of all workers; the router merges them with the index by maximum."""

    def __init__(
        self,
        clock: Callable[[], float],
        ttl_s: float,
        max_blocks: int = _DEFAULT_MAX_BLOCKS,
    ) -> None:
        """Start empty.

        Args:
            clock: Seconds, never going back.
            ttl_s: How long a prediction counts after its prefill.
            max_blocks: Most blocks kept; beyond it the oldest done ones go early, and a request
                whose blocks still do not fit is not predicted.
        """
        self._clock = clock
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._workers: dict[WorkerId, _Expected] = {}
        self._expiring: deque[tuple[float, Prediction]] = deque()

    def enter(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> Prediction:
        """Expect a request's blocks on a worker, from now until its prefill is done and longer.

        Args:
            worker_id: Where the request goes.
            hashes: All of its prompt's full blocks, parent first.
        """
        self._expire()
        while self._num_blocks() + len(hashes) > self._max_blocks and self._expiring:
            self._expiring.popleft()[1].drop()
        fits = self._num_blocks() + len(hashes) <= self._max_blocks
        expected = self._workers.setdefault(worker_id, _Expected())
        return Prediction(expected, tuple(hashes) if fits else (), self._expire_later)

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """How many leading blocks each worker holds or will hold; those with none are out."""
        self._expire()
        return {
            worker_id: run
            for worker_id, expected in self._workers.items()
            if (run := max(expected.in_flight.run(hashes), expected.computed.run(hashes)))
        }

    def match_computed(self, hashes: Sequence[BlockHash]) -> dict[WorkerId, int]:
        """The same without the prefills in flight: blocks that need not be waited for."""
        self._expire()
        return {
            worker_id: run
            for worker_id, expected in self._workers.items()
            if (run := expected.computed.run(hashes))
        }

    def clear(self, worker_id: WorkerId) -> None:
        """Expect nothing more of a worker, which restarted or left.

        Predictions of its last life stay safe to call and change nothing.
        """
        self._workers.pop(worker_id, None)

    def _expire_later(self, prediction: Prediction) -> None:
        self._expiring.append((self._clock() + self._ttl_s, prediction))

    def _expire(self) -> None:
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            self._expiring.popleft()[1].drop()

    def _num_blocks(self) -> int:
        return sum(expected.num_blocks() for expected in self._workers.values())
