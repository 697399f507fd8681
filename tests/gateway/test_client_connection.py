from __future__ import annotations

import asyncio
import json

import httpx2
import pytest

from tests.gateway.fake_worker import (
    FakeWorker,
    Seen,
    delta,
    send_piece,
    start_stream,
)


async def answer_to(gateway: httpx2.AsyncClient, *pieces: bytes) -> bytes:
    """All that comes back for bytes that are sent piece by piece."""
    port = gateway.base_url.port
    assert port is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.05)
        return await reader.read()
    except ConnectionError:
        return b"reset"
    finally:
        writer.close()


def refusal(answer: bytes, status: int) -> str:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    for header in (b"x-request-id: req-", b"content-type: application/json", b"connection: close"):
        assert header in head
    return str(json.loads(body)["error"]["code"])


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /v1/\xff HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nx: a\x01\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_refused_in_openais_shape(
    gateway: httpx2.AsyncClient, request_bytes: bytes
) -> None:
    assert refusal(await answer_to(gateway, request_bytes), 400) == "invalid_request"


@pytest.mark.parametrize(
    "piece", [b"a" * 60_000, b"\r\nx: a" * 10_000], ids=["one header", "many headers"]
)
async def test_a_head_that_does_not_end_is_refused(
    gateway: httpx2.AsyncClient, piece: bytes
) -> None:
    answer = await answer_to(gateway, b"GET /health HTTP/1.1\r\nx: ", piece, piece)
    assert refusal(answer, 431) == "head_too_large"


async def test_a_long_head_and_a_longer_body_are_taken(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    response = await gateway.post(
        "/v1/chat/completions",
        json={"model": "m", "messages": [], "user": "a" * 1_000_000},
        headers={"x-long": "a" * 50_000},
    )
    assert response.status_code == 200


async def test_garbage_behind_a_request_does_not_get_into_its_answer(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    async def begin(_: Seen, writer: asyncio.StreamWriter) -> None:
        await start_stream(writer)
        await send_piece(writer, delta("He"))
        await asyncio.sleep(60)

    worker.answer = begin
    body = json.dumps({"model": "m", "messages": [], "stream": True}).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n"
    answer = await answer_to(gateway, head % len(body) + body, b"\0garbage\r\n\r\n")
    assert answer.endswith(delta("He") + b"\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    await worker.client_left.wait()
