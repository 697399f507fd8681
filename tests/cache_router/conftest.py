from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import zmq.asyncio

from tests.cache_router.follower_bench import Bench


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    # Terminating waits for every socket, so one that was left open fails the test here.
    async with asyncio.timeout(10):
        await asyncio.to_thread(context.term)


@pytest.fixture
async def bench(context: zmq.asyncio.Context) -> Bench:
    return Bench(context)
