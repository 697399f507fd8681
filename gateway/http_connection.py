"""One HTTP/1.1 connection to a worker: an `asyncio.Protocol` over httptools' parser.

Written for the data path: no request or response objects beyond what is forwarded, body pieces
handed on as they were read, and the socket read no faster than the client takes them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import cast

import httptools

Header = tuple[bytes, bytes]

_HIGH_WATER_BYTES = 256 * 1024
_LOW_WATER_BYTES = 64 * 1024
_MAX_HEAD_BYTES = 64 * 1024


class ConnectionClosedError(Exception):
    """The connection ended before the response did. Internal: the client makes it an upstream one.

    `answered` tells whether any byte of the response had come.
    """

    def __init__(self, problem: str, *, answered: bool) -> None:
        super().__init__(problem)
        self.answered = answered


class HttpConnection(asyncio.Protocol):
    """A connection that carries one exchange at a time: `start`, `read_head`, `read_chunk`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Make a connection that `loop.create_connection` will attach to a socket."""
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._problem: str | None = None
        self._paused = False
        self._begin()
        self._complete = True
        self.idle_since_s = 0.0

    def _begin(self) -> None:
        self.status = 0
        self.headers: list[Header] = []
        self._head_bytes = 0
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._head_done = False
        self._ends_with_connection = False
        self._complete = False
        self._keep_alive = False
        self._answered = False

    # --- what the client calls ---

    def start(self, request: bytes) -> None:
        """Send a whole request; forget the exchange before it."""
        assert self._transport is not None
        self._begin()
        self._transport.write(request)

    async def read_head(self) -> None:
        """Wait until `status` and `headers` are there.

        Raises:
            ConnectionClosedError: The connection ended first.
        """
        while not self._head_done:
            await self._wait()

    async def read_chunk(self) -> bytes:
        """Return the next piece of the body as it was read, b"" at its end.

        Raises:
            ConnectionClosedError: The connection ended before the body.
        """
        while not self._chunks:
            if self._complete:
                return b""
            await self._wait()
        chunk = self._chunks.popleft()
        self._buffered -= len(chunk)
        if self._paused and self._buffered < _LOW_WATER_BYTES:
            self._paused = False
            assert self._transport is not None
            self._transport.resume_reading()
        return chunk

    @property
    def reusable(self) -> bool:
        """Whether another exchange may follow: this one is over and both sides keep it open."""
        return self._complete and not self._chunks and self._keep_alive and self._problem is None

    @property
    def is_open(self) -> bool:
        """Whether nothing is known against sending on it."""
        return self._problem is None

    def abort(self) -> None:
        """Close at once; the worker sees its client leave and stops generating."""
        self._fail("closed by the gateway")
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._problem is not None:
            raise ConnectionClosedError(self._problem, answered=self._answered)
        assert self._waiter is None
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, problem: str) -> None:
        if self._problem is None:
            self._problem = problem
        self._wake()

    # --- asyncio.Protocol ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        # Not asserted: uvloop's transports have asyncio's methods without being its classes.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Feed the parser; it calls the `on_` methods below."""
        if self._complete:
            # Nobody asked: an unasked-for answer would be taken for the next request's.
            self._fail("sent data without a request")
            assert self._transport is not None
            self._transport.abort()
            return
        self._answered = True
        if not self._head_done:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"does not speak HTTP/1.1: {error}")
            self.abort()
            return
        except httptools.HttpParserUpgrade:
            self._fail("switches to a protocol that nobody asked for")
            self.abort()
            return
        if not self._head_done and self._head_bytes > _MAX_HEAD_BYTES:
            self._fail(f"sent a response head of over {_MAX_HEAD_BYTES} bytes")
            self.abort()
        elif self._buffered > _HIGH_WATER_BYTES and not self._paused:
            self._paused = True
            assert self._transport is not None
            self._transport.pause_reading()

    def eof_received(self) -> None:
        """Finish a body that ends with its connection."""
        if self._head_done and not self._complete and self._ends_with_connection:
            self._complete = True
        self._fail("closed the connection")

    def connection_lost(self, exc: Exception | None) -> None:
        """Wake whoever waits."""
        self._fail("closed the connection" if exc is None else f"connection lost: {exc}")

    # --- httptools callbacks ---

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect one header, its name in lower case; what trails a body is no header."""
        if not self._head_done and not self._complete:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        """Take the head, unless it is an interim one (100, 103)."""
        if self._complete:
            # A second answer in the same read: nobody asked for it, nobody may get it.
            self._fail("sent data without a request")
            return
        status = self._parser.get_status_code()
        if status < 200:
            self.headers.clear()
            return
        self.status = status
        names = {name for name, _ in self.headers}
        self._ends_with_connection = not names & {b"content-length", b"transfer-encoding"}
        self._head_done = True
        self._wake()

    def on_body(self, data: bytes) -> None:
        """Queue a piece of the body."""
        if self._complete:
            return
        self._chunks.append(data)
        self._buffered += len(data)
        self._wake()

    def on_message_complete(self) -> None:
        """Mark the response as whole."""
        if not self._head_done or self._complete:
            return
        self._keep_alive = self._parser.should_keep_alive()
        self._complete = True
        self._wake()


def encode_request(
    method: bytes, path: bytes, host: bytes, headers: Sequence[Header], body: bytes
) -> bytes:
    """Lay out a request; `content-length` is added, the caller's headers are sent as they are."""
    head = [method, b" ", path, b" HTTP/1.1\r\nhost: ", host, b"\r\n"]
    for name, value in headers:
        head += (name, b": ", value, b"\r\n")
    if body or method != b"GET":
        head.append(b"content-length: %d\r\n" % len(body))
    head += (b"\r\n", body)
    return b"".join(head)
