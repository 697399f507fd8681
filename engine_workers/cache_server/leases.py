"""Who may still be reading which blocks: leases, and what happens to those that are not returned.

A lease keeps the memory of its blocks as it is. It ends when its engine returns it, from whatever
connection. Where the connection ends first, or the lease is overdue, a copy may still be running in
the engine: the memory stays as it is, in quarantine, until the engine's processes are gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from engine_workers.cache_server.catalog import CachedBlock, Catalog


@dataclass(slots=True)
class _Lease:
    engine_id: str
    connection: object
    blocks: Sequence[CachedBlock]
    due: float
    is_quarantined: bool = False


class Leases:
    """All leases of this server's life; their numbers are never used again, so none is mistaken.

    Args:
        catalog: Holds the pins.
        ttl_s: Seconds after which a lease that is not returned is overdue.
        clock: Seconds, monotonic.
    """

    def __init__(self, catalog: Catalog, ttl_s: float, clock: Callable[[], float]) -> None:
        self._catalog = catalog
        self._ttl_s = ttl_s
        self._clock = clock
        self._leases: dict[int, _Lease] = {}
        self._next = 1

    def grant(self, engine_id: str, connection: object, blocks: Sequence[CachedBlock]) -> int:
        """Lease blocks that the caller has pinned; the pins pass to the lease."""
        number = self._next
        self._next += 1
        self._leases[number] = _Lease(engine_id, connection, blocks, self._clock() + self._ttl_s)
        return number

    def release(self, engine_id: str, numbers: Iterable[int]) -> None:
        """End leases that their engine returns.

        Those of others, and those that ended already, are ignored: the message may have crossed
        the end.
        """
        for number in numbers:
            lease = self._leases.get(number)
            if lease is not None and lease.engine_id == engine_id:
                self._end(number)

    def quarantine_connection(self, connection: object) -> None:
        """Keep what was leased over a connection that ended until its engine is gone."""
        for lease in self._leases.values():
            if lease.connection is connection:
                lease.is_quarantined = True

    def sweep(self, is_gone: Callable[[str], bool]) -> None:
        """Quarantine what is overdue, and end what is quarantined for engines that are gone.

        Args:
            is_gone: Says of an engine id whether none of its processes is left.
        """
        now = self._clock()
        for lease in self._leases.values():
            if now >= lease.due:
                lease.is_quarantined = True
        quarantined = {lease.engine_id for lease in self._leases.values() if lease.is_quarantined}
        gone = {engine_id for engine_id in quarantined if is_gone(engine_id)}
        for number, lease in list(self._leases.items()):
            if lease.is_quarantined and lease.engine_id in gone:
                self._end(number)

    @property
    def num_held(self) -> int:
        """Leases that are in order."""
        return len(self._leases) - self.num_quarantined

    @property
    def num_quarantined(self) -> int:
        """Leases that are kept for an engine that did not return them."""
        return sum(lease.is_quarantined for lease in self._leases.values())

    def _end(self, number: int) -> None:
        for block in self._leases.pop(number).blocks:
            self._catalog.unpin(block)
