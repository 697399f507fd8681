"""`make bench-tiers`: TTFT of a long prefix from each tier, and what tiers cost when empty."""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import cache_server_rows
from benchmarks.results import write_result
from benchmarks.testbed import BLOCK_SIZE, running_engines
from benchmarks.tier_testbed import (
    CacheServer,
    Engine,
    drop_page_cache,
    fresh_prompt,
    running_cache_server,
)
from engine_workers.hardware import usable_cores
from tests.engine_workers.tiers.s3_server import BUCKET, CREDENTIALS, S3Server
from tests.engine_workers.tiers.valkey_server import ValkeyServer

_PROMPT_TOKENS = 3_990
_SHORT_PROMPT_TOKENS = 500
_DECODED_TOKENS = 32
_FULL_BLOCKS = (_PROMPT_TOKENS - 1) // BLOCK_SIZE
_ENGINE_BLOCKS = 400
_ARENA_BYTES = 2 * 1024**3
_Z_95 = 1.96
# An engine's first prompts of a length take up to three times as long as later ones.
_WARM_UP_PAIRS = 4


async def run(num_repeats: int, num_pairs: int) -> None:
    """Measure, print, write."""
    with tempfile.TemporaryDirectory(prefix="bench-tiers-") as name:
        folder = Path(name)
        async with httpx2.AsyncClient(timeout=300) as client:
            rows: dict[str, Any] = await _ttft_by_tier(client, folder, num_repeats)
            rows |= await _empty_cache_overhead(client, folder, num_pairs)
        rows |= await cache_server_rows.measure(folder, 100 * num_repeats, num_repeats)
    print()
    for key, value in rows.items():
        if isinstance(value, float):
            print(f"{key:44} {value:12.4f}")
        elif isinstance(value, int):
            print(f"{key:44} {value:12d}")
    file = write_result("tiers", rows)
    print(f"written: {file.relative_to(file.parents[2])}")


@asynccontextmanager
async def _engine(
    client: httpx2.AsyncClient, socket: Path | None, cores: Sequence[int] | None = None
) -> AsyncIterator[Engine]:
    async with running_engines(1, _ENGINE_BLOCKS, cache_socket=socket, cores=cores) as (
        model,
        urls,
    ):
        engine = Engine(client, urls[0], model)
        await engine.complete(fresh_prompt(_SHORT_PROMPT_TOKENS))
        await engine.forget()
        yield engine


async def _ttft_by_tier(
    client: httpx2.AsyncClient, folder: Path, num_repeats: int
) -> dict[str, Any]:
    socket = folder / "cache.sock"
    ssd = folder / "ssd"
    prompts = [fresh_prompt(_PROMPT_TOKENS) for _ in range(num_repeats)]
    samples: dict[str, list[float]] = {"cold": [], "ram": []}
    async with AsyncExitStack() as stack:
        in_memory = await stack.enter_async_context(AsyncExitStack())
        await in_memory.enter_async_context(
            running_cache_server(client, socket, "ram", _ARENA_BYTES)
        )
        async with _engine(client, socket) as engine:
            await engine.wait_connected()
            for prompt in prompts:
                samples["cold"].append(await _ttft(engine, prompt, 0))
            for prompt in prompts:
                await engine.forget()
                samples["ram"].append(await _ttft(engine, prompt, _FULL_BLOCKS))
        # The same prefixes once more, for an engine that was really started anew.
        async with _engine(client, socket) as engine:
            await engine.wait_connected()
            samples["ram_after_restart"] = [
                await _ttft(engine, prompt, _FULL_BLOCKS) for prompt in prompts
            ]
            await in_memory.aclose()
            valkey, s3 = ValkeyServer(), S3Server()
            stack.callback(valkey.stop)
            stack.callback(s3.stop)
            settings: dict[str, Mapping[str, str]] = {
                "ssd": {"RADIXGATE_SSD_FOLDER": str(ssd)},
                "redis": {"RADIXGATE_REDIS_URL": valkey.url},
                "s3": {
                    "RADIXGATE_S3_BUCKET": BUCKET,
                    "RADIXGATE_S3_ENDPOINT": s3.endpoint,
                    "RADIXGATE_S3_ACCESS_KEY_ID": CREDENTIALS.access_key_id,
                    "RADIXGATE_S3_SECRET_ACCESS_KEY": CREDENTIALS.secret_access_key,
                },
            }
            for tier, variables in settings.items():
                samples[tier] = await _from_tier(
                    engine, socket, tier, variables, prompts[0], num_repeats, ssd
                )
    cold_s = statistics.median(samples["cold"])
    rows: dict[str, Any] = {"prompt_tokens": _PROMPT_TOKENS, "ttft_samples_s": samples}
    for tier, values in samples.items():
        rows[f"ttft_{tier}_s"] = statistics.median(values)
        rows[f"ttft_{tier}_to_cold"] = statistics.median(values) / cold_s
    return rows


