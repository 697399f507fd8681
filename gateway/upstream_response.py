"""A worker's answer, read piece by piece, and given back to the client that it came from."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from cache_router.errors import (
    UpstreamIncompleteError,
    UpstreamProtocolError,
    UpstreamTimeoutError,
)
from gateway.http_connection import ConnectionClosedError, Header, HttpConnection


class UpstreamResponse:
    """A response whose head has come; its body is read piece by piece.

    Whoever gets one must `close` it: what was read to its end goes back to the pool, anything else
    is cut off, which a worker takes as its client leaving.
    """

    def __init__(
        self,
        worker_id: str,
        connection: HttpConnection,
        release: Callable[[HttpConnection], None],
        chunk_timeout_s: float,
    ) -> None:
        self._worker_id = worker_id
        self._connection = connection
        self._release = release
        self._chunk_timeout_s = chunk_timeout_s
        self._closed = False
        self.status = connection.status
        self.headers: Sequence[Header] = connection.headers

    def header(self, name: bytes) -> bytes | None:
        """The first header of that (lower-case) name."""
        return next((value for key, value in self.headers if key == name), None)

    async def read_chunk(self, timeout_s: float | None = None) -> bytes:
        """Return the next piece of the body, b"" at its end.

        Args:
            timeout_s: Seconds to wait for it; the client's own limit if not given.

        Raises:
            UpstreamTimeoutError: Nothing came in time.
            UpstreamIncompleteError: The connection ended before the body.
        """
        limit_s = self._chunk_timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._connection.read_chunk()
        except TimeoutError as error:
            raise UpstreamTimeoutError(self._worker_id, f"was silent for {limit_s:g} s") from error
        except ConnectionClosedError as error:
            raise UpstreamIncompleteError(
                self._worker_id, f"{error} before its answer was whole"
            ) from error

    async def read_all(self, limit_bytes: int) -> bytes:
        """Return the whole body.

        Raises:
            UpstreamProtocolError: It is longer than `limit_bytes`.
            UpstreamTimeoutError: As `read_chunk`.
            UpstreamIncompleteError: As `read_chunk`.
        """
        chunks: list[bytes] = []
        size = 0
        while chunk := await self.read_chunk():
            size += len(chunk)
            if size > limit_bytes:
                raise UpstreamProtocolError(
                    self._worker_id, f"sent an answer of over {limit_bytes} bytes"
                )
            chunks.append(chunk)
        return b"".join(chunks)

    def close(self) -> None:
        """Give the connection back, or cut it off if the body was not read to its end."""
        if not self._closed:
            self._closed = True
            self._release(self._connection)
