"""The gateway's lean HTTP client: pooled connections to workers, one exchange on each."""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from cache_router.errors import (
    ConfigurationError,
    UpstreamIncompleteError,
    UpstreamProtocolError,
    UpstreamStaleError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from cache_router.settings import Settings
from gateway.http_connection import (
    ConnectionClosedError,
    Header,
    HttpConnection,
    encode_request,
)


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a worker listens."""

    host: str
    port: int
    tls: bool
    base_path: str

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Read a worker's URL.

        Raises:
            ConfigurationError: Not `http://host[:port][/path]` or the same with https.
        """
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError as error:
            raise ConfigurationError("--worker", f"{url!r} is not a URL: {error}") from error
        if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment:
            raise ConfigurationError(
                "--worker", f"{url!r} is not a worker's address; give http://host:port"
            )
        if parts.username or parts.password:
            raise ConfigurationError(
                "--worker", "credentials do not belong in a URL; set RADIXGATE_WORKER_API_KEY"
            )
        tls = parts.scheme == "https"
        return cls(host, port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    @property
    def authority(self) -> bytes:
        """The value of a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode("idna" if not host.isascii() else "ascii")


class UpstreamResponse:
    """A response whose head has come; its body is read piece by piece.

    Whoever gets one must `close` it: what was read to its end goes back to the pool, anything else
    is cut off, which a worker takes as its client leaving.
    """

    def __init__(
        self,
        client: UpstreamClient,
        worker_id: str,
        origin: Origin,
        connection: HttpConnection,
    ) -> None:
        self._client = client
        self._worker_id = worker_id
        self._origin = origin
        self._connection = connection
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
        limit_s = self._client.chunk_timeout_s if timeout_s is None else timeout_s
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
            self._client.release(self._origin, self._connection)


class UpstreamClient:
    """Keeps idle connections for each worker for less time than the worker does."""

    _MAX_IDLE = 256

    def __init__(self, settings: Settings) -> None:
        """Take time limits and the workers' key from `settings`; nothing is opened yet."""
        self._connect_timeout_s = settings.connect_timeout_s
        self._header_timeout_s = settings.header_timeout_s
        self.chunk_timeout_s = settings.chunk_timeout_s
        self._keep_alive_s = settings.worker_keep_alive_s
        self._idle: dict[Origin, deque[HttpConnection]] = {}
        self._tls = ssl.create_default_context()
        self._common: tuple[Header, ...] = ((b"accept-encoding", b"identity"),)
        if settings.worker_api_key is not None:
            bearer = b"Bearer " + settings.worker_api_key.encode()
            self._common += ((b"authorization", bearer),)

    async def send(
        self,
        worker_id: str,
        origin: Origin,
        method: bytes,
        path: str,
        headers: Sequence[Header] = (),
        body: bytes = b"",
        *,
        header_timeout_s: float | None = None,
        fresh: bool = False,
    ) -> UpstreamResponse:
        """Send a request and wait for the response's head.

        Nothing is sent twice: whether a request may be tried again is for the caller to know.

        Args:
            worker_id: Names the worker in errors.
            origin: Where it listens.
            method: `GET` or `POST`.
            path: Below the origin's base path.
            headers: What to send beside what every request carries.
            body: May be empty.
            header_timeout_s: Seconds to wait for the head; the settings' limit if not given.
            fresh: Whether to open a connection even if an idle one is kept.

        Raises:
            UpstreamStaleError: An idle connection was used and closed without a byte.
            UpstreamUnreachableError: Refused, reset or closed before a head.
            UpstreamTimeoutError: No connection or no head in time.
        """
        request = encode_request(
            method,
            (origin.base_path + path).encode("ascii"),
            origin.authority,
            (*self._common, *headers),
            body,
        )
        limit_s = self._header_timeout_s if header_timeout_s is None else header_timeout_s
        idle = None if fresh else self._take_idle(origin)
        connection = idle or await self._connect(worker_id, origin)
        try:
            return await self._exchange(worker_id, origin, connection, request, limit_s)
        except ConnectionClosedError as error:
            if idle is not None and not error.answered:
                raise UpstreamStaleError(worker_id, str(error)) from error
            raise UpstreamUnreachableError(worker_id, str(error)) from error

    async def send_repeatable(
        self,
        worker_id: str,
        origin: Origin,
        method: bytes,
        path: str,
        headers: Sequence[Header] = (),
        body: bytes = b"",
        *,
        header_timeout_s: float | None = None,
    ) -> UpstreamResponse:
        """Do as `send`, and once more if a stale connection is in the way.

        For requests that change nothing and cost little.

        Raises:
            UpstreamUnreachableError: As `send`.
            UpstreamTimeoutError: As `send`.
        """
        try:
            return await self.send(
                worker_id,
                origin,
                method,
                path,
                headers,
                body,
                header_timeout_s=header_timeout_s,
            )
        except UpstreamStaleError:
            return await self.send(
                worker_id,
                origin,
                method,
                path,
                headers,
                body,
                header_timeout_s=header_timeout_s,
                fresh=True,
            )

    async def _exchange(
        self,
        worker_id: str,
        origin: Origin,
        connection: HttpConnection,
        request: bytes,
        limit_s: float,
    ) -> UpstreamResponse:
        done = False
        try:
            connection.start(request)
            async with asyncio.timeout(limit_s):
                await connection.read_head()
            done = True
            return UpstreamResponse(self, worker_id, origin, connection)
        except TimeoutError as error:
            raise UpstreamTimeoutError(worker_id, f"sent no head in {limit_s:g} s") from error
        finally:
            if not done:
                connection.abort()

    def _take_idle(self, origin: Origin) -> HttpConnection | None:
        idle = self._idle.get(origin)
        now_s = asyncio.get_running_loop().time()
        while idle:
            connection = idle.pop()
            if connection.is_open and now_s - connection.idle_since_s < self._keep_alive_s:
                return connection
            connection.abort()
        return None

    async def _connect(self, worker_id: str, origin: Origin) -> HttpConnection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: HttpConnection(loop),
                    origin.host,
                    origin.port,
                    ssl=self._tls if origin.tls else None,
                )
        except TimeoutError as error:
            raise UpstreamTimeoutError(
                worker_id, f"did not accept a connection in {self._connect_timeout_s:g} s"
            ) from error
        except OSError as error:
            raise UpstreamUnreachableError(worker_id, f"cannot be reached: {error}") from error
        return connection

    def release(self, origin: Origin, connection: HttpConnection) -> None:
        """Take a connection back from a response that is done with it."""
        idle = self._idle.setdefault(origin, deque())
        if not connection.reusable or len(idle) >= self._MAX_IDLE:
            connection.abort()
            return
        connection.idle_since_s = asyncio.get_running_loop().time()
        idle.append(connection)

    def forget(self, origin: Origin) -> None:
        """Drop the idle connections of a worker that died or was removed."""
        for connection in self._idle.pop(origin, ()):
            connection.abort()

    def close(self) -> None:
        """Drop every idle connection."""
        for origin in list(self._idle):
            self.forget(origin)
