from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cache_router.errors import UpstreamError, UpstreamTimeoutError
from cache_router.settings import Settings
from gateway.upstream_client import UpstreamClient
from gateway.worker_probe import WorkerProbe, is_bound, reachable
from tests.gateway.fake_worker import FakeWorker


@pytest.fixture
async def probe(worker: FakeWorker) -> AsyncIterator[WorkerProbe]:
    client = UpstreamClient(Settings())
    yield WorkerProbe(client, worker.url, 2.0)
    client.close()


def source(endpoint: str, **fields: Any) -> dict[str, Any]:
    return {"endpoint": endpoint, "publisher": "zmq", "replay_endpoint": None, **fields}


async def test_an_unhealthy_server_is_told_apart(probe: WorkerProbe, worker: FakeWorker) -> None:
    await probe.check_health()
    worker.healthy = False
    with pytest.raises(UpstreamError, match="503"):
        await probe.check_health()


async def test_models_and_start_time_are_read(probe: WorkerProbe, worker: FakeWorker) -> None:
    (model,) = await probe.models()
    assert (model.name, model.max_model_len, model.parent) == ("m", 4096, None)
    worker.start_time_s = 1.75e9
    assert await probe.process_start_s() == 1.75e9
    worker.start_time_s = float("nan")
    assert await probe.process_start_s() is None


async def test_wildcards_become_the_workers_host(probe: WorkerProbe, worker: FakeWorker) -> None:
    worker.event_sources = {
        "0": source("tcp://*:5557", replay_endpoint="tcp://*:5558", topic="kv"),
        "1": source("tcp://*:5559"),
    }
    found = await probe.event_sources()
    assert found.problem is None
    assert found.by_rank[0].endpoint == "tcp://127.0.0.1:5557"
    assert found.by_rank[0].replay_endpoint == "tcp://127.0.0.1:5558"
    assert found.by_rank[0].topic == "kv"
    assert found.by_rank[1].endpoint == "tcp://127.0.0.1:5559"


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        (None, "no /kv_event_sources"),
        ({}, "publishes no KV events"),
        ({"0": source("tcp://127.0.0.1:5557")}, "connects"),
        ({"0": source("tcp://*:5557", enable_kv_cache_events=False)}, "publishes no KV events"),
        ({"zero": source("tcp://*:5557")}, "no sources"),
        ({"0": "nonsense"}, "no sources"),
    ],
)
async def test_why_no_events_can_be_followed_is_told(
    probe: WorkerProbe, worker: FakeWorker, sources: dict[str, Any] | None, problem: str
) -> None:
    worker.event_sources = sources
    found = await probe.event_sources()
    assert found.by_rank == {}
    assert found.problem is not None
    assert problem in found.problem


async def test_an_answer_that_trickles_is_given_up() -> None:
    async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while True:
                writer.write(b" ")
                await writer.drain()
                await asyncio.sleep(0.01)
        writer.close()
        gone.set()

    gone = asyncio.Event()
    client = UpstreamClient(Settings())
    async with await asyncio.start_server(trickle, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        probe = WorkerProbe(client, f"http://127.0.0.1:{port}", 0.1)
        with pytest.raises(UpstreamTimeoutError, match=r"did not answer /health in 0.1 s"):
            await probe.check_health()
        await gone.wait()
    client.close()


@pytest.mark.parametrize(
    ("endpoint", "bound"),
    [
        ("tcp://*:5557", True),
        ("tcp://[::]:5557", True),
        ("ipc:///run/kv.sock", True),
        ("tcp://10.0.0.3:5557", True),
        ("tcp://127.0.0.1:5557", False),
        ("tcp://localhost:5557", False),
        ("tcp://0.0.0.0:5557", False),
        ("inproc://kv", False),
    ],
)
def test_where_vllm_listens_and_where_it_connects(endpoint: str, bound: bool) -> None:
    assert is_bound(endpoint) is bound


@pytest.mark.parametrize(
    ("endpoint", "url", "expected"),
    [
        ("tcp://*:1", "http://h:8000", "tcp://h:1"),
        ("tcp://[::]:1", "http://h:8000", "tcp://h:1"),
        ("tcp://*:1", "http://[::1]:8000", "tcp://[::1]:1"),
        ("tcp://10.0.0.3:1", "http://h:8000", "tcp://10.0.0.3:1"),
        ("ipc:///a", "http://h:8000", "ipc:///a"),
    ],
)
def test_an_endpoint_is_made_reachable(endpoint: str, url: str, expected: str) -> None:
    assert reachable(endpoint, url) == expected
