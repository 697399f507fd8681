from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from cache_router.errors import (
    ConfigurationError,
    UpstreamIncompleteError,
    UpstreamProtocolError,
    UpstreamStaleError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from cache_router.settings import Settings
from gateway.upstream_client import Origin, UpstreamClient, UpstreamRequest

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class ScriptedServer:
    """Speaks bytes as it is told to, and counts its connections."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self.num_connections = 0
        self.client_left = asyncio.Event()
        self.origin = Origin("127.0.0.1", 0, tls=False, base_path="")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            await self._handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            self.client_left.set()
        finally:
            writer.close()


@asynccontextmanager
async def scripted(handler: Handler) -> AsyncIterator[ScriptedServer]:
    server = ScriptedServer(handler)
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    host, port = listener.sockets[0].getsockname()[:2]
    server.origin = Origin(host, port, tls=False, base_path="")
    try:
        yield server
    finally:
        listener.close()


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(b"\r\n\r\n")
    length = 0
    for line in head.split(b"\r\n"):
        if line.lower().startswith(b"content-length:"):
            length = int(line.split(b":")[1])
    return head, await reader.readexactly(length)


@pytest.fixture
async def client() -> AsyncIterator[UpstreamClient]:
    client = UpstreamClient(
        Settings(
            connect_timeout_s=2, header_timeout_s=5, chunk_timeout_s=5, worker_api_key="sk-worker"
        )
    )
    yield client
    client.close()


def post(origin: Origin, path: str = "/", body: bytes = b"{}") -> UpstreamRequest:
    return UpstreamRequest("w", origin, b"POST", path, (), body)


async def exchange(client: UpstreamClient, origin: Origin, body: bytes = b"{}") -> bytes:
    response = await client.send_repeatable(post(origin, "/v1/x", body))
    try:
        return await response.read_all(1 << 20)
    finally:
        response.close()


async def test_a_request_arrives_as_it_was_given(client: UpstreamClient) -> None:
    seen: list[tuple[bytes, bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await read_request(reader))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        await writer.drain()

    async with scripted(handler) as server:
        assert await exchange(client, server.origin, b'{"a": 1}') == b"ok"
    (head, body) = seen[0]
    assert body == b'{"a": 1}'
    assert head.startswith(b"POST /v1/x HTTP/1.1\r\n")
    assert b"authorization: Bearer sk-worker\r\n" in head
    assert b"accept-encoding: identity\r\n" in head


async def test_a_kept_alive_connection_is_used_again(client: UpstreamClient) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"1\r\na\r\n1\r\nb\r\n0\r\n\r\n")
            await writer.drain()

    async with scripted(handler) as server:
        assert [await exchange(client, server.origin) for _ in range(3)] == [b"ab"] * 3
        assert server.num_connections == 1


async def test_a_stale_connection_is_replaced_once(client: UpstreamClient) -> None:
    closed = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")
        await writer.drain()
        # The next request is read and then dropped, as a worker does that just gave up idling.
        await reader.read(1)
        writer.transport.abort()
        closed.set()

    async with scripted(handler) as server:
        assert await exchange(client, server.origin) == b"x"
        assert await exchange(client, server.origin) == b"x"
        await closed.wait()
        assert server.num_connections == 2


async def test_a_stale_connection_is_told_to_who_must_not_repeat_a_request(
    client: UpstreamClient,
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")
        await writer.drain()
        await read_request(reader)

    async with scripted(handler) as server:
        assert await exchange(client, server.origin) == b"x"
        with pytest.raises(UpstreamStaleError):
            await client.send(post(server.origin))
        assert server.num_connections == 1


async def test_a_body_that_ends_with_its_connection_is_whole(client: UpstreamClient) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nto the end")
        await writer.drain()

    async with scripted(handler) as server:
        assert await exchange(client, server.origin) == b"to the end"
        assert await exchange(client, server.origin) == b"to the end"
        assert server.num_connections == 2


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nshort\r\n",
    ],
)
async def test_a_body_cut_short_is_incomplete(client: UpstreamClient, answer: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        await writer.drain()

    async with scripted(handler) as server:
        with pytest.raises(UpstreamIncompleteError):
            await exchange(client, server.origin)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200", b"220 smtp.example ESMTP\r\n\r\n"])
async def test_no_head_is_unreachable(client: UpstreamClient, answer: bytes) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(answer)
        await writer.drain()

    async with scripted(handler) as server:
        with pytest.raises(UpstreamUnreachableError):
            await exchange(client, server.origin)


async def test_a_refused_connection_is_unreachable(
    client: UpstreamClient, unused_tcp_port: int
) -> None:
    with pytest.raises(UpstreamUnreachableError):
        await exchange(client, Origin("127.0.0.1", unused_tcp_port, tls=False, base_path=""))


async def test_an_endless_head_is_refused(client: UpstreamClient) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n" + b"x-filler: y\r\n" * 20_000)
        await writer.drain()
        await reader.readexactly(1)

    async with scripted(handler) as server:
        with pytest.raises(UpstreamUnreachableError, match="head"):
            await exchange(client, server.origin)


async def test_a_body_over_the_limit_is_refused(client: UpstreamClient) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2000000\r\n\r\n" + b"x" * 2_000_000)
        await writer.drain()
        await reader.readexactly(1)

    async with scripted(handler) as server:
        with pytest.raises(UpstreamProtocolError):
            await exchange(client, server.origin)


async def test_silence_is_a_timeout() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await reader.readexactly(1)

    impatient = UpstreamClient(Settings(header_timeout_s=0.01))
    async with scripted(handler) as server:
        with pytest.raises(UpstreamTimeoutError):
            await impatient.send(post(server.origin))
        await server.client_left.wait()


async def test_a_response_closed_early_cuts_the_worker_off(client: UpstreamClient) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n")
        await writer.drain()
        await reader.readexactly(1)

    async with scripted(handler) as server:
        response = await client.send(post(server.origin))
        assert await response.read_chunk() == b"a"
        response.close()
        await server.client_left.wait()


async def test_a_cancelled_request_cuts_the_worker_off(client: UpstreamClient) -> None:
    arrived = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        arrived.set()
        await reader.readexactly(1)

    async with scripted(handler) as server:
        task = asyncio.create_task(exchange(client, server.origin))
        await arrived.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.client_left.wait()


async def test_a_slow_reader_stops_the_worker_from_sending(client: UpstreamClient) -> None:
    sent = 0
    stuck = asyncio.Event()

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000000000\r\n\r\n")
        try:
            while True:
                writer.write(b"x" * 65536)
                async with asyncio.timeout(0.2):
                    await writer.drain()
                sent += 65536
        except TimeoutError:
            stuck.set()

    async with scripted(handler) as server:
        response = await client.send(post(server.origin))
        await stuck.wait()
        response.close()
    assert sent < 64 * 1024 * 1024


async def test_an_interim_head_is_skipped(client: UpstreamClient) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(
            b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
            b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx"
        )
        await writer.drain()

    async with scripted(handler) as server:
        response = await client.send(post(server.origin))
        assert (response.status, response.header(b"link")) == (200, None)
        assert await response.read_all(10) == b"x"
        response.close()


async def test_what_trails_a_body_is_no_header(client: UpstreamClient) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"2;ext=1\r\nok\r\n0\r\ncontent-encoding: br\r\n\r\n")
        await writer.drain()

    async with scripted(handler) as server:
        response = await client.send(post(server.origin))
        assert await response.read_all(10) == b"ok"
        response.close()
    assert response.header(b"content-encoding") is None


async def test_a_switch_to_another_protocol_is_refused(
    client: UpstreamClient, caplog: pytest.LogCaptureFixture
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 101 X\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello")
        await writer.drain()
        await reader.read()

    async with scripted(handler) as server:
        with pytest.raises(UpstreamUnreachableError, match="protocol that nobody asked for"):
            await client.send(post(server.origin))
    assert not caplog.records


async def test_an_answer_nobody_asked_for_is_never_taken_for_the_next_one(
    client: UpstreamClient,
) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, _ = await read_request(reader)
        answer = b"one" if b"first" in head else b"two"
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\n%b" % answer
            + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        )
        await writer.drain()
        await reader.readexactly(1)

    async with scripted(handler) as server:
        for path, expected in (("/first", b"one"), ("/second", b"two")):
            response = await client.send(post(server.origin, path))
            assert await response.read_all(100) == expected
            response.close()
        assert server.num_connections == 2


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://h:8000", Origin("h", 8000, tls=False, base_path="")),
        ("http://h", Origin("h", 80, tls=False, base_path="")),
        ("https://h/base/", Origin("h", 443, tls=True, base_path="/base")),
        ("http://[::1]:9", Origin("::1", 9, tls=False, base_path="")),
    ],
)
def test_a_workers_url_is_read(url: str, origin: Origin) -> None:
    assert Origin.parse(url) == origin


@pytest.mark.parametrize(
    "url", ["", "h:8000", "ftp://h", "http://", "http://h:x", "http://u:p@h", "http://h?q=1"]
)
def test_what_is_no_workers_url_is_named(url: str) -> None:
    with pytest.raises(ConfigurationError, match="--worker"):
        Origin.parse(url)
