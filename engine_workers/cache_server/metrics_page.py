"""`/metrics` over HTTP: the one page of a server that is no web server otherwise."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from cache_router.errors import ConfigurationError

_TIMEOUT_S = 5.0
_MAX_HEAD_BYTES = 16 * 1024
_MAX_CONNECTIONS = 16


@contextlib.asynccontextmanager
async def metrics_page(registry: CollectorRegistry, host: str, port: int) -> AsyncIterator[int]:
    """Serve the page; it is made on the event loop, which owns what is counted.

    Yields:
        The port, which the system chooses for 0.

    Raises:
        ConfigurationError: The port cannot be listened on.
    """
    num_connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_connections
        num_connections += 1
        try:
            if num_connections <= _MAX_CONNECTIONS:
                async with asyncio.timeout(_TIMEOUT_S):
                    await _answer(registry, reader, writer)
        except (TimeoutError, ConnectionError, asyncio.IncompleteReadError):
            pass  # whoever asked has left, or never asked
        except asyncio.LimitOverrunError:
            pass  # a head that no scraper sends
        finally:
            num_connections -= 1
            writer.close()

    try:
        server = await asyncio.start_server(serve, host, port, limit=_MAX_HEAD_BYTES)
    except OSError as error:
        raise ConfigurationError(
            "RADIXGATE_CACHE_SERVER_METRICS_PORT",
            f"cannot listen on {host}:{port}: {error.strerror}",
        ) from error
    async with server:
        yield server.sockets[0].getsockname()[1]


async def _answer(
    registry: CollectorRegistry, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    method, _, rest = head.partition(b" ")
    target = rest.partition(b" ")[0].partition(b"?")[0]
    status, body = b"404 Not Found", b"not found\n"
    if method == b"GET" and target == b"/metrics":
        status, body = b"200 OK", generate_latest(registry)
    writer.write(
        b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        % (status, CONTENT_TYPE_LATEST.encode(), len(body))
    )
    writer.write(body)
    await writer.drain()
