"""The connector in an engine's worker: copies in and out of the KV cache of one rank."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from engine_workers.cache_wire import Freed
from engine_workers.connector.arena_reader import ArenaReader, LoadResults
from engine_workers.connector.block_layout import BlockLayout
from engine_workers.connector.channel import Channel, Connected, Lost
from engine_workers.connector.plan import LoadJob, SaveChain
from engine_workers.connector.rank_agreement import CommittedBlocks
from engine_workers.connector.ring_writer import RingWriter
from engine_workers.connector.session import Session

_log = logging.getLogger(__name__)


class WorkerSide:
    """Called by the engine's worker, between and within its steps; all calls from one thread.

    Args:
        channel: Connection to the cache server.
        layout: The rank's KV cache.
        rank: Number in the tensor-parallel group.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        channel: Channel,
        layout: BlockLayout,
        rank: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._channel = channel
        self._rank = rank
        self._session: Session | None = None
        self._reader = ArenaReader(channel, layout, rank)
        self._writer = RingWriter(channel, layout, clock)

    @property
    def is_connected(self) -> bool:
        """Whether a server is there."""
        self._take_in()
        return self._session is not None

    def start_loads(self, jobs: Sequence[LoadJob]) -> None:
        """Hand loads to the copy thread, and return at once."""
        self._take_in()
        for job in jobs:
            self._reader.submit(job, self._session)

    def save(self, chains: Sequence[SaveChain], ended: Sequence[str]) -> None:
        """Copy blocks out, before the engine may change them.

        Args:
            chains: What became full in this step.
            ended: Requests whose chains of saves ended before this step.
        """
        self._take_in()
        self._writer.end_chains(ended)
        try:
            for chain in chains:
                self._writer.save(chain)
        except Exception:
            # Whatever it is, it must not end the engine, whose answers need no save.
            _log.exception("nothing is saved until the cache server is connected anew")
            self._writer.on_lost()

    def take_results(self) -> LoadResults:
        """Return the loads that are over since the last call."""
        return self._reader.take_results()

    def take_committed(self) -> CommittedBlocks | None:
        """Return what the server took over since the last call, None for nothing."""
        committed = self._writer.take_committed()
        return CommittedBlocks({self._rank: committed}) if committed else None

    def close(self, timeout_s: float) -> None:
        """End the copy thread; waits no longer than `timeout_s`. The channel is not closed."""
        self._reader.close(timeout_s)

    def _take_in(self) -> None:
        for event in self._channel.poll():
            match event:
                case Connected():
                    self._session = event.session
                    self._writer.on_connected(event.session, event.fingerprint)
                case Lost():
                    self._session = None
                    self._writer.on_lost()
                case Freed():
                    self._writer.on_freed(event)
