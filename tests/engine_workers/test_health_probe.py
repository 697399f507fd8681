from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from engine_workers.health_probe import is_healthy
from engine_workers.ports import any_free_ports

HOST = "127.0.0.1"


@asynccontextmanager
async def answering(answer: bytes | None) -> AsyncIterator[tuple[int, list[bytes]]]:
    """A server that answers so and closes; None: it never answers."""
    requests: list[bytes] = []
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        if answer is None:
            await ended.wait()
        else:
            writer.write(answer)
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1], requests
    finally:
        ended.set()
        server.close()
        await server.wait_closed()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.0 200 \r\n\r\n", True),
        (b"HTTP/1.1 503 Service Unavailable\r\n\r\n", False),
        (b"SSH-2.0-server\r\n", False),
        (b"HTTP/1.1 what\r\n\r\n", False),
        (b"x" * 5000, False),
        (b"", False),
    ],
)
async def test_only_an_http_200_is_healthy(answer: bytes, expected: bool) -> None:
    async with answering(answer) as (port, _):
        assert await is_healthy(HOST, port) is expected


async def test_the_path_is_asked_for() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\n\r\n") as (port, requests):
        await is_healthy(HOST, port, path="/ready")
    assert requests[0].startswith(b"GET /ready HTTP/1.1\r\n")


async def test_a_server_that_hangs_is_not_healthy() -> None:
    async with answering(None) as (port, _):
        assert not await is_healthy(HOST, port, timeout_s=0.05)


async def test_nobody_there_is_not_healthy() -> None:
    (port,) = any_free_ports(1)
    assert not await is_healthy(HOST, port)
