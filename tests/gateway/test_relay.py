from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx2
import pytest

from tests.gateway.fake_worker import (
    COMPLETION,
    DONE,
    FakeWorker,
    Seen,
    delta,
    end_stream,
    event,
    send,
    send_piece,
    start_stream,
)

CHAT = "/v1/chat/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}


@pytest.mark.parametrize("status", [201, 204, 205, 301, 304, 307, 600, 999])
async def test_a_status_that_is_no_answer_is_a_502(
    gateway: httpx2.AsyncClient, worker: FakeWorker, status: int
) -> None:
    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        if status in (204, 304):
            writer.write(b"HTTP/1.1 %d X\r\n\r\n" % status)
        else:
            await send(writer, status, b"", extra="location: /elsewhere\r\n")

    worker.answer = answer
    response = await gateway.post(CHAT, json=body())
    assert response.status_code == 502
    assert response.json()["error"]["code"] == "upstream_protocol"


@pytest.mark.parametrize("after", ["reset", "silence", "trickle", "garbage"])
async def test_nothing_spoils_an_answer_that_has_said_it_is_done(
    gateway: httpx2.AsyncClient, worker: FakeWorker, after: str
) -> None:
    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        await start_stream(writer)
        await send_piece(writer, delta("Hi", "stop") + DONE)
        if after == "garbage":
            await send_piece(writer, b"data: {")
            await end_stream(writer)
        while after == "trickle":
            await send_piece(writer, b": still here\n\n")
            await asyncio.sleep(0.05)
        if after == "silence":
            await asyncio.sleep(60)
        writer.transport.abort()

    worker.answer = answer
    async with asyncio.timeout(10):
        response = await gateway.post(CHAT, json=body(stream=True))
    assert response.content == delta("Hi", "stop") + DONE


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "usage",
    [
        {"prompt_tokens": -1, "completion_tokens": 2},
        {"prompt_tokens": 1, "completion_tokens": -2},
        {"prompt_tokens": 1, "prompt_tokens_details": {"cached_tokens": -1}},
        {"completion_tokens": 2},
    ],
)
async def test_a_usage_that_cannot_be_counted_is_passed_on_and_not_counted(
    gateway: httpx2.AsyncClient, worker: FakeWorker, usage: dict[str, Any], *, stream: bool
) -> None:
    whole = json.dumps({**json.loads(COMPLETION), "usage": usage}).encode()

    async def answer(_: Seen, writer: asyncio.StreamWriter) -> None:
        if not stream:
            await send(writer, 200, whole)
            return
        await start_stream(writer)
        await send_piece(writer, delta("Hi", "stop") + event(choices=[], usage=usage) + DONE)
        await end_stream(writer)

    worker.answer = answer
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    response = await gateway.post(CHAT, json=body(**options))
    assert response.status_code == 200
    assert json.dumps(usage).encode() in response.content
    assert "radixgate_prompt_tokens_total{" not in (await gateway.get("/metrics")).text
