"""A real engine beside a real cache server: the same answers, loaded instead of computed."""

from __future__ import annotations

import http.client
import json
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from cache_router.settings import Settings
from engine_workers.cache_server.admin_client import AdminClient
from engine_workers.cache_server.admin_wire import GetStats, Stats
from engine_workers.cache_server.eviction import S3Fifo
from engine_workers.engine_runtime import load_runtime
from engine_workers.model_store import default_model
from engine_workers.tiers.ssd import SsdOptions, SsdTier
from engine_workers.workspace import Workspace
from tests.engine_workers.connector.cache_server_process import CacheServerProcess, cache_server
from tests.integration.lying_proxy import lying_proxy
from tests.real_engines import RunningEngines, running_engines

pytestmark = pytest.mark.engines

ARENA_BYTES = 1024**3
PROMPT_TOKENS = 1500
FULL_BLOCKS_TOKENS = 1472
"""Of them, in whole blocks of 32 and without the last token."""


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: list[int]
    cached_tokens: int


class Engine:
    """One engine, as a client sees it."""

    def __init__(self, engines: RunningEngines) -> None:
        self._engines = engines
        (self._url,) = engines.urls

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection(urlsplit(self._url).netloc, timeout=120)
        try:
            connection.request(
                "POST", path, json.dumps(body or {}), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            content = response.read()
            assert response.status == 200, content
            return json.loads(content) if content else None
        finally:
            connection.close()

    def answer(self, prompt: list[int], max_tokens: int = 12) -> Answer:
        body = {
            "model": self._engines.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = self.post("/v1/completions", body)
        details = answer["usage"]["prompt_tokens_details"]
        return Answer(answer["choices"][0]["token_ids"], details["cached_tokens"])

    def forget(self) -> None:
        """Empty the engine's own cache."""
        self.post("/reset_prefix_cache")

    def loaded(self, prompt: list[int], num_tokens: int, max_tokens: int = 12) -> list[int]:
        """Token ids of the first answer that took `num_tokens` tokens from a tier.

        On a machine that is short of cores, blocks may be looked up before the server has taken
        them over, or its answer may come too late. Whatever was loaded, the answer is the same.
        """
        answers: set[tuple[int, ...]] = set()
        while True:
            self.forget()
            answer = self.answer(prompt, max_tokens)
            answers.add(tuple(answer.token_ids))
            assert len(answers) == 1
            if answer.cached_tokens == num_tokens:
                return answer.token_ids

    def restart(self) -> None:
        self._engines.restart(0)


@pytest.fixture(scope="module")
def sockets() -> Iterator[Path]:
    # Short: a Unix socket's path has to fit 108 bytes.
    with tempfile.TemporaryDirectory(prefix="tiers-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def engine(sockets: Path) -> Iterator[Engine]:
    workspace = Workspace.current()
    with running_engines(
        default_model(workspace),
        load_runtime(workspace, Settings().engine_python),
        workspace.sockets,
        workspace.logs / "tiers",
        num_engines=1,
        cache_socket=sockets / "cache.sock",
    ) as running:
        yield Engine(running)


@pytest.fixture
def server(engine: Engine, sockets: Path, tmp_path: Path) -> Iterator[CacheServerProcess]:
    with cache_server(tmp_path, ARENA_BYTES, socket=sockets / "cache.sock") as server:
        wait_connected(engine)
        yield server


def prompt(seed: int) -> list[int]:
    choose = random.Random(seed)
    return [choose.randrange(100, 40_000) for _ in range(PROMPT_TOKENS)]


def wait_connected(engine: Engine) -> None:
    """Until something is saved and loaded again, the engine has not found the server."""
    engine.loaded(prompt(0)[:100], 96, 1)


def test_a_restarted_engine_gives_the_same_tokens_from_the_arena(
    engine: Engine, server: CacheServerProcess
) -> None:
    computed = engine.answer(prompt(1))
    assert computed.cached_tokens == 0
    engine.restart()
    assert engine.loaded(prompt(1), FULL_BLOCKS_TOKENS) == computed.token_ids


def test_an_emptied_engine_gives_the_same_tokens_from_the_arena(
    engine: Engine, server: CacheServerProcess
) -> None:
    computed = engine.answer(prompt(2))
    assert engine.loaded(prompt(2), FULL_BLOCKS_TOKENS) == computed.token_ids
    # What was loaded is in the engine's own cache now.
    assert engine.answer(prompt(2)) == Answer(computed.token_ids, FULL_BLOCKS_TOKENS)


def test_generated_tokens_are_loaded_as_well(engine: Engine, server: CacheServerProcess) -> None:
    first = engine.answer(prompt(3)[:64], 100)
    longer = prompt(3)[:64] + first.token_ids + prompt(4)[:10]
    second = engine.answer(longer)
    assert engine.loaded(longer, 160) == second.token_ids


def test_what_the_engine_lacks_is_loaded_behind_what_it_has(
    engine: Engine, server: CacheServerProcess
) -> None:
    computed = engine.answer(prompt(5))
    engine.loaded(prompt(5)[:700], 672)
    assert engine.answer(prompt(5)) == Answer(computed.token_ids, FULL_BLOCKS_TOKENS)


def test_another_salt_gets_nothing(engine: Engine, server: CacheServerProcess) -> None:
    body = {"model": "SmolLM2-135M-Instruct", "prompt": prompt(6)[:200], "max_tokens": 1}

    def cached_tokens(salt: str) -> int:
        engine.forget()
        answer = engine.post("/v1/completions", {**body, "cache_salt": salt})
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached_tokens("one") == 0
    while cached_tokens("one") == 0:
        pass
    assert cached_tokens("two") == 0


def test_a_server_that_is_killed_costs_no_client_anything_and_its_successor_is_used(
    engine: Engine, server: CacheServerProcess
) -> None:
    computed = engine.answer(prompt(7))
    assert engine.loaded(prompt(7), FULL_BLOCKS_TOKENS) == computed.token_ids
    server.kill()
    engine.forget()
    assert engine.answer(prompt(7)) == Answer(computed.token_ids, 0)
    server.start()
    assert engine.loaded(prompt(7), FULL_BLOCKS_TOKENS) == computed.token_ids


def test_a_server_that_hangs_costs_no_client_anything_and_is_used_when_it_goes_on(
    engine: Engine, server: CacheServerProcess
) -> None:
    computed = engine.answer(prompt(8))
    assert engine.loaded(prompt(8), FULL_BLOCKS_TOKENS) == computed.token_ids
    server.hang()
    engine.forget()
    assert engine.answer(prompt(8)) == Answer(computed.token_ids, 0)
    engine.forget()
    assert engine.answer(prompt(8)) == Answer(computed.token_ids, 0)
    server.go_on()
    assert engine.loaded(prompt(8), FULL_BLOCKS_TOKENS) == computed.token_ids


def test_a_block_that_fails_its_check_is_computed_and_the_request_is_answered_once(
    engine: Engine, sockets: Path, tmp_path: Path
) -> None:
    real = sockets / "real.sock"
    engine.forget()
    with (
        cache_server(tmp_path, ARENA_BYTES, socket=real),
        lying_proxy(sockets / "cache.sock", real),
    ):
        computed = engine.answer(prompt(11))
        # The engine has found the server, and later saves again what it holds.
        while num_blocks_in_arena(real) < FULL_BLOCKS_TOKENS // 32:
            assert engine.answer(prompt(11)).token_ids == computed.token_ids
        for _ in range(2):
            engine.forget()
            assert engine.answer(prompt(11)) == Answer(computed.token_ids, 0)


async def test_loaded_blocks_have_the_bytes_that_were_computed(
    engine: Engine, sockets: Path, tmp_path: Path
) -> None:
    """The engine saves computed blocks to one server, and what it loaded from that to another.

    One token is asked for: more would fill another block, computed anew after the load, in steps
    of other sizes and so with other rounding.
    """
    socket = sockets / "cache.sock"
    engine.forget()
    with cache_server(tmp_path, ARENA_BYTES, socket=socket, ssd=tmp_path / "computed") as first:
        wait_connected(engine)
        engine.loaded(prompt(9), FULL_BLOCKS_TOKENS, 1)
        first.stop()
    with cache_server(tmp_path, ARENA_BYTES, socket=socket, ssd=tmp_path / "loaded") as second:
        while num_blocks_in_arena(socket) < FULL_BLOCKS_TOKENS // 32:
            engine.answer(prompt(9), 1)
        assert engine.answer(prompt(9), 1).cached_tokens == FULL_BLOCKS_TOKENS
        second.stop()
    computed = await checksums(tmp_path / "computed")
    loaded = await checksums(tmp_path / "loaded")
    both = computed.keys() & loaded.keys()
    assert len(both) >= FULL_BLOCKS_TOKENS // 32
    assert {name: computed[name] for name in both} == {name: loaded[name] for name in both}


def num_blocks_in_arena(socket: Path) -> int:
    with AdminClient(socket, 10.0) as client:
        stats = client.ask(GetStats())
    assert isinstance(stats, Stats)
    return stats.tiers[0].num_blocks


async def checksums(folder: Path) -> dict[bytes, int]:
    """Checksum of each payload on that SSD tier, by block hash."""
    tier = await SsdTier.open(SsdOptions(folder, 1), S3Fifo(1024**3), lambda _: None)
    try:
        return {header.name.block_hash: header.checksum async for header in tier.headers()}
    finally:
        await tier.close()
