"""Keeps the index in step with one worker's KV events, and says how far it may be believed."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass

import zmq.asyncio
from xxhash import xxh3_64_intdigest

from cache_router.errors import EventDecodeError
from cache_router.kv_event_source import (
    EventConnection,
    Published,
    ReplayFailedError,
    SourceLostError,
)
from cache_router.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from cache_router.predictions import Predictions
from cache_router.radix_index import Outcome, RadixIndex
from cache_router.types import Trust, WorkerId
from cache_router.worker_registry import EventEndpoint, WorkerRegistry

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 5.0

# How many applied batches can be recognised when they come again. More than arrive live while
# a replay runs; what is older counts as another process's, which only costs a rebuild.
_NUM_REMEMBERED = 4096


@dataclass(slots=True)
class FollowerStats:
    """Counters since the follower was made; they never go down."""

    batches: int = 0
    stored_events: int = 0
    removed_events: int = 0
    cleared_events: int = 0
    unknown_events: int = 0
    """Of types that we do not know."""
    undescribed_events: int = 0
    """Stored events without the content that would name their blocks."""
    orphan_events: int = 0
    """Stored events that continue a block which the worker is not known to hold."""
    refused_events: int = 0
    """Stored events whose parts do not fit together."""
    decode_failures: int = 0
    """Messages and batches that could not be read."""
    duplicates: int = 0
    """Batches that came again, from replay and live stream or from the network."""
    gaps: int = 0
    lost_batches: int = 0
    """Batches that neither the stream nor a replay brought."""
    replays: int = 0
    replay_failures: int = 0
    resets: int = 0
    """How often the worker's entries were dropped to start again."""