async def _from_tier(
    engine: Engine,
    socket: Path,
    tier: str,
    variables: Mapping[str, str],
    prompt: Sequence[int],
    num_repeats: int,
    ssd: Path,
) -> list[float]:
    """Store a prompt's blocks there, then load them into an empty engine and an empty arena."""

    def server() -> AbstractAsyncContextManager[CacheServer]:
        return running_cache_server(engine.client, socket, f"ram,{tier}", _ARENA_BYTES, **variables)

    async with server() as first:
        await engine.wait_connected()
        await engine.complete(prompt)
        await first.wait_saved(tier, _FULL_BLOCKS)
    values: list[float] = []
    for _ in range(num_repeats):
        async with server():
            await engine.wait_connected()
            if tier == "ssd":
                drop_page_cache(ssd)
            values.append(await _ttft(engine, prompt, _FULL_BLOCKS))
            await engine.forget()
    return values


async def _ttft(engine: Engine, prompt: Sequence[int], cached_blocks: int) -> float:
    answer = await engine.complete(prompt)
    if answer.cached_tokens != cached_blocks * BLOCK_SIZE:
        # Measured all the same: a tier that is not used at all shows as a TTFT like the cold one.
        print(f"{answer.cached_tokens} tokens were cached, not {cached_blocks * BLOCK_SIZE}")
    return answer.ttft_s


async def _empty_cache_overhead(
    client: httpx2.AsyncClient, folder: Path, num_pairs: int
) -> dict[str, Any]:
    """Prompts that never repeat, alternately to an engine with tiers and to plain vLLM.

    Both engines compute on the first core; the cache server stores what it gets on the last.
    """
    socket = folder / "empty.sock"
    ssd = {"RADIXGATE_SSD_FOLDER": str(folder / "empty-ssd")}
    cores = usable_cores()
    ttft: list[float] = []
    decode: list[float] = []
    async with (
        running_cache_server(client, socket, "ram,ssd", _ARENA_BYTES, **ssd) as server,
        _engine(client, socket, cores[:1]) as tiered,
        _engine(client, None, cores[:1]) as plain,
    ):
        server.pin(cores[-1])
        await tiered.wait_connected()
        for number in range(_WARM_UP_PAIRS + num_pairs):
            order = (tiered, plain) if number % 2 else (plain, tiered)
            answers = {
                engine.url: await engine.complete(
                    fresh_prompt(_SHORT_PROMPT_TOKENS), _DECODED_TOKENS
                )
                for engine in order
            }
            with_tiers, without = answers[tiered.url], answers[plain.url]
            if with_tiers.cached_tokens or without.cached_tokens:
                raise RuntimeError("a prompt that nobody had computed was cached")
            if number >= _WARM_UP_PAIRS:
                ttft.append(with_tiers.ttft_s / without.ttft_s)
                decode.append(with_tiers.decode_s / without.decode_s)
    return {
        "empty_cache_pairs": num_pairs,
        **_ratio("empty_cache_ttft_ratio", ttft),
        **_ratio("empty_cache_decode_ratio", decode),
    }


def _ratio(name: str, ratios: Sequence[float]) -> dict[str, float]:
    """Geometric mean of ratios, and its 95 % confidence interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    half = _Z_95 * statistics.stdev(logs) / math.sqrt(len(logs))
    return {
        name: math.exp(mean),
        f"{name}_low": math.exp(mean - half),
        f"{name}_high": math.exp(mean + half),
    }


def main() -> int:
    """Read the options and run."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tiers", description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each tier")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of with and without tiers")
    options = parser.parse_args()
    asyncio.run(run(options.repeats, options.pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
