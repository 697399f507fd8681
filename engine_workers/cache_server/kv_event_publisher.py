"""What the cache server stores and removes, published as engines publish their own blocks.

vLLM's wire format: PUB frames of topic, 8-byte big-endian sequence number and msgpack payload, and
a ROUTER that replays. Unlike an engine's, a replay is never too late: what the buffer no longer has
is told as a snapshot, batches that begin with everything being cleared.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import msgspec
import zmq
import zmq.asyncio

from cache_router.types import TierId
from engine_workers.blocks.block_header import BlockHeader

_END = (-1).to_bytes(8, "big", signed=True)
_TOPIC = b""
# Events that are not out yet; a burst beyond that is told as a snapshot.
_MAX_PENDING = 65_536
_EVENTS_PER_BATCH = 2_048
_PAUSE_S = 0.02
"""Seconds between two batches: a route is no better for being told sooner."""


class _Stored(msgspec.Struct, tag="BlockStored", omit_defaults=True):
    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: None
    medium: str
    lora_name: str | None
    extra_keys: list[tuple[object, ...]] | None = None
    locality: str | None = None
    ownership: str | None = None


class _Removed(msgspec.Struct, tag="BlockRemoved", omit_defaults=True):
    block_hashes: list[bytes]
    medium: str
    locality: str | None = None
    ownership: str | None = None


class _Cleared(msgspec.Struct, tag="AllBlocksCleared"):
    pass


_Event = _Stored | _Removed | _Cleared


@dataclass(frozen=True, slots=True)
class Located:
    """A block and one tier that it lies on."""

    header: BlockHeader
    tier: TierId


class KvEventPublisher:
    """One namespace's blocks on one cache server. For one event loop.

    Args:
        context: Makes the sockets.
        endpoint: Where to publish; `tcp://*:0` takes a free port.
        replay_endpoint: Where to answer replays.
        snapshot: Every block that is there now, on each of its tiers.
        clock: Seconds since the Unix epoch, for the batches.
        buffer_steps: Batches kept for replay.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str,
        replay_endpoint: str,
        snapshot: Callable[[], Iterable[Located]],
        clock: Callable[[], float],
        buffer_steps: int = 10_000,
    ) -> None:
        self._publisher = context.socket(zmq.PUB)
        self._replays = context.socket(zmq.ROUTER)
        self._publisher.set_hwm(100_000)
        self._publisher.bind(endpoint)
        self._replays.bind(replay_endpoint)
        self.endpoint = _bound(self._publisher)
        self.replay_endpoint = _bound(self._replays)
        self._snapshot = snapshot
        self._clock = clock
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._next = 0
        self._snapshot_at = -1
        self._pending: list[_Event] = []
        self._must_tell_all = True
        self._sending = asyncio.Lock()

    def stored(self, block: Located) -> None:
        """Tell of a block that is there now; cheap, nothing is sent yet."""
        self._add(_stored(block))

    def removed(self, block_hash: bytes, tier: TierId) -> None:
        """Tell of a block that left a tier."""
        self._add(_Removed([block_hash], _medium(tier), **_storage(tier)))

    @property
    def num_pending(self) -> int:
        """Events that were not sent yet."""
        return len(self._pending)

    async def run(self) -> None:
        """Publish and answer replays until cancelled; then the sockets are closed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publish_all(), name="kv-events")
                tasks.create_task(self._answer_all(), name="kv-event-replays")
        finally:
            self._publisher.close(linger=0)
            self._replays.close(linger=0)

    def _add(self, event: _Event) -> None:
        if len(self._pending) < _MAX_PENDING:
            self._pending.append(event)
        else:
            self._must_tell_all = True

    async def _publish_all(self) -> None:
        while True:
            await self._flush()
            await asyncio.sleep(_PAUSE_S)

    async def _flush(self) -> None:
        """Send what is pending, in the order in which it happened."""
        async with self._sending:
            if self._must_tell_all:
                self._tell_all()
            events, self._pending = self._pending, []
            for batch in [self._number(events) for events in _cut(events)]:
                await self._send(batch)

    def _tell_all(self) -> None:
        """Put a snapshot in place of what is pending: it holds that too."""
        self._must_tell_all = False
        self._snapshot_at = self._next
        self._pending = [_Cleared(), *map(_stored, _parents_first(self._snapshot()))]

    def _number(self, events: list[_Event]) -> tuple[int, bytes]:
        batch = (self._next, msgspec.msgpack.encode([self._clock(), events, 0]))
        self._buffer.append(batch)
        self._next += 1
        return batch

    async def _send(self, batch: tuple[int, bytes]) -> None:
        sequence, payload = batch
        await self._publisher.send_multipart((_TOPIC, sequence.to_bytes(8, "big"), payload))

    async def _answer_all(self) -> None:
        while True:
            frames = await self._replays.recv_multipart()
            # A request of another form is some other protocol's, and gets no answer.
            if len(frames) == 3 and len(frames[2]) == 8:
                await self._answer(frames[0], int.from_bytes(frames[2], "big"))

    async def _answer(self, client: bytes, start: int) -> None:
        kept_from = self._buffer[0][0] if self._buffer else self._next
        if start < kept_from or start > self._next:
            if self._snapshot_at < kept_from:
                self._must_tell_all = True
                await self._flush()
            start = self._snapshot_at
        for sequence, payload in list(self._buffer):
            if sequence >= start:
                await self._replays.send_multipart(
                    (client, b"", _TOPIC, sequence.to_bytes(8, "big"), payload)
                )
        await self._replays.send_multipart((client, b"", b"", _END, b""))


def _cut(events: list[_Event]) -> Iterator[list[_Event]]:
    rest = iter(events)
    while batch := list(islice(rest, _EVENTS_PER_BATCH)):
        yield batch


def _parents_first(blocks: Iterable[Located]) -> Iterator[Located]:
    """Order a snapshot so that each block comes behind its parent.

    A block whose parent lies nowhere is no prefix of anything and is left out.
    """
    children: dict[bytes | None, list[Located]] = {}
    for block in blocks:
        children.setdefault(block.header.parent_hash, []).append(block)
    reached = children.pop(None, [])
    while reached:
        yield from reached
        names = {block.header.name.block_hash for block in reached}
        reached = [child for name in names for child in children.pop(name, ())]


def _stored(block: Located) -> _Stored:
    header, tier = block.header, block.tier
    return _Stored(
        [header.name.block_hash],
        header.parent_hash,
        header.token_ids,
        len(header.token_ids),
        None,
        _medium(tier),
        header.lora_name,
        [header.extra_keys] if header.extra_keys else None,
        **_storage(tier),
    )


def _medium(tier: TierId) -> str:
    return "CPU" if tier is TierId.RAM else "STORAGE"


def _storage(tier: TierId) -> dict[str, str]:
    if tier is TierId.RAM:
        return {}
    return {"locality": "REMOTE" if tier.is_shared else "LOCAL", "ownership": tier.value}


def _bound(socket: zmq.asyncio.Socket) -> str:
    """Return where a socket listens, a wildcard kept: hosts see a node by different addresses."""
    endpoint = str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    return endpoint.replace("tcp://0.0.0.0:", "tcp://*:")
