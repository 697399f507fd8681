"""`/metrics` and `/kv_event_sources` over HTTP, of a server that is no web server otherwise."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from cache_router.errors import ConfigurationError
from engine_workers.cache_server.event_sources import EventSources
from engine_workers.cache_server.load_planner import LoadPlanner

_TIMEOUT_S = 5.0
_MAX_HEAD_BYTES = 16 * 1024
_MAX_CONNECTIONS = 16


@dataclass(frozen=True, slots=True)
class Page:
    """What a path answers with, made anew each time."""

    content_type: str
    make: Callable[[], bytes]


def server_pages(
    registry: CollectorRegistry, events: EventSources, planner: LoadPlanner
) -> dict[bytes, Page]:
    """Return the pages by path."""
    return {
        b"/metrics": Page(CONTENT_TYPE_LATEST, lambda: generate_latest(registry)),
        b"/kv_event_sources": Page("application/json", lambda: events.describe(planner.rates)),
    }


@contextlib.asynccontextmanager
async def served_pages(pages: Mapping[bytes, Page], host: str, port: int) -> AsyncIterator[int]:
    """Serve pages; they are made on the event loop, which owns what they tell.

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
                    await _answer(pages, reader, writer)
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
    pages: Mapping[bytes, Page], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    method, _, rest = head.partition(b" ")
    target = rest.partition(b" ")[0].partition(b"?")[0]
    page = pages.get(target) if method == b"GET" else None
    status, content_type, body = b"404 Not Found", "text/plain", b"not found\n"
    if page is not None:
        status, content_type, body = b"200 OK", page.content_type, page.make()
    writer.write(
        b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        % (status, content_type.encode(), len(body))
    )
    writer.write(body)
    await writer.drain()
