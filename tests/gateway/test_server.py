from __future__ import annotations

import asyncio
import socket

import pytest

from cache_router.errors import ConfigurationError
from cache_router.settings import Settings
from gateway.server import run_gateway

WORKER = "http://127.0.0.1:9"


@pytest.mark.parametrize("host", ["no such host", "a..b", "203.0.113.7", "ü" * 300])
async def test_a_host_that_cannot_be_listened_on_is_named(host: str) -> None:
    with pytest.raises(ConfigurationError, match="RADIXGATE_HOST"):
        await run_gateway(Settings(host=host, port=0), [WORKER])


async def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"RADIXGATE_PORT.*{port}"):
            await run_gateway(Settings(port=port), [WORKER])


async def test_it_needs_a_worker() -> None:
    with pytest.raises(ConfigurationError, match="--worker"):
        await run_gateway(Settings(port=0), [])


async def test_it_ends_when_it_is_told_to() -> None:
    listening, stop = asyncio.Event(), asyncio.Event()
    serving = asyncio.create_task(
        run_gateway(Settings(port=0), [WORKER], ready=listening.set, stop=stop)
    )
    await listening.wait()
    stop.set()
    await serving


def test_an_empty_variable_is_no_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RADIXGATE_PORT", "")
    assert Settings().port == 8080
