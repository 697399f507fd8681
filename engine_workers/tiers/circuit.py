"""Deciding whether something that failed is asked again."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum

from cache_router.errors import BlockLostError, TierError


class CircuitState(StrEnum):
    """Whether calls are let through."""

    CLOSED = "closed"
    """All of them."""
    OPEN = "open"
    """None."""
    HALF_OPEN = "half-open"
    """One, to see."""


@dataclass(frozen=True, slots=True)
class CircuitLimits:
    """When a circuit opens, and for how long."""

    max_failures: int = 3
    """Failures in a row that open it."""
    open_s: float = 1.0
    """Seconds until the first probe; twice as long after each probe that fails."""
    max_open_s: float = 30.0
    hang_s: float = 20.0
    """Seconds after which a call that has not ended counts as one that never will; while there is
    one, no other is let through. Longer than the time limits that a tier itself has."""


class Circuit:
    """A breaker: lets calls through, counts how they end, and stops them when they keep failing.

    Only `TierError` is a failure. A block that is lost is an answer, and a cancelled call says
    nothing.
    """

    def __init__(self, tier: str, limits: CircuitLimits, clock: Callable[[], float]) -> None:
        self._tier = tier
        self._limits = limits
        self._clock = clock
        self._num_failures = 0
        self._open_s = limits.open_s
        self._open_until: float | None = None
        self._is_probing = False
        self._numbers = itertools.count()
        self._begun: dict[int, float] = {}
        """When the calls that run began, the oldest first."""

    def state(self) -> CircuitState:
        """Whether the next call would be let through."""
        if self._hangs() or self._is_probing:
            return CircuitState.OPEN
        if self._open_until is None:
            return CircuitState.CLOSED
        if self._clock() < self._open_until:
            return CircuitState.OPEN
        return CircuitState.HALF_OPEN

    @contextmanager
    def call(self) -> Iterator[None]:
        """Let one call through and note how it ends.

        Raises:
            TierError: The circuit is open, so the tier was not asked; or what the call raises.
        """
        state = self.state()
        if state is CircuitState.OPEN:
            problem = "hangs" if self._hangs() else "keeps failing"
            raise TierError(self._tier, f"not asked, since it {problem}")
        is_probe = state is CircuitState.HALF_OPEN
        self._is_probing = is_probe
        number = next(self._numbers)
        self._begun[number] = self._clock()
        try:
            yield
        except TierError:
            self._note_failure(is_probe=is_probe)
            raise
        except BlockLostError:
            self._note_success(is_probe=is_probe)
            raise
        else:
            self._note_success(is_probe=is_probe)
        finally:
            del self._begun[number]
            if is_probe:
                self._is_probing = False

    def _hangs(self) -> bool:
        oldest = next(iter(self._begun.values()), None)
        return oldest is not None and self._clock() - oldest > self._limits.hang_s

    def _note_success(self, *, is_probe: bool) -> None:
        # What began before the circuit opened says nothing of how things are now.
        if is_probe or self._open_until is None:
            self._num_failures = 0
            self._open_until = None
            self._open_s = self._limits.open_s

    def _note_failure(self, *, is_probe: bool) -> None:
        if is_probe:
            self._open_s = min(2 * self._open_s, self._limits.max_open_s)
        elif self._open_until is not None:
            return
        self._num_failures += 1
        if is_probe or self._num_failures >= self._limits.max_failures:
            self._open_until = self._clock() + self._open_s
