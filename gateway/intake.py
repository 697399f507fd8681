"""The bound on what may be in flight; the first thing a request meets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cache_router.errors import OverloadedError

_RETRY_AFTER_S = 1


class Intake:
    """Counts requests in flight and refuses those above a limit."""

    def __init__(self, limit: Callable[[], int]) -> None:
        """Ask `limit` each time: it grows and shrinks with the workers."""
        self._limit = limit
        self.num_in_flight = 0

    @contextmanager
    def slot(self) -> Iterator[None]:
        """Hold a place for the length of a block, however it ends.

        Raises:
            OverloadedError: All places are taken.
        """
        if self.num_in_flight >= self._limit():
            raise OverloadedError(self.num_in_flight, _RETRY_AFTER_S)
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.num_in_flight -= 1
