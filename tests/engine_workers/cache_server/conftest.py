from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import zmq.asyncio

from cache_router.settings import Settings
from engine_workers.blocks.namespace import Fingerprint
from engine_workers.cache_server.cache_metrics import CacheMetrics
from engine_workers.cache_server.cache_parts import CacheParts, build_parts
from engine_workers.cache_server.event_sources import EventSources
from engine_workers.cache_server.server import CacheServer
from engine_workers.cache_server.server_socket import listening_socket
from engine_workers.cache_wire import Refused
from engine_workers.tiers.tier import Tier
from tests.engine_workers.cache_server.wire_client import WireClient

SLOT_BYTES = 12_288
"""What a block of 10,000 bytes takes in the arena."""


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Running:
    """A server on this event loop."""

    path: Path
    parts: CacheParts
    server: CacheServer
    clients: list[WireClient]

    async def client(self, **how: Any) -> WireClient:
        client = await WireClient.connect(self.path, **how)
        assert isinstance(client, WireClient), client
        self.clients.append(client)
        return client

    async def refusal(self, **how: Any) -> str:
        answer = await WireClient.connect(self.path, **how)
        assert isinstance(answer, Refused)
        return answer.reason

    def count(self, name: str, **labels: str) -> float:
        return self.parts.metrics.registry.get_sample_value(name, labels) or 0.0


Serve = Callable[..., contextlib.AbstractAsyncContextManager[Running]]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A short path, as the kernel wants it."""
    with TemporaryDirectory(prefix="cache-") as folder:
        yield Path(folder)


@pytest.fixture
def serve(sockets: Path, clock: Clock) -> Serve:
    @contextlib.asynccontextmanager
    async def run(*tiers: Tier, num_slots: int = 1024, **changes: Any) -> AsyncIterator[Running]:
        settings = Settings(arena_bytes=num_slots * SLOT_BYTES, **changes)

        def endpoints(namespace: Fingerprint) -> tuple[str, str]:
            stem = f"ipc://{sockets}/{namespace.hex()[:8]}"
            return f"{stem}.e", f"{stem}.r"

        context = zmq.asyncio.Context()
        events = EventSources(context, endpoints)
        parts = build_parts(settings, tiers, CacheMetrics(), events, clock)
        server = CacheServer(parts, settings.write_ring_bytes, clock)
        path = sockets / "cache.sock"
        with listening_socket(path) as listener:
            running = Running(path, parts, server, [])
            task = asyncio.create_task(server.serve(listener))
            try:
                yield running
            finally:
                for client in running.clients:
                    client.close()
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
                parts.arena.close()
                parts.engines.close()
                context.destroy(linger=0)

    return run


@pytest.fixture
async def running(serve: Serve) -> AsyncIterator[Running]:
    async with serve() as running:
        yield running


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what another task does; the test's time limit ends it if it never happens."""
    while not condition():  # noqa: ASYNC110 - it has no event to wait for
        await asyncio.sleep(0.001)
