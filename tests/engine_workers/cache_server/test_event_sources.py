from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq.asyncio

from cache_router.cost import PrefillRate, Rates
from cache_router.types import TierId, Trust
from cache_router.worker_registry import EventEndpoint
from engine_workers.blocks.block_header import BlockHeader, Codec
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.namespace import Fingerprint, Namespace
from engine_workers.cache_server.event_sources import EventSources
from tests.cache_router.follower_bench import Bench, chain, running

NAMESPACE = Namespace(
    model="digest",
    revision="",
    weight_quantization="",
    dtype="float32",
    kv_dtype="auto",
    num_layers=1,
    kv_heads=1,
    head_size=1,
    block_size=2,
    layout="l",
    isa="",
    tp_size=1,
    tp_rank=0,
    hash_algorithm="sha256",
    hash_seed="",
)


def block(number: int, namespace: Namespace = NAMESPACE) -> BlockHeader:
    name = BlockName(namespace.fingerprint, b"h%d" % number)
    return BlockHeader(name, None, (number, number), (), None, Codec.RAW, 8, 0)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    context = zmq.asyncio.Context()
    yield Bench(context)
    context.destroy(linger=0)


@pytest.fixture
def sources(bench: Bench, tmp_path: Path) -> EventSources:
    def endpoints(fingerprint: Fingerprint) -> tuple[str, str]:
        name = fingerprint.hex()[:8]
        return f"ipc://{tmp_path}/{name}-e", f"ipc://{tmp_path}/{name}-r"

    return EventSources(bench.context, endpoints)


@pytest.fixture
async def tasks() -> AsyncIterator[asyncio.TaskGroup]:
    async with asyncio.TaskGroup() as tasks:
        yield tasks
        for task in asyncio.all_tasks():
            if task.get_name() == "kv-events":
                task.cancel()


def described(sources: EventSources) -> list[dict[str, object]]:
    rates = Rates(prefill=PrefillRate(0.1, 0.2, 0.3))
    listed: list[dict[str, object]] = json.loads(sources.describe(lambda _: rates))["sources"]
    return listed


async def test_a_served_models_blocks_are_told_and_others_are_not(
    bench: Bench, sources: EventSources, tasks: asyncio.TaskGroup
) -> None:
    other = msgspec.structs.replace(NAMESPACE, dtype="float16")
    sources.stored(block(9), TierId.RAM)
    sources.join(NAMESPACE, ["m", "alias"], 8, (), tasks)
    (source,) = described(sources)
    assert source["models"] == ["m", "alias"]
    assert source["rates"]["prefill"]["per_token_s"] == 0.2  # type: ignore[index]
    endpoint = EventEndpoint(str(source["endpoint"]), str(source["replay_endpoint"]))
    async with running(bench.follower(endpoint)):
        await bench.until(lambda: bench.trust() is Trust.EXACT)
        sources.stored(block(1, other), TierId.RAM)
        sources.stored(block(1), TierId.RAM)
        sources.stored(block(1), TierId.SSD)
        await bench.until(lambda: bench.held(1) == 1)
        assert bench.held(9) == 0
        sources.removed(block(1).name, TierId.RAM)
        sources.removed(block(1).name, TierId.RAM)
        sources.removed(replace(block(1)).name, TierId.SSD)
        await bench.until(lambda: bench.held(1) == 0)
        assert bench.index.spans(chain(1)) == []


async def test_only_the_first_rank_tells(sources: EventSources, tasks: asyncio.TaskGroup) -> None:
    sources.join(msgspec.structs.replace(NAMESPACE, tp_size=2, tp_rank=1), ["m"], 8, (), tasks)
    assert described(sources) == []


async def test_an_engine_that_comes_again_is_one_source(
    sources: EventSources, tasks: asyncio.TaskGroup
) -> None:
    sources.join(NAMESPACE, ["m"], 8, (), tasks)
    sources.join(NAMESPACE, ["renamed"], 8, (), tasks)
    (source,) = described(sources)
    assert source["models"] == ["renamed"]
