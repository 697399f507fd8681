"""The engine's end of the wire: whole frames out of a byte stream, and messages into frames."""

from __future__ import annotations

import struct

import msgspec

from engine_workers.cache_wire import MAX_FRAME_BYTES, FromEngine, FromServer

_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(FromServer)


class FrameError(Exception):
    """What came is no frame of this wire."""


def frame_of(message: FromEngine) -> bytes:
    """Return the message as it goes over the socket.

    Raises:
        FrameError: It is larger than a frame may be.
    """
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise FrameError(f"message of {len(body)} bytes")
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Collects bytes until they are whole messages; holds one frame at most and its follower."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, received: bytes) -> list[FromServer]:
        """Add bytes, and return the messages that are whole now, in order.

        Raises:
            FrameError: A length over the limit, or a body that is no message of a server.
        """
        self._buffer += received
        messages: list[FromServer] = []
        while len(self._buffer) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer)
            if length > MAX_FRAME_BYTES:
                raise FrameError(f"frame of {length} bytes")
            end = _LENGTH.size + length
            if len(self._buffer) < end:
                break
            try:
                messages.append(_decoder.decode(memoryview(self._buffer)[_LENGTH.size : end]))
            except msgspec.MsgspecError as error:
                raise FrameError(str(error)) from error
            del self._buffer[:end]
        return messages
