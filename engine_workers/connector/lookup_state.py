"""One lookup from being sent to its leases being given back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from engine_workers.cache_wire import Staged
from engine_workers.connector.plan import RankLoad


class Phase(Enum):
    """Where a lookup is."""

    WAITING = auto()
    """Not every rank's server has answered."""
    STAGED = auto()
    """All answered; their leases are held, and the engine has not taken the blocks yet."""
    LOADING = auto()
    """The engine allocated blocks and workers copy into them; the leases are held."""
    OVER = auto()
    """Nothing is held."""


@dataclass(slots=True)
class LookupState:
    """What is known of one request's lookup."""

    request_id: str
    num_local_blocks: int
    """Where the staged blocks begin."""
    deadline_s: float
    """When waiting ends, on the clock of `Lookups`."""
    answers: list[Staged | None]
    """One for each tensor-parallel rank."""
    phase: Phase = Phase.WAITING
    first_block: int = 0
    end_block: int = 0
    """Blocks `first_block .. end_block` are loaded, once any are."""

    @property
    def is_answered(self) -> bool:
        """Whether every rank has answered."""
        return all(answer is not None for answer in self.answers)

    @property
    def num_blocks(self) -> int:
        """Length of the prefix that all ranks have, local blocks included; 0 for nothing."""
        counts = [self._usable_blocks(answer) for answer in self.answers]
        return min(counts)

    @property
    def sources(self) -> list[str]:
        """Tier of each block that is loaded, as the first rank's server says."""
        answer = self.answers[0]
        return [] if answer is None else answer.sources[self._loaded]

    def rank_loads(self) -> tuple[RankLoad, ...]:
        """Where each rank finds the blocks that are loaded."""
        return tuple(
            RankLoad(
                answer.boot_token,
                tuple(answer.offsets[self._loaded]),
                tuple(answer.checksums[self._loaded]),
            )
            for answer in self.answers
            if answer is not None
        )

    @property
    def _loaded(self) -> slice:
        return slice(
            self.first_block - self.num_local_blocks, self.end_block - self.num_local_blocks
        )

    def _usable_blocks(self, answer: Staged | None) -> int:
        """What an answer's prefix is good for; a server that miscounts is not believed."""
        if answer is None or answer.lease == 0:
            return 0
        num_staged = answer.num_blocks - self.num_local_blocks
        counts = {len(answer.offsets), len(answer.checksums), len(answer.sources)}
        return answer.num_blocks if counts == {num_staged} and num_staged > 0 else 0
