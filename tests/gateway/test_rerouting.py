from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tests.gateway.conftest import running_gateway, until_ready
from tests.gateway.fake_worker import COMPLETION, Seen, fake_worker, send

CHAT = "/v1/chat/completions"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields}


async def test_a_worker_that_dies_under_a_request_on_a_used_connection_is_replaced() -> None:
    async with fake_worker() as first, fake_worker() as second:
        workers = {first.url: first, second.url: second}

        async def answer(seen: Seen, writer: asyncio.StreamWriter) -> None:
            # Whoever gets the second request dies, and its port refuses from then on.
            if len(first.seen) + len(second.seen) == 2:
                owner = first if seen in first.seen else second
                owner.die()
                return
            await send(writer, 200, COMPLETION)

        first.answer = second.answer = answer
        async with running_gateway(first.url, second.url, worker_poll_s=60) as client:
            await until_ready(client)
            # The long prompt keeps the session on the first request's worker.
            long = body(messages=[{"role": "user", "content": "hello " * 200}])
            before = await client.post(CHAT, json=long)
            after = await client.post(CHAT, json=long)
        assert (before.status_code, after.status_code) == (200, 200)
        dead, alive = (
            before.headers["x-radixgate-worker"],
            after.headers["x-radixgate-worker"],
        )
        assert dead != alive
        assert [len(workers[url].seen) for url in (dead, alive)] == [2, 1]


async def test_a_worker_whose_host_is_gone_is_replaced() -> None:
    async with fake_worker() as first, fake_worker() as second:
        async with running_gateway(
            first.url, second.url, worker_poll_s=60, connect_timeout_s=0.2
        ) as client:
            await until_ready(client)
            first.die()
            port = int(first.url.rpartition(":")[2])
            with closed_door(port):
                for _ in range(4):
                    response = await client.post(CHAT, json=body())
                    assert response.status_code == 200
        assert len(second.seen) == 4


async def test_a_dead_workers_tokenizing_goes_to_another_one() -> None:
    async with fake_worker() as first, fake_worker() as second:
        async with running_gateway(first.url, second.url, worker_poll_s=60) as client:
            await until_ready(client)
            first.die()
            for _ in range(4):
                response = await client.post("/tokenize", json={"model": "m", "prompt": "Hi"})
                assert response.status_code == 200
        assert len(second.tokenized) == 4


@contextmanager
def closed_door(port: int) -> Iterator[None]:
    """Let connections to a port neither open nor fail, as a host without power does."""
    with socket.socket() as listener, contextlib.ExitStack() as waiting:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", port))
        listener.listen(0)
        # Fill the queue that nobody takes connections from.
        for _ in range(8):
            connecting = waiting.enter_context(socket.socket())
            connecting.setblocking(False)
            connecting.connect_ex(("127.0.0.1", port))
        yield
