from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx2
import pytest
import uvloop

from cache_router.settings import Settings
from gateway.server import run_gateway
from tests.gateway.fake_worker import FakeWorker, fake_worker


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    # What runs in production: its transports are not asyncio's own classes.
    return {"uvloop": uvloop.new_event_loop}


@asynccontextmanager
async def running_gateway(*workers: str, **settings: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Serve on a free port, in this event loop, and hand out a client of it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = {
        "worker_poll_s": 0.02,
        "shutdown_grace_s": 0,
        "route_headers": True,
        "parity_sample_share": 0,
        **settings,
    }
    listening, stop = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(
        run_gateway(
            Settings(host="127.0.0.1", port=port, **options),
            workers,
            ready=listening.set,
            stop=stop,
        )
    )
    try:
        await asyncio.wait(
            {serving, asyncio.ensure_future(listening.wait())},
            return_when=asyncio.FIRST_COMPLETED,
        )
        if serving.done():
            serving.result()
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            yield client
    finally:
        stop.set()
        await serving


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Ask again until it is so; the test's own time limit is the deadline."""
    while not await condition():  # noqa: ASYNC110  # over HTTP there is no event to wait for
        await asyncio.sleep(0.01)


async def until_ready(client: httpx2.AsyncClient) -> None:
    async def is_ready() -> bool:
        return (await client.get("/ready")).status_code == 200

    await until(is_ready)


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    async with fake_worker() as worker:
        yield worker


@pytest.fixture
async def gateway(worker: FakeWorker) -> AsyncIterator[httpx2.AsyncClient]:
    async with running_gateway(worker.url) as client:
        await until_ready(client)
        yield client
