"""The server's end of the wire: one frame after another, in and out."""

from __future__ import annotations

import asyncio
import struct

import msgspec

from cache_router.errors import CacheWireError
from engine_workers.cache_wire import MAX_FRAME_BYTES

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()


def frame_of(message: msgspec.Struct) -> bytes:
    """Return a message as it goes over the socket."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


async def read_frame(reader: asyncio.StreamReader) -> bytes | None:
    """Read one frame's body; None when the other side has hung up, within a frame too.

    Raises:
        CacheWireError: It is announced to be larger than a frame may be.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        if length > MAX_FRAME_BYTES:
            raise CacheWireError("frame length")
        return await reader.readexactly(length)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class Outbox:
    """What goes out on one connection. Whoever does not read it is disconnected.

    Args:
        writer: The connection.
        max_bytes: What may wait to be read by the other side.
    """

    def __init__(self, writer: asyncio.StreamWriter, max_bytes: int) -> None:
        self._writer = writer
        self._max_bytes = max_bytes
        self.has_overflowed = False

    def send(self, message: msgspec.Struct) -> None:
        """Send a message, or end the connection if too much waits already."""
        if self._writer.is_closing():
            return
        self._writer.write(frame_of(message))
        if self._writer.transport.get_write_buffer_size() > self._max_bytes:
            self.has_overflowed = True
            self._writer.transport.abort()
