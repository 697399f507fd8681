"""Puts full blocks into the write ring, within the step that filled them.

It copies before the engine goes on, so no block can change under the copy. When the ring is full
or there is no server, blocks are dropped: a save that is lost is a block computed again some day.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable, Iterable

from engine_workers.blocks.block_header import BlockHeader, Codec, pack
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_wire import Freed, Put
from engine_workers.connector.block_layout import BlockLayout
from engine_workers.connector.channel import Channel
from engine_workers.connector.plan import SaveBlock, SaveChain
from engine_workers.connector.session import Session

_log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_ALIGNMENT = 64
_MAX_COMMITTED = 64 * 1024


class RingWriter:
    """The slots of one session's ring. One thread only.

    Args:
        channel: Where puts are announced.
        layout: The engine's memory.
        clock: Seconds, monotonic.
    """

    def __init__(self, channel: Channel, layout: BlockLayout, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._channel = channel
        self._layout = layout
        self._fingerprint = Fingerprint(b"")
        self._session: Session | None = None
        self._free: list[int] = []
        self._in_use: dict[int, bytes] = {}
        self._broken: set[str] = set()
        self._committed: list[bytes] = []
        self._has_dropped = False

    def on_connected(self, session: Session, fingerprint: Fingerprint) -> None:
        """There is a ring, all of it is free, and what is put there is of this namespace."""
        self.on_lost()
        self._fingerprint = fingerprint
        if session.num_slots and session.ring.shape[1] > self._layout.payload_bytes:
            self._session = session
            self._free = list(range(session.num_slots))

    def on_lost(self) -> None:
        """There is no ring."""
        self._session = None
        self._free = []
        self._in_use = {}
        self._committed = []
        self._has_dropped = False
        # The next server has none of the parents.
        self._broken = set()

    def on_freed(self, event: Freed) -> None:
        """The server has looked at these slots."""
        freed = [slot for slot in dict.fromkeys(event.slots) if slot in self._in_use]
        block_hashes = [self._in_use.pop(slot) for slot in freed]
        self._free += freed
        # Which of them it kept is not said, so all of them have to be.
        if event.num_kept == len(event.slots) and len(self._committed) < _MAX_COMMITTED:
            self._committed += block_hashes

    def end_chains(self, request_ids: Iterable[str]) -> None:
        """What these requests save from now on begins anew."""
        self._broken.difference_update(request_ids)

    def save(self, chain: SaveChain) -> None:
        """Copy a request's full blocks into the ring, as far as there is room."""
        session = self._session
        if session is None or chain.request_id in self._broken:
            return
        started_s = self._clock()
        slots: list[int] = []
        for block in chain.blocks:
            if not self._free or not self._fill(session, self._free[-1], block):
                self._break(chain.request_id)
                break
            slots.append(self._free.pop())
        block_hashes = [block.block_hash for block in chain.blocks[: len(slots)]]
        if not slots:
            return
        if self._channel.send(Put(slots, block_hashes, self._clock() - started_s)):
            self._in_use.update(zip(slots, block_hashes, strict=True))
        else:
            self._free += slots
            self._break(chain.request_id)

    def take_committed(self) -> tuple[bytes, ...]:
        """Hashes that the server took over since the last call."""
        committed = tuple(self._committed)
        self._committed = []
        return committed

    def _break(self, request_id: str) -> None:
        """Save no more of this chain: a child is worth nothing without its parent."""
        self._broken.add(request_id)
        if not self._has_dropped:
            self._has_dropped = True
            _log.info("the cache server does not keep up: some blocks are not saved")

    def _fill(self, session: Session, slot: int, block: SaveBlock) -> bool:
        try:
            header = self._header(block)
        except ValueError as error:
            _log.warning("a block is not saved: %s", error)
            return False
        front = _LENGTH.pack(len(header)) + header
        start = -(-len(front) // _ALIGNMENT) * _ALIGNMENT
        target = session.ring[slot]
        if start + self._layout.payload_bytes > len(target):
            return False
        memoryview(target)[: len(front)] = front
        self._layout.copy_out(block.block_id, target.ctypes.data + start)
        return True

    def _header(self, block: SaveBlock) -> bytes:
        return pack(
            BlockHeader(
                name=BlockName(self._fingerprint, block.block_hash),
                parent_hash=block.parent_hash,
                token_ids=block.token_ids,
                extra_keys=block.extra_keys,
                lora_name=None,  # requests with an adapter are left alone
                codec=Codec.RAW,
                payload_bytes=self._layout.payload_bytes,
                checksum=self._layout.checksum(block.block_id),
            )
        )