class KvEventFollower:
    """Follows one event source; the only writer of its worker's part of the index.

    Every connection begins with a full rebuild: a replay from sequence 0, then the live stream,
    each batch once and in order. When the connection breaks, when the sequence goes back, or
    when discovery sees another process, the worker's entries are gone at once, and it is
    load-only until a rebuild has worked.
    """

    def __init__(
        self,
        worker_id: WorkerId,
        model: str,
        endpoint: EventEndpoint,
        *,
        context: zmq.asyncio.Context,
        index: RadixIndex,
        registry: WorkerRegistry,
        predictions: Predictions,
        replay_timeout_s: float,
        probe_s: float,
    ) -> None:
        """Prepare to follow; `run` does it.

        Args:
            worker_id: Whose events they are.
            model: Its base model's name (`WorkerInfo.base_model`).
            endpoint: Addresses to connect to.
            context: Makes the sockets; the owner terminates it after `run` has ended.
            index: Gets the events.
            registry: Gets the trust.
            predictions: Are cleared when the worker starts a new life.
            replay_timeout_s: Longest silence in the answer to a replay request.
            probe_s: Silence after which a replay is asked for, to find a last batch that was
                lost: without a next one there is no gap to see.
        """
        self.stats = FollowerStats()
        self._worker_id = worker_id
        self._model = model
        self._endpoint = endpoint
        self._context = context
        self._index = index
        self._registry = registry
        self._predictions = predictions
        self._replay_timeout_s = replay_timeout_s
        self._probe_s = probe_s
        self._epoch: float | None = None
        self._life: asyncio.Timeout | None = None
        self._last = -1
        self._digests = array("Q")
        self._in_step = False
        self._flaw: str | None = None
        self._pause_s = _FIRST_PAUSE_S

    async def run(self) -> None:
        """Follow until cancelled; then the worker's entries are gone and all sockets closed."""
        try:
            while True:
                try:
                    await self._follow_one_life()
                except SourceLostError as error:
                    self._distrust(str(error))
                await asyncio.sleep(self._pause_s)
                self._pause_s = min(self._pause_s * 2, _LONGEST_PAUSE_S)
        finally:
            self._distrust("not followed any more")

    def note_epoch(self, epoch: float) -> None:
        """Hear from discovery when the worker's process started.

        If it is another process than last time, the index forgets the worker before this
        returns. Must be called on the follower's event loop.
        """
        if self._epoch is not None and epoch != self._epoch:
            self._distrust("the process restarted")
            self._predictions.clear(self._worker_id)
            if self._life is not None and self._life.when() is None:
                self._life.reschedule(asyncio.get_running_loop().time())
        self._epoch = epoch

    async def _follow_one_life(self) -> None:
        try:
            async with asyncio.timeout(None) as self._life:
                with EventConnection(self._context, self._endpoint) as connection:
                    await connection.wait_open()
                    await self._rebuild(connection)
                    while True:
                        await self._follow(connection)
        except TimeoutError as error:
            raise SourceLostError("the process restarted") from error
        finally:
            self._life = None

    async def _rebuild(self, connection: EventConnection) -> None:
        self._last = -1
        self._digests = array("Q", bytes(8 * _NUM_REMEMBERED))
        self._flaw = None
        self._index.remove_worker(self._worker_id)
        if connection.can_replay:
            await self._replay(connection)
        else:
            self._flaw = "no replay endpoint: what came before the connection is unknown"
        if self._index.is_truncated(self._worker_id):
            self._flaw = "the index is full"
        self._in_step = True
        self._pause_s = _FIRST_PAUSE_S
        self._publish_trust()

    async def _follow(self, connection: EventConnection) -> None:
        """Handle the next batch, or silence."""
        try:
            published = await connection.receive(self._probe_s)
        except EventDecodeError:
            self.stats.decode_failures += 1
            return
        if published is not None:
            await self._take(connection, published)
        elif connection.can_replay:
            await self._replay(connection)

    async def _take(self, connection: EventConnection, published: Published) -> None:
        if published.sequence <= self._last:
            if not self._is_repeated(published):
                raise SourceLostError(
                    f"the sequence went back from {self._last} to {published.sequence}"
                )
            self.stats.duplicates += 1
            return
        if published.sequence > self._last + 1:
            self.stats.gaps += 1
            if connection.can_replay:
                await self._replay(connection)
        if published.sequence > self._last:
            self._apply(published)
        else:
            self.stats.duplicates += 1

    async def _replay(self, connection: EventConnection) -> None:
        """Apply everything after the last batch that the publisher still has.

        Raises:
            ReplayFailedError: it did not answer.
            SourceLostError: the connection broke.
        """
        while not await self._replay_once(connection):
            pass

    async def _replay_once(self, connection: EventConnection) -> bool:
        """Apply one answer in order; whether it was whole.

        The publisher's socket drops what it cannot queue, so an answer can have holes and lack
        its end. A hole is asked for again. Only the first batch of an answer can tell that those
        before it are gone: nothing is queued yet when it is sent.
        """
        self.stats.replays += 1
        num_applied = 0
        with connection.replay_from(self._last + 1, self._replay_timeout_s) as replay:
            try:
                while (published := await replay.next_batch()) is not None:
                    if num_applied and published.sequence != self._last + 1:
                        return False
                    self._apply(published)
                    num_applied += 1
            except ReplayFailedError:
                if num_applied:
                    return False
                self.stats.replay_failures += 1
                raise
        return True

    def _apply(self, published: Published) -> None:
        """Apply a batch that follows the last one, perhaps with others lost in between."""
        num_lost = published.sequence - self._last - 1
        if num_lost:
            self.stats.lost_batches += num_lost
            self._note_flaw(f"{num_lost} event batches before {published.sequence} are lost")
        self._last = published.sequence
        self._digests[published.sequence % _NUM_REMEMBERED] = _digest(published)
        self.stats.batches += 1
        try:
            batch = decode_batch(published.payload)
        except EventDecodeError:
            self.stats.decode_failures += 1
            self._note_flaw(f"event batch {published.sequence} could not be read")
            return
        self.stats.unknown_events += batch.num_unknown
        self.stats.undescribed_events += batch.num_undescribed
        for event in batch.events:
            match event:
                case BlockStored():
                    self.stats.stored_events += 1
                case BlockRemoved():
                    self.stats.removed_events += 1
                case AllBlocksCleared():
                    self.stats.cleared_events += 1
            applied = self._index.apply(self._worker_id, event, self._model)
            if isinstance(event, AllBlocksCleared):
                # An empty cache is known exactly, whatever was missed before.
                self._flaw = None
                self._publish_trust()
            if applied.outcome is Outcome.ORPHAN:
                self.stats.orphan_events += 1
                self._note_flaw("an event continues a block that was never reported")
            elif applied.outcome is Outcome.REFUSED:
                self.stats.refused_events += 1
                self._note_flaw("an event's blocks and tokens do not fit together")
            for worker_id in applied.cleared:
                self._note_full_index(worker_id)

    def _note_full_index(self, cleared: WorkerId) -> None:
        info = self._registry.get(cleared)
        if cleared == self._worker_id:
            self._note_flaw("the index is full")
        elif info is not None and info.trust is not Trust.LOAD_ONLY:
            self._registry.set_trust(cleared, Trust.DEGRADED, "the index is full")

    def _is_repeated(self, published: Published) -> bool:
        return self._last - published.sequence < _NUM_REMEMBERED and self._digests[
            published.sequence % _NUM_REMEMBERED
        ] == _digest(published)

    def _note_flaw(self, reason: str) -> None:
        self._flaw = reason
        self._publish_trust()

    def _publish_trust(self) -> None:
        if not self._in_step:
            return
        if self._flaw is None:
            self._registry.set_trust(self._worker_id, Trust.EXACT, "all events applied")
        else:
            self._registry.set_trust(self._worker_id, Trust.DEGRADED, self._flaw)

    def _distrust(self, reason: str) -> None:
        """Drop the worker's entries, and what was predicted if they were in use."""
        self._index.remove_worker(self._worker_id)
        if self._in_step:
            self.stats.resets += 1
            self._predictions.clear(self._worker_id)
        self._in_step = False
        self._registry.set_trust(self._worker_id, Trust.LOAD_ONLY, reason)


def _digest(published: Published) -> int:
    # Batches carry the time at which they were made, so another process's differ.
    return xxh3_64_intdigest(published.payload)
