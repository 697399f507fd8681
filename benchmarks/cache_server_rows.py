"""A cache server without an engine: lookups, control bytes, and loads from its memory."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import httpx2
import numpy as np
from numpy.typing import NDArray

from benchmarks.testbed import BLOCK_SIZE
from benchmarks.tier_testbed import running_cache_server
from engine_workers.cache_wire import FromEngine, Refused, Staged
from engine_workers.connector.arena_reader import ArenaReader
from engine_workers.connector.block_layout import BlockLayout, LayerMemory
from engine_workers.connector.channel import ChannelEvent
from engine_workers.connector.plan import LoadJob, RankLoad
from engine_workers.connector.session import Session
from tests.engine_workers.cache_server.wire_client import WireClient, hashes

NUM_BLOCKS = 256
_NUM_LAYERS = 30
# SmolLM2's keys and values of one layer: two, KV heads, head size, bytes of a float32.
_LAYER_BLOCK_BYTES = 2 * 3 * 64 * 4 * BLOCK_SIZE
_BLOCK_BYTES = _NUM_LAYERS * _LAYER_BLOCK_BYTES
_ARENA_BYTES = 1024**3
_TIMEOUT_S = 60.0


class _Nobody:
    """A channel for a reader that has nothing to report."""

    def send(self, message: FromEngine) -> bool:
        raise RuntimeError(f"a block could not be loaded: {type(message).__name__}")

    def poll(self) -> list[ChannelEvent]:
        return []


async def measure(folder: Path, num_lookups: int, num_loads: int) -> dict[str, float]:
    """Start a server with RAM and SSD tier, fill it, and measure."""
    socket = folder / "rows.sock"
    ssd = {"RADIXGATE_SSD_FOLDER": str(folder / "rows-ssd")}
    async with (
        httpx2.AsyncClient() as http,
        running_cache_server(http, socket, "ram,ssd", _ARENA_BYTES, **ssd) as server,
    ):
        client = await WireClient.connect(socket, block_bytes=_BLOCK_BYTES)
        if isinstance(client, Refused):
            raise RuntimeError(client.reason)  # noqa: TRY004 - an answer, not a wrong type
        try:
            freed = await client.save(range(1, NUM_BLOCKS + 1))
            if freed.num_kept != NUM_BLOCKS:
                raise RuntimeError(f"the server kept only {freed.num_kept} blocks")
            await server.wait_saved("ssd", NUM_BLOCKS)
            return {
                **await _lookups(client, num_lookups),
                **await _loads(client, num_loads),
            }
        finally:
            client.close()


async def _lookups(client: WireClient, count: int) -> dict[str, float]:
    """Prefixes that RAM holds, and such as no tier does, so that each is asked."""
    hit_ms: list[float] = []
    miss_ms: list[float] = []
    before = client.num_sent_bytes + client.num_received_bytes
    for _ in range(count):
        staged, took_ms = await _timed(client, hashes(NUM_BLOCKS))
        if staged.num_blocks != NUM_BLOCKS:
            raise RuntimeError(f"only {staged.num_blocks} blocks were staged")
        await client.release(staged.lease)
        hit_ms.append(took_ms)
    control = (client.num_sent_bytes + client.num_received_bytes - before) / count
    for number in range(count):
        unknown = hashes(NUM_BLOCKS, (number + 2) * NUM_BLOCKS)
        _, took_ms = await _timed(client, unknown)
        miss_ms.append(took_ms)
    return {
        "lookup_blocks": NUM_BLOCKS,
        "lookup_hit_p50_ms": statistics.median(hit_ms),
        "lookup_hit_p99_ms": _p99(hit_ms),
        "lookup_miss_p50_ms": statistics.median(miss_ms),
        "lookup_miss_p99_ms": _p99(miss_ms),
        "control_bytes_per_request": control,
        "control_bytes_allowed": 4096 + 128 * NUM_BLOCKS,
    }


async def _timed(client: WireClient, block_hashes: list[bytes]) -> tuple[Staged, float]:
    began_s = time.perf_counter()
    staged = await client.look_up(block_hashes)
    return staged, 1000 * (time.perf_counter() - began_s)


def _p99(values: list[float]) -> float:
    return float(np.percentile(values, 99))


async def _loads(client: WireClient, count: int) -> dict[str, float]:
    """The connector's own load, checksums included, against copying as much with one memcpy."""
    staged = await client.look_up(hashes(NUM_BLOCKS))
    arena = np.frombuffer(client.arena or b"", np.uint8)
    session = Session(client.welcome.boot_token, arena, np.empty((0, 0), np.uint8))
    memory = np.ones((_NUM_LAYERS, NUM_BLOCKS, _LAYER_BLOCK_BYTES), np.uint8)
    layout = BlockLayout(
        tuple(
            LayerMemory(each.ctypes.data, each.strides[0], _LAYER_BLOCK_BYTES) for each in memory
        ),
        NUM_BLOCKS,
    )
    rank = RankLoad(session.boot_token, tuple(staged.offsets), tuple(staged.checksums))
    names = tuple(hashes(NUM_BLOCKS))
    reader = ArenaReader(_Nobody(), layout, 0)
    load_s: list[float] = []
    memcpy_s: list[float] = []
    source = np.ones(memory.size, np.uint8)
    target = np.ones(memory.size, np.uint8)
    try:
        # The first one only maps the pages.
        for number in range(count + 1):
            job = LoadJob(str(number), (rank,), tuple(range(NUM_BLOCKS)), names)
            load_s.append(await asyncio.to_thread(_load, reader, job, session))
            memcpy_s.append(_copy(source, target))
        del load_s[0], memcpy_s[0]
    finally:
        reader.close(_TIMEOUT_S)
        await client.release(staged.lease)
    load_gb_s = memory.size / statistics.median(load_s) / 1e9
    memcpy_gb_s = memory.size / statistics.median(memcpy_s) / 1e9
    return {
        "load_gb_per_s": load_gb_s,
        "memcpy_gb_per_s": memcpy_gb_s,
        "load_to_memcpy": load_gb_s / memcpy_gb_s,
    }


def _load(reader: ArenaReader, job: LoadJob, session: Session) -> float:
    began_s = time.perf_counter()
    reader.submit(job, session)
    while True:
        results = reader.take_results()
        if results.failed:
            raise RuntimeError("a load failed")
        if results.finished:
            return time.perf_counter() - began_s
        time.sleep(0.0005)


def _copy(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> float:
    began_s = time.perf_counter()
    np.copyto(target, source)
    return time.perf_counter() - began_s
