"""One connection of an engine, after it was welcomed: its lookups, leases and saves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from cache_router.errors import CacheWireError
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_server.cache_parts import CacheParts
from engine_workers.cache_server.catalog import CachedBlock
from engine_workers.cache_server.frames import Outbox, read_frame
from engine_workers.cache_server.load_planner import AskedPrefix
from engine_workers.cache_server.write_ring import WriteRing
from engine_workers.cache_wire import (
    Forget,
    Freed,
    FromEngine,
    Hello,
    Lookup,
    PrefillReport,
    Put,
    Release,
    Staged,
    Staging,
)

_MAX_LOOKUPS = 1024
_MAX_HASH_BYTES = 64
_MAX_TOKENS = 1 << 32
_MAX_PREFILL_S = 86_400.0
_decoder = msgspec.msgpack.Decoder(FromEngine)


def decode(body: bytes) -> FromEngine:
    """Read a message of an engine.

    Raises:
        CacheWireError: It is none.
    """
    try:
        return _decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CacheWireError("not a message of an engine") from error


@dataclass(frozen=True, slots=True)
class Peer:
    """Who is at the other end."""

    engine_id: str
    fingerprint: Fingerprint
    block_size: int
    """Tokens in a block."""
    block_bytes: int
    ring: WriteRing | None
    """None for a scheduler."""

    def names(self, block_hashes: Sequence[bytes]) -> list[BlockName]:
        """Return the blocks' names in the engine's namespace.

        Raises:
            CacheWireError: A hash of a length that none has.
        """
        if not all(0 < len(block_hash) <= _MAX_HASH_BYTES for block_hash in block_hashes):
            raise CacheWireError("block hash length")
        return [BlockName(self.fingerprint, block_hash) for block_hash in block_hashes]


class EngineConnection:
    """Serves one connection until it ends.

    Args:
        parts: The server's.
        peer: Who is served.
        reader: What comes in.
        outbox: What goes out.
    """

    def __init__(
        self, parts: CacheParts, peer: Peer, reader: asyncio.StreamReader, outbox: Outbox
    ) -> None:
        self._parts = parts
        self._peer = peer
        self._reader = reader
        self._outbox = outbox
        self._lookups: set[asyncio.Task[None]] = set()
        self._puts: asyncio.Queue[list[tuple[int, BlockName]] | None] = asyncio.Queue()
        self._slots_in_work: set[int] = set()

    async def serve(self) -> None:
        """Serve until the engine hangs up. What it leased is then in quarantine.

        Raises:
            CacheWireError: It sent what cannot be meant.
        """
        problem: CacheWireError | None = None
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._save_all(), name="save")
                try:
                    await self._read_all(tasks)
                except CacheWireError as error:
                    problem = error
                # Blocks that were handed over whole are still saved; they are few.
                self._puts.put_nowait(None)
                for lookup in self._lookups:
                    lookup.cancel()
        finally:
            self._parts.leases.quarantine_connection(self)
        if problem is not None:
            raise problem

    async def _read_all(self, tasks: asyncio.TaskGroup) -> None:
        while (body := await read_frame(self._reader)) is not None:
            match decode(body):
                case Lookup() as lookup:
                    self._start_lookup(tasks, lookup)
                case Put() as put:
                    self._queue_put(put)
                case Release(leases):
                    self._parts.leases.release(self._peer.engine_id, leases)
                case Forget(block_hashes):
                    self._forget(self._peer.names(block_hashes))
                case PrefillReport() as report:
                    self._note_prefill(report)
                case Hello():
                    raise CacheWireError("a second hello")

    def _start_lookup(self, tasks: asyncio.TaskGroup, lookup: Lookup) -> None:
        if not 0 <= lookup.num_local_blocks <= len(lookup.block_hashes):
            raise CacheWireError("num_local_blocks")
        if not 0 <= lookup.num_prompt_tokens <= _MAX_TOKENS:
            raise CacheWireError("num_prompt_tokens")
        all_names = self._peer.names(lookup.block_hashes)
        if not self._parts.use.uses_cache(all_names) or len(self._lookups) >= _MAX_LOOKUPS:
            self._answer(lookup, [])
            return
        self._parts.choice.look_up(all_names, self._peer.block_bytes)
        names = all_names[lookup.num_local_blocks :]
        task = tasks.create_task(self._look_up(lookup, names), name="lookup")
        self._lookups.add(task)
        task.add_done_callback(self._lookups.discard)

    async def _look_up(self, lookup: Lookup, names: list[BlockName]) -> None:
        def tell_waiting(wait_s: float) -> None:
            self._outbox.send(Staging(self._parts.boot_token, lookup.request_id, wait_s))

        num_full_tokens = len(lookup.block_hashes) * self._peer.block_size
        asked = AskedPrefix(
            self._peer.fingerprint,
            self._peer.block_size,
            self._peer.block_bytes,
            lookup.num_local_blocks,
            max(lookup.num_prompt_tokens, num_full_tokens),
        )
        started = self._parts.use.now()
        blocks = await self._parts.lookups.find(asked, names, tell_waiting)
        self._parts.use.report(asked, len(blocks), started)
        self._answer(lookup, blocks)

    def _answer(self, lookup: Lookup, blocks: Sequence[CachedBlock]) -> None:
        lease = self._parts.leases.grant(self._peer.engine_id, self, blocks) if blocks else 0
        self._outbox.send(
            Staged(
                self._parts.boot_token,
                lookup.request_id,
                lease,
                lookup.num_local_blocks + len(blocks),
                [block.slot.offset for block in blocks],
                [block.source for block in blocks],
                [block.header.checksum for block in blocks if block.header is not None],
            )
        )

    def _queue_put(self, put: Put) -> None:
        """Check what the engine says of its ring, before any of it is looked at."""
        ring = self._peer.ring
        if ring is None:
            raise CacheWireError("a put without a ring")
        if not put.slots or not len(set(put.slots)) == len(put.slots) == len(put.block_hashes):
            raise CacheWireError("slots of a put")
        if not all(0 <= slot < ring.num_slots for slot in put.slots):
            raise CacheWireError("slot number")
        if not 0 <= put.seconds < _MAX_PREFILL_S:
            raise CacheWireError("seconds of a put")
        if not self._slots_in_work.isdisjoint(put.slots):
            raise CacheWireError("a slot that is not free")
        self._slots_in_work.update(put.slots)
        names = self._peer.names(put.block_hashes)
        self._parts.use.note_save(self._peer.fingerprint, put.seconds)
        self._puts.put_nowait(list(zip(put.slots, names, strict=True)))

    async def _save_all(self) -> None:
        while (puts := await self._puts.get()) is not None:
            assert self._peer.ring is not None, "only a ring's owner can put"
            wanted = [(slot, name) for slot, name in puts if self._parts.use.is_saved(name)]
            num_kept = await self._parts.saver.save(self._peer.ring, wanted)
            slots = [slot for slot, _ in puts]
            self._slots_in_work.difference_update(slots)
            self._outbox.send(Freed(self._parts.boot_token, slots, num_kept))

    def _forget(self, names: list[BlockName]) -> None:
        for name in names:
            self._parts.catalog.drop(name)
        self._parts.writer.remove(names)

    def _note_prefill(self, report: PrefillReport) -> None:
        counts = (report.num_cached_tokens, report.num_computed_tokens)
        if not all(0 <= count <= _MAX_TOKENS for count in counts):
            raise CacheWireError("prefill report")
        if not 0 < report.seconds < _MAX_PREFILL_S:
            raise CacheWireError("prefill report")
        self._parts.planner.note_prefill(self._peer.fingerprint, *counts, report.seconds)
        tokens = self._parts.metrics.prefill_tokens
        tokens.labels("cached").inc(report.num_cached_tokens)
        tokens.labels("computed").inc(report.num_computed_tokens)
