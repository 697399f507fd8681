"""Copies blocks from the arena into the engine's KV cache, in a thread of its own.

Each copy is checked against its checksum afterwards. A job that cannot be done, wholly and without
a doubt, fails, and the engine computes those tokens.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass, field

import xxhash

from engine_workers.cache_wire import Forget
from engine_workers.connector.block_layout import BlockLayout
from engine_workers.connector.channel import Channel
from engine_workers.connector.plan import LoadJob
from engine_workers.connector.session import Session

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadResults:
    """Loads that are over."""

    finished: frozenset[str] = field(default_factory=frozenset)
    """Request ids, those that failed included."""
    failed: frozenset[str] = field(default_factory=frozenset)


class ArenaReader:
    """A queue of jobs and the thread that does them; the engine's requests bound the queue.

    Args:
        channel: Where blocks that are not what they should be are reported.
        layout: The engine's memory.
        rank: Whose part of each job this is.
    """

    def __init__(self, channel: Channel, layout: BlockLayout, rank: int) -> None:
        self._channel = channel
        self._layout = layout
        self._rank = rank
        self._jobs: queue.SimpleQueue[tuple[LoadJob, Session | None] | None] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="radixgate-load", daemon=True)
        self._thread.start()

    def submit(self, job: LoadJob, session: Session | None) -> None:
        """Begin a load; it ends in `take_results` whatever happens.

        Args:
            job: What to copy.
            session: The arena as it is known now, None if no server is.
        """
        self._jobs.put((job, session))

    def take_results(self) -> LoadResults:
        """Return the loads that are over since the last call."""
        finished: set[str] = set()
        failed: set[str] = set()
        while True:
            try:
                request_id, is_loaded = self._results.get_nowait()
            except queue.Empty:
                return LoadResults(frozenset(finished), frozenset(failed))
            finished.add(request_id)
            if not is_loaded:
                failed.add(request_id)

    def close(self, timeout_s: float) -> None:
        """End after the job that runs, and wait for that no longer than `timeout_s`."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, session = item
            try:
                is_loaded = self._load(job, session)
            except Exception:
                # Whatever it is, the request must not wait for ever.
                _log.exception("a load failed; its tokens are computed")
                is_loaded = False
            self._results.put((job.request_id, is_loaded))

    def _load(self, job: LoadJob, session: Session | None) -> bool:
        if self._rank >= len(job.ranks) or not self._layout.holds(job.block_ids):
            return False
        part = job.ranks[self._rank]
        counts = {len(job.block_ids), len(part.offsets), len(part.checksums)}
        if session is None or session.boot_token != part.boot_token or len(counts) != 1:
            return False
        last = len(session.arena) - self._layout.payload_bytes
        if not all(0 <= offset <= last for offset in part.offsets):
            return False
        base = session.arena.ctypes.data
        for number, (block_id, offset) in enumerate(zip(job.block_ids, part.offsets, strict=True)):
            self._layout.copy_in(block_id, base + offset)
            # The arena is read once more rather than the copy: its bytes are in the CPU's cache,
            # and what was overwritten while it was copied still differs.
            payload = session.arena[offset : offset + self._layout.payload_bytes]
            if xxhash.xxh3_64_intdigest(payload.data) != part.checksums[number]:
                _log.warning("a block in the arena is not what was staged; computing it")
                self._channel.send(Forget([job.block_hashes[number]]))
                return False
        return True
