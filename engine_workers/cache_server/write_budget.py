"""How fast a tier may be written to: a token bucket over bytes."""

from __future__ import annotations

from collections.abc import Callable


class WriteBudget:
    """Fills at a steady rate and holds a few seconds of it.

    Args:
        bytes_per_s: What may be written on average.
        burst_s: Seconds of that which may be written at once after a pause.
        clock: Seconds, monotonic.
    """

    def __init__(self, bytes_per_s: float, burst_s: float, clock: Callable[[], float]) -> None:
        self._bytes_per_s = bytes_per_s
        self._burst_bytes = bytes_per_s * burst_s
        self._clock = clock
        self._left_bytes = self._burst_bytes
        self._filled_at = clock()

    def fill(self) -> float:
        """Share of the burst that is left, 0 to 1."""
        now = self._clock()
        # A clock that was set back gives nothing, and takes nothing.
        gained_bytes = max(0.0, now - self._filled_at) * self._bytes_per_s
        self._left_bytes = min(self._burst_bytes, self._left_bytes + gained_bytes)
        self._filled_at = now
        return self._left_bytes / self._burst_bytes

    def allows(self, num_bytes: int) -> bool:
        """Whether this much may be written now."""
        self.fill()
        return num_bytes <= self._left_bytes

    def spend(self, num_bytes: int) -> None:
        """Take what `allows` has just granted."""
        self._left_bytes -= num_bytes
