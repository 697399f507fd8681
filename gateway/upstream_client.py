"""The gateway's lean HTTP client: pooled connections to workers, one exchange on each."""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from urllib.parse import urlsplit

from cache_router.errors import (
    ConfigurationError,
    UpstreamConnectError,
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
from gateway.upstream_response import UpstreamResponse

# What may stand in a request line as it is.
_PATH = re.compile(r"[!-~]*")


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
        if port == 0 or not _PATH.fullmatch(parts.path):
            raise ConfigurationError("--worker", f"{url!r} has a port or a path that none can have")
        if parts.username or parts.password:
            raise ConfigurationError(
                "--worker", "credentials do not belong in a URL; set RADIXGATE_WORKER_API_KEY"
            )
        tls = parts.scheme == "https"
        origin = cls(host, port or (443 if tls else 80), tls, parts.path.rstrip("/"))
        try:
            _ = origin.authority
        except UnicodeError as error:
            raise ConfigurationError("--worker", f"{url!r} names no host: {error}") from error
        return origin

    @property
    def authority(self) -> bytes:
        """The value of a Host header."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}".encode("idna" if not host.isascii() else "ascii")


@dataclass(frozen=True, slots=True)
class UpstreamRequest:
    """One request to one worker."""

    worker_id: str
    """Names the worker in errors."""
    origin: Origin
    method: bytes
    path: str
    """Below the origin's base path."""
    headers: Sequence[Header] = ()
    """What to send beside what every request carries."""
    body: bytes = b""


class UpstreamClient:
    """Keeps idle connections for each worker for less time than the worker does."""

    _MAX_IDLE = 256

    def __init__(self, settings: Settings) -> None:
        """Take time limits and the workers' key from `settings`; nothing is opened yet."""
        self._connect_timeout_s = settings.connect_timeout_s
        self._header_timeout_s = settings.header_timeout_s
        self._chunk_timeout_s = settings.chunk_timeout_s
        self._keep_alive_s = settings.worker_keep_alive_s
        self._idle: dict[Origin, deque[HttpConnection]] = {}
        self._tls = ssl.create_default_context()
        self._common: tuple[Header, ...] = ((b"accept-encoding", b"identity"),)
        if settings.worker_api_key is not None:
            bearer = b"Bearer " + settings.worker_api_key.encode()
            self._common += ((b"authorization", bearer),)

    async def send(self, request: UpstreamRequest, *, fresh: bool = False) -> UpstreamResponse:
        """Send a request and wait for the response's head.

        Nothing is sent twice: whether a request may be tried again is for the caller to know.

        Args:
            request: What to send.
            fresh: Whether to open a connection even if an idle one is kept.

        Raises:
            UpstreamConnectError: No connection, or not in time; nothing was sent.
            UpstreamStaleError: An idle connection was used and closed without a byte.
            UpstreamUnreachableError: Reset or closed before a head.
            UpstreamTimeoutError: No head in time.
        """
        idle = None if fresh else self._take_idle(request.origin)
        connection = idle or await self._connect(request)
        try:
            return await self._exchange(request, connection)
        except ConnectionClosedError as error:
            if idle is not None and not error.answered:
                raise UpstreamStaleError(request.worker_id, str(error)) from error
            raise UpstreamUnreachableError(request.worker_id, str(error)) from error

    async def send_repeatable(self, request: UpstreamRequest) -> UpstreamResponse:
        """Do as `send`, and once more if a stale connection is in the way.

        For requests that change nothing and cost little.

        Raises:
            UpstreamUnreachableError: As `send`.
            UpstreamTimeoutError: As `send`.
        """
        try:
            return await self.send(request)
        except UpstreamStaleError:
            return await self.send(request, fresh=True)

    async def _exchange(
        self, request: UpstreamRequest, connection: HttpConnection
    ) -> UpstreamResponse:
        origin = request.origin
        limit_s = self._header_timeout_s
        done = False
        try:
            connection.start(
                encode_request(
                    request.method,
                    (origin.base_path + request.path).encode("ascii"),
                    origin.authority,
                    (*self._common, *request.headers),
                    request.body,
                )
            )
            async with asyncio.timeout(limit_s):
                await connection.read_head()
            done = True
            return UpstreamResponse(
                request.worker_id,
                connection,
                partial(self._release, origin),
                self._chunk_timeout_s,
            )
        except TimeoutError as error:
            raise UpstreamTimeoutError(
                request.worker_id, f"sent no head in {limit_s:g} s"
            ) from error
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

    async def _connect(self, request: UpstreamRequest) -> HttpConnection:
        origin, worker_id = request.origin, request.worker_id
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
            raise UpstreamConnectError(
                worker_id, f"did not accept a connection in {self._connect_timeout_s:g} s"
            ) from error
        except OSError as error:
            raise UpstreamConnectError(worker_id, f"cannot be reached: {error}") from error
        return connection

    def _release(self, origin: Origin, connection: HttpConnection) -> None:
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
