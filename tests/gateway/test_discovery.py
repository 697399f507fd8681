"""Workers found, lost and found again, with their events followed, seen from a gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx2
import pytest
import zmq.asyncio

from tests.cache_router.event_publisher import EventPublisher, stored
from tests.gateway.conftest import running_gateway, until, until_ready
from tests.gateway.fake_worker import FakeWorker, fake_worker

# Blocks of two tokens; the last token of a prompt is computed in any case.
PROMPT = [1, 1, 2, 2, 3, 3, 9]


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


def sources(*publishers: EventPublisher) -> dict[str, Any]:
    return {
        str(rank): {
            "endpoint": publisher.endpoint,
            "replay_endpoint": publisher.replay_endpoint,
            "topic": "",
        }
        for rank, publisher in enumerate(publishers)
    }


def publisher(context: zmq.asyncio.Context, folder: Any, number: int = 0) -> EventPublisher:
    return EventPublisher(context, f"ipc://{folder}/e{number}", f"ipc://{folder}/r{number}")


async def workers_of(client: httpx2.AsyncClient) -> dict[str, Any]:
    health = (await client.get("/health")).json()
    return {worker["id"]: worker for worker in health["workers"]}


async def until_indexed(client: httpx2.AsyncClient, worker_id: str, num_blocks: int) -> None:
    async def is_so() -> bool:
        worker = (await workers_of(client)).get(worker_id)
        return worker is not None and worker["indexed_blocks"] == num_blocks

    await until(is_so)


async def ask(client: httpx2.AsyncClient) -> httpx2.Response:
    return await client.post("/v1/completions", json={"model": "m", "prompt": PROMPT})


async def test_events_are_found_and_decide_the_route(
    context: zmq.asyncio.Context, tmp_path: Any
) -> None:
    async with (
        publisher(context, tmp_path) as events,
        fake_worker() as other,
        fake_worker(event_sources=sources(events)) as holder,
        running_gateway(other.url, holder.url) as client,
    ):
        events.buffer(stored(1, 2, 3))
        await until_indexed(client, holder.url, 3)
        response = await ask(client)
        assert response.headers["x-radixgate-worker"] == holder.url
        assert response.headers["x-radixgate-route"] == "prefix"
        assert response.headers["x-radixgate-predicted-cached-tokens"] == "6"
        workers = await workers_of(client)
        assert workers[holder.url]["trust"] == "exact"
        assert workers[holder.url]["block_size"] == 2
        assert workers[other.url]["trust"] == "load-only"
        assert "kv_event_sources" in workers[other.url]["trust_reason"]


async def test_each_data_parallel_rank_is_a_worker_of_its_own(
    context: zmq.asyncio.Context, tmp_path: Any
) -> None:
    async with (
        publisher(context, tmp_path, 0) as first,
        publisher(context, tmp_path, 1) as second,
        fake_worker(event_sources=sources(first, second)) as worker,
        running_gateway(worker.url) as client,
    ):
        second.buffer(stored(1, 2))
        await until_indexed(client, f"{worker.url}#dp1", 2)
        response = await ask(client)
        assert response.headers["x-radixgate-worker"] == f"{worker.url}#dp1"
        assert worker.seen[-1].headers["x-data-parallel-rank"] == "1"
        assert set(await workers_of(client)) == {f"{worker.url}#dp0", f"{worker.url}#dp1"}
        # One rank less, as after a change of its flags.
        worker.event_sources = sources(first)

        async def is_alone() -> bool:
            return set(await workers_of(client)) == {worker.url}

        await until(is_alone)
        assert (await ask(client)).status_code == 200
        assert "x-data-parallel-rank" not in worker.seen[-1].headers


async def test_another_process_at_the_address_holds_nothing(
    context: zmq.asyncio.Context, tmp_path: Any
) -> None:
    async with (
        publisher(context, tmp_path) as events,
        fake_worker(event_sources=sources(events)) as worker,
        running_gateway(worker.url) as client,
    ):
        events.buffer(stored(1, 2, 3))
        await until_indexed(client, worker.url, 3)
        # Its events have not come, its start time has: what it holds is unknown from then on.
        events.answers_replay.clear()
        worker.start_time_s += 1
        await until_indexed(client, worker.url, 0)
        assert (await workers_of(client))[worker.url]["trust"] == "load-only"
        events.answers_replay.set()
        await until_indexed(client, worker.url, 3)


async def test_given_events_and_models_are_not_asked_for(
    context: zmq.asyncio.Context, tmp_path: Any
) -> None:
    async with publisher(context, tmp_path) as events, fake_worker(model="other") as worker:
        given = f"{worker.url},model=m,max-model-len=7,events={events.endpoint}"
        given += f",replay={events.replay_endpoint}"
        async with running_gateway(given) as client:
            events.buffer(stored(1, 2))
            await until_indexed(client, worker.url, 2)
            (model,) = (await client.get("/v1/models")).json()["data"]
            assert (model["id"], model["max_model_len"]) == ("m", 7)
            # Seven tokens leave no room for an answer in seven.
            refused = await ask(client)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "context_length_exceeded"


async def test_an_unhealthy_worker_gets_nothing_until_it_is_well(worker: FakeWorker) -> None:
    async with running_gateway(worker.url) as client:
        await until_ready(client)
        worker.healthy = False

        async def is_out() -> bool:
            return (await client.get("/ready")).status_code == 503

        await until(is_out)
        health = (await client.get("/health")).json()
        assert "503" in health["unusable_workers"][worker.url]
        assert (await ask(client)).status_code == 503
        worker.healthy = True
        await until_ready(client)
        assert (await ask(client)).status_code == 200


async def test_one_failed_look_is_not_a_lost_worker(worker: FakeWorker) -> None:
    async with running_gateway(worker.url, worker_poll_s=60) as client:
        await until_ready(client)
        worker.healthy = False
        assert (await ask(client)).status_code == 200
        assert (await client.get("/ready")).status_code == 200


async def test_prompts_go_to_workers_that_can_hold_them() -> None:
    async with (
        fake_worker(max_model_len=5) as small,
        fake_worker(max_model_len=50) as large,
        running_gateway(small.url, large.url) as client,
    ):
        await until_ready(client)
        for _ in range(5):
            response = await ask(client)
            assert response.headers["x-radixgate-worker"] == large.url
        assert small.seen == []


async def test_a_worker_whose_model_lies_nowhere_is_served_all_the_same() -> None:
    async with fake_worker(root="x" * 5000) as odd, running_gateway(odd.url) as client:
        await until_ready(client)
        assert (await ask(client)).status_code == 200
