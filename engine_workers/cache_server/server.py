"""The cache server: one asyncio process a node, in front of its arena and tiers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import msgspec

from cache_router.errors import CacheWireError
from engine_workers.cache_server.admin import Admin
from engine_workers.cache_server.admin_wire import Question
from engine_workers.cache_server.cache_parts import CacheParts
from engine_workers.cache_server.engine_connection import EngineConnection, Peer
from engine_workers.cache_server.frames import Outbox, frame_of, read_frame
from engine_workers.cache_server.slots import slot_bytes_for
from engine_workers.cache_server.write_ring import WriteRing, ring_slot_bytes
from engine_workers.cache_wire import PROTOCOL_VERSION, Hello, Refused, Welcome

_MAX_CONNECTIONS = 256
_FIRST_FRAME_S = 5.0
_SWEEP_S = 1.0
_OUTBOX_BYTES = 4 * 1024 * 1024
_MAX_ENGINE_ID_CHARS = 256
_MAX_BLOCK_SIZE = 1 << 20
_MAX_SERVED_MODELS = 64
_first_decoder: msgspec.msgpack.Decoder[Hello | Question] = msgspec.msgpack.Decoder(
    Hello | Question
)
_logger = logging.getLogger(__name__)


class CacheServer:
    """Serves connections until it is cancelled.

    Args:
        parts: Arena, tiers and all that decides about them.
        ring_bytes: How large one worker's write ring may be.
        clock: Seconds, monotonic.
    """

    def __init__(self, parts: CacheParts, ring_bytes: int, clock: Callable[[], float]) -> None:
        self._parts = parts
        self._ring_bytes = ring_bytes
        self._admin = Admin(parts, clock)
        self.num_connections = 0

    async def serve(self, listener: socket.socket) -> None:
        """Accept and serve; never returns by itself."""
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as tasks:
            self._parts.writer.start(tasks)
            tasks.create_task(self._sweep_all(), name="sweep")
            while True:
                connection, _ = await loop.sock_accept(listener)
                if self.num_connections >= _MAX_CONNECTIONS:
                    self._count_closed("too many")
                    connection.close()
                    continue
                tasks.create_task(self._serve_one(connection, tasks), name="connection")

    def sweep(self) -> None:
        """Free what engines left behind that have ended."""
        self._parts.leases.sweep(self._parts.engines.is_gone)
        self._parts.engines.forget_gone()

    async def _sweep_all(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            self.sweep()

    async def _serve_one(self, connection: socket.socket, tasks: asyncio.TaskGroup) -> None:
        self.num_connections += 1
        reader, writer = await asyncio.open_unix_connection(sock=connection)
        outbox = Outbox(writer, _OUTBOX_BYTES)
        try:
            async with asyncio.timeout(_FIRST_FRAME_S):
                body = await read_frame(reader)
            if body is not None:
                first = _decode_first(body)
                if isinstance(first, Hello):
                    await self._serve_engine(first, connection, reader, outbox, tasks)
                else:
                    await self._serve_operator(first, reader, outbox)
        except TimeoutError:
            self._count_closed("silent")
        except CacheWireError as error:
            self._count_closed("malformed")
            _logger.warning("closed a connection: it sent a wrong %s", error)
        finally:
            if outbox.has_overflowed:
                self._count_closed("hung")
            self.num_connections -= 1
            writer.close()

    async def _serve_engine(
        self,
        hello: Hello,
        connection: socket.socket,
        reader: asyncio.StreamReader,
        outbox: Outbox,
        tasks: asyncio.TaskGroup,
    ) -> None:
        reason = self._refusal(hello)
        if reason is not None:
            self._count_closed("refused")
            _logger.warning("refused an engine: %s", reason)
            outbox.send(Refused(reason))
            return
        parts = self._parts
        ring = self._ring_for(hello)
        process = parts.engines.join(
            hello.engine_id, hello.namespace, hello.block_bytes, connection
        )
        fingerprint = hello.namespace.fingerprint
        parts.events.join(
            hello.namespace, hello.served_models, hello.block_bytes, parts.tiers, tasks
        )
        try:
            welcome = Welcome(
                parts.boot_token,
                parts.arena.num_bytes,
                slot_bytes_for(hello.block_bytes),
                0 if ring is None else ring.num_slots,
                0 if ring is None else ring.slot_bytes,
            )
            descriptors = [parts.arena.fd] if ring is None else [parts.arena.fd, ring.fd]
            _send_with_descriptors(connection, frame_of(welcome), descriptors)
            peer = Peer(
                hello.engine_id,
                fingerprint,
                hello.namespace.block_size,
                hello.block_bytes,
                ring,
            )
            await EngineConnection(parts, peer, reader, outbox).serve()
            process.hung_up()
        finally:
            parts.engines.leave(hello.engine_id)
            if ring is not None:
                ring.close()

    async def _serve_operator(
        self, first: Question, reader: asyncio.StreamReader, outbox: Outbox
    ) -> None:
        question: Hello | Question = first
        while not isinstance(question, Hello):
            outbox.send(await self._admin.answer(question))
            body = await read_frame(reader)
            if body is None:
                return
            question = _decode_first(body)
        raise CacheWireError("hello: an operator is no engine")

    def _refusal(self, hello: Hello) -> str | None:
        if hello.protocol != PROTOCOL_VERSION:
            return f"protocol {hello.protocol}, and this server speaks {PROTOCOL_VERSION}"
        if hello.role not in ("scheduler", "worker"):
            return "the role is neither scheduler nor worker"
        if not 0 < len(hello.engine_id) <= _MAX_ENGINE_ID_CHARS:
            return "the engine id is empty or too long"
        if not 0 < hello.namespace.block_size <= _MAX_BLOCK_SIZE:
            return f"block_size is {hello.namespace.block_size}"
        if len(hello.served_models) > _MAX_SERVED_MODELS:
            return f"{len(hello.served_models)} names for one model"
        segment_bytes = self._parts.arena.slots.segment_bytes
        if not 0 < hello.block_bytes <= segment_bytes:
            return (
                f"blocks of {hello.block_bytes} bytes, and the arena takes up to {segment_bytes}; "
                "raise RADIXGATE_ARENA_BYTES"
            )
        return self._parts.engines.refusal(hello.engine_id, hello.namespace, hello.block_bytes)

    def _ring_for(self, hello: Hello) -> WriteRing | None:
        if hello.role != "worker" or hello.ring_slots < 1:
            return None
        most = max(1, self._ring_bytes // ring_slot_bytes(hello.block_bytes))
        return WriteRing(min(hello.ring_slots, most), hello.block_bytes, hello.namespace.block_size)

    def _count_closed(self, reason: str) -> None:
        self._parts.metrics.closed_connections.labels(reason).inc()


def _decode_first(body: bytes) -> Hello | Question:
    try:
        return _first_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise CacheWireError("first message") from error


def _send_with_descriptors(connection: socket.socket, frame: bytes, descriptors: list[int]) -> None:
    """Send the first frame of a connection: its buffer is empty, so that it is taken whole.

    Raises:
        CacheWireError: The other side has gone.
    """
    try:
        num_sent = socket.send_fds(connection, [frame], descriptors)
    except OSError as error:
        raise CacheWireError("hello: it did not wait for the answer") from error
    assert num_sent == len(frame), "a few hundred bytes fit an empty buffer"
