from __future__ import annotations

import asyncio

import pytest

from tests.gateway.conftest import running_gateway, until_ready
from tests.gateway.fake_worker import FakeWorker

CHAT = b"/v1/chat/completions"


@pytest.mark.parametrize(
    "beginning",
    [b"content-length: 10\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"],
)
async def test_a_body_that_stops_gives_its_place_back(worker: FakeWorker, beginning: bytes) -> None:
    async with running_gateway(worker.url, body_silence_s=0.3, max_inflight_per_worker=2) as client:
        await until_ready(client)
        port = client.base_url.port
        assert port is not None
        clients = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for _, writer in clients:
            writer.write(b"POST " + CHAT + b" HTTP/1.1\r\nhost: x\r\n" + beginning)
        for reader, writer in clients:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 408")
            assert b"connection: close" in head
            assert b'"request_timeout"' in await reader.read()
            writer.close()
        assert (await client.get("/health")).json()["in_flight"] == 0
