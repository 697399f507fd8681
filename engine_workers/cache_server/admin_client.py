"""Asking a running cache server, from a command that waits for the answer."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from types import TracebackType

import msgspec

from cache_router.errors import CacheWireError, ConfigurationError
from engine_workers.cache_server.admin_wire import Answer, Question
from engine_workers.cache_server.frames import frame_of
from engine_workers.cache_wire import MAX_FRAME_BYTES

_LENGTH = struct.Struct("<I")


class AdminClient:
    """One connection to the server behind a socket.

    Args:
        path: Where it listens.
        timeout_s: How long it may take to answer; verifying reads everything.

    Raises:
        ConfigurationError: Nobody listens there.
    """

    def __init__(self, path: Path, timeout_s: float) -> None:
        self._path = path
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._connection.settimeout(timeout_s)
        try:
            self._connection.connect(os.fspath(path))
        except OSError as error:
            self._connection.close()
            raise ConfigurationError(
                "RADIXGATE_CACHE_SOCKET",
                f"no cache server answers at {path} ({error.strerror or error}); "
                "`radixgate cache-server` starts one",
            ) from error

    def __enter__(self) -> AdminClient:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._connection.close()

    def ask(self, question: Question) -> Answer:
        """Ask, and wait.

        Raises:
            CacheWireError: No answer came in time, or none that can be read.
        """
        try:
            self._connection.sendall(frame_of(question))
            (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
            if length > MAX_FRAME_BYTES:
                raise CacheWireError(f"{self._path} is no cache server")
            answer: Answer = msgspec.msgpack.decode(self._receive(length), type=Answer)
        except OSError as error:
            raise CacheWireError(
                f"the cache server at {self._path} does not answer: {error}"
            ) from error
        except msgspec.MsgspecError as error:
            raise CacheWireError(f"{self._path} is no cache server") from error
        return answer

    def _receive(self, count: int) -> bytes:
        received = bytearray()
        while len(received) < count:
            more = self._connection.recv(count - len(received))
            if not more:
                raise CacheWireError(f"the cache server at {self._path} has hung up")
            received += more
        return bytes(received)
