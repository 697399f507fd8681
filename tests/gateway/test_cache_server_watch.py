"""A cache server's blocks seen from a gateway, over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
import zmq.asyncio

from tests.cache_router.event_publisher import EventPublisher, stored
from tests.gateway.conftest import running_gateway, until, until_ready
from tests.gateway.fake_worker import fake_worker

PROMPT = [1, 1, 2, 2, 3, 3, 9]


class FakeCacheServer:
    """Says where its events are, as long as it is up."""

    def __init__(self, sources: list[dict[str, Any]]) -> None:
        self._body = json.dumps({"sources": sources}).encode()

    async def start(self, port: int = 0) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def die(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"GET /kv_event_sources ")
        writer.write(
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b"
            % (len(self._body), self._body)
        )
        writer.close()


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


def in_ram(event: dict[str, Any]) -> dict[str, Any]:
    return {**event, "medium": "CPU"}


async def cached_by_worker(client: httpx2.AsyncClient) -> dict[str, dict[str, int]]:
    body = {"model": "m", "prompt": PROMPT}
    receipt = (await client.post("/v1/route/explain", json=body)).json()
    return {each["worker"]: each["tokens_by_tier"] for each in receipt["candidates"]}


async def test_blocks_of_a_nodes_cache_server_count_for_its_worker_while_it_lives(
    context: zmq.asyncio.Context, tmp_path: Path
) -> None:
    events = EventPublisher(context, f"ipc://{tmp_path}/e", f"ipc://{tmp_path}/r")
    async with events, fake_worker() as near, fake_worker() as far:
        source = {
            "models": ["m"],
            "block_bytes": 1000,
            "endpoint": events.endpoint,
            "replay_endpoint": events.replay_endpoint,
            "rates": {"prefill": {"fixed_s": 0, "per_token_s": 1, "per_pair_s": 0}},
        }
        server = FakeCacheServer([source])
        cache_url = await server.start()
        events.buffer(in_ram(stored(1, 2, 3)))
        async with running_gateway(f"{near.url},cache={cache_url}", far.url) as client:
            await until_ready(client)

            async def is_known() -> bool:
                return (await cached_by_worker(client)).get(near.url) == {"ram": 6}

            await until(is_known)
            assert (await cached_by_worker(client))[far.url] == {}
            health = (await client.get("/health")).json()
            assert health["cache_servers"][0]["trust"] == "exact"
            assert health["cache_servers"][0]["indexed_blocks"] == 3
            sent = await client.post("/v1/completions", json={"model": "m", "prompt": PROMPT})
            assert sent.headers["x-radixgate-worker"] == near.url
            assert sent.headers["x-radixgate-route"] == "tier"

            server.die()

            async def is_forgotten() -> bool:
                health = (await client.get("/health")).json()
                return bool(health["unusable_cache_servers"]) and not health["cache_servers"]

            await until(is_forgotten)
            assert (await client.get("/ready")).status_code == 200


async def test_a_cache_server_that_is_not_there_is_no_error_for_anyone(
    unused_tcp_port: int,
) -> None:
    async with (
        fake_worker() as worker,
        running_gateway(f"{worker.url},cache=http://127.0.0.1:{unused_tcp_port}") as client,
    ):
        await until_ready(client)
        sent = await client.post("/v1/completions", json={"model": "m", "prompt": PROMPT})
        assert sent.status_code == 200
