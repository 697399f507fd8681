"""A cache server for one benchmark row, and one streamed completion beside it."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from engine_workers.ports import any_free_ports

_PATIENCE_S = 120.0
_POLL_S = 0.1
_NUM_WARM_UP_TOKENS = 100


@dataclass(frozen=True, slots=True)
class Completion:
    """One answer to a prompt of token ids."""

    ttft_s: float
    decode_s: float
    """From the first token to the last."""
    cached_tokens: int
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine, asked directly."""

    client: httpx2.AsyncClient
    url: str
    model: str

    async def complete(self, prompt: Sequence[int], max_tokens: int = 1) -> Completion:
        """Stream one completion, greedily and to its full length."""
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        began_s = time.perf_counter()
        first_s = last_s = 0.0
        token_ids: list[int] = []
        usage: dict[str, Any] = {}
        async with self.client.stream("POST", f"{self.url}/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread())[:500]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    last_s = time.perf_counter()
                    first_s = first_s or last_s
                    token_ids += choice.get("token_ids") or []
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Completion(first_s - began_s, last_s - first_s, cached, token_ids)

    async def forget(self) -> None:
        """Empty its own cache."""
        (await self.client.post(f"{self.url}/reset_prefix_cache")).raise_for_status()

    async def wait_connected(self) -> None:
        """Wait until it saves to the cache server and loads from it."""
        prompt = fresh_prompt(_NUM_WARM_UP_TOKENS)
        async with asyncio.timeout(_PATIENCE_S):
            while not (await self.complete(prompt)).cached_tokens:
                await self.forget()
                await asyncio.sleep(_POLL_S)
        await self.forget()


def fresh_prompt(num_tokens: int) -> list[int]:
    """Token ids that nobody has computed before."""
    return [random.randrange(100, 40_000) for _ in range(num_tokens)]


@dataclass(frozen=True, slots=True)
class CacheServer:
    """A running `radixgate cache-server`."""

    pid: int
    port: int
    client: httpx2.AsyncClient

    async def wait_saved(self, tier: str, num_blocks: int) -> None:
        """Wait until a tier has taken so many blocks since the server's start."""
        async with asyncio.timeout(_PATIENCE_S):
            # Only its metrics tell: there is no event to await.
            while await self._num_saved(tier) < num_blocks:  # noqa: ASYNC110 - see above
                await asyncio.sleep(_POLL_S)

    def pin(self, core: int) -> None:
        """Let all of its threads compute on one core only."""
        for task in Path(f"/proc/{self.pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})

    async def _num_saved(self, tier: str) -> float:
        page = (await self.client.get(f"http://127.0.0.1:{self.port}/metrics")).text
        total = 0.0
        for labels, value in re.findall(
            r"^radixgate_cache_operations_total\{(.*)\} (\S+)$", page, re.M
        ):
            if all(part in labels for part in (f'tier="{tier}"', 'operation="save"', '"ok"')):
                total += float(value)
        return total


@asynccontextmanager
async def running_cache_server(
    client: httpx2.AsyncClient, socket: Path, tiers: str, arena_bytes: int, **settings: str
) -> AsyncIterator[CacheServer]:
    """Start it as users do; at the end it writes what it still has to the tiers."""
    (port,) = any_free_ports(1)
    environment = {
        **os.environ,
        "RADIXGATE_TIERS": tiers,
        "RADIXGATE_CACHE_SOCKET": str(socket),
        "RADIXGATE_ARENA_BYTES": str(arena_bytes),
        "RADIXGATE_CACHE_SERVER_METRICS_PORT": str(port),
        **settings,
    }
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "radixgate", "cache-server"),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_PATIENCE_S):
            if not await process.stdout.readline():
                raise RuntimeError("the cache server did not start; see its message above")
        yield CacheServer(process.pid, port, client)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


def drop_page_cache(folder: Path) -> None:
    """Take a folder's files out of memory, so that they are read from the device."""
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        try:
            # What is not on the device yet cannot be dropped.
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
