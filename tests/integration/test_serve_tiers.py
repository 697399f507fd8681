"""`radixgate serve` with tiers: what one engine computed, any engine loads, whatever happened."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

pytestmark = pytest.mark.engines

BLOCK_SIZE = 32
_PATIENCE_S = 120.0
_fresh = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Answer:
    text: str
    prompt_tokens: int
    cached_tokens: int

    @property
    def full_blocks_tokens(self) -> int:
        """Most tokens that a cache can give: whole blocks, without the last token."""
        return (self.prompt_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


class Served:
    """A running `radixgate serve`, as its users see it, and what may happen to its processes."""

    def __init__(self, process: subprocess.Popen[str], url: str, socket: Path) -> None:
        self.process = process
        self.url = url
        self.socket = socket
        self.engines: list[str] = [each["id"] for each in self.health()["workers"]]

    def health(self) -> Any:
        return httpx2.get(f"{self.url}/health").json()

    def ask(self, messages: list[dict[str, str]], url: str | None = None) -> Answer:
        """Ask the gateway, or the engine of that URL."""
        body = {**self._body(messages), "max_tokens": 12, "temperature": 0, "ignore_eos": True}
        response = httpx2.post(f"{url or self.url}/v1/chat/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        answer = response.json()
        usage = answer["usage"]
        return Answer(
            answer["choices"][0]["message"]["content"],
            usage["prompt_tokens"],
            usage["prompt_tokens_details"]["cached_tokens"],
        )

    def tokens_by_tier(self, messages: list[dict[str, str]]) -> dict[str, int]:
        """What the route knows of the chosen worker."""
        response = httpx2.post(f"{self.url}/v1/route/explain", json=self._body(messages))
        chosen: dict[str, int] = response.json()["candidates"][0]["tokens_by_tier"]
        return chosen

    def forget(self) -> None:
        """Empty the engines' own caches."""
        for engine in self.engines:
            assert httpx2.post(f"{engine}/reset_prefix_cache").status_code == 200

    def restart(self, engine: str) -> None:
        """Kill an engine as a crash would, and wait for its successor."""
        port = engine.rsplit(":", 1)[1]
        (pid,) = self._processes(b"--port\0" + port.encode() + b"\0")
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: not Path(f"/proc/{pid}").exists())
        wait_for(lambda: is_well(engine))

    def cache_server(self) -> int:
        (pid,) = self._processes(b"cache-server\0")
        return pid

    def num_saved_to_ssd(self) -> int:
        """Blocks that the cache server of now has written there."""
        (server,) = self.health()["cache_servers"]
        page = httpx2.get(f"{server['url']}/metrics").text
        return sum(
            round(float(line.rsplit(" ", 1)[1]))
            for line in page.splitlines()
            if line.startswith("radixgate_cache_operations_total{")
            and all(part in line for part in ('tier="ssd"', 'operation="save"', '"ok"'))
        )

    def _body(self, messages: list[dict[str, str]]) -> dict[str, Any]:
        return {"model": "SmolLM2-135M-Instruct", "messages": messages}

    def _processes(self, part_of_command: bytes) -> list[int]:
        """Of that command, each below a guardian of its own."""
        return [
            pid
            for guardian in children(self.process.pid)
            for pid in children(guardian)
            if part_of_command in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_well(engine: str) -> bool:
    try:
        return httpx2.get(f"{engine}/health").status_code == 200
    except httpx2.TransportError:
        return False


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + _PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def fresh_conversation(num_words: int = 400) -> list[dict[str, str]]:
    """A first turn that no request had before, about 1.3 tokens a word."""
    number = next(_fresh)
    words = (f"s{number}x{n}" if n % 9 == 0 else "word" for n in range(num_words))
    return [{"role": "user", "content": " ".join(words)}]


def next_turn(messages: list[dict[str, str]], answer: Answer) -> list[dict[str, str]]:
    return [
        *messages,
        {"role": "assistant", "content": answer.text},
        {"role": "user", "content": "And what else?"},
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    logs = tmp_path_factory.mktemp("serve-tiers")
    # Short: a Unix socket's path has to fit 108 bytes.
    with tempfile.TemporaryDirectory(prefix="serve-") as folder, (logs / "serve").open("w") as log:
        socket = Path(folder) / "cache.sock"
        process = subprocess.Popen(
            [str(Path(sys.executable).parent / "radixgate"), "serve", "--port", "0"],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={
                **os.environ,
                "RADIXGATE_CACHE_SOCKET": str(socket),
                "RADIXGATE_SSD_FOLDER": str(logs / "ssd"),
                "RADIXGATE_ARENA_BYTES": str(1024**3),
                "RADIXGATE_ENGINE_KV_CACHE_BYTES": str(512 * 1024**2),
                "RADIXGATE_ENGINE_MAX_MODEL_LEN": "2048",
                "RADIXGATE_ENGINE_LOG_DIR": str(logs),
                "VLLM_SERVER_DEV_MODE": "1",
            },
        )
        try:
            assert process.stdout is not None
            ready = next((line for line in process.stdout if line.startswith("ready after")), "")
            assert "from 2 engines and tiers ram,ssd" in ready, (logs / "serve").read_text()
            served = Served(process, ready.split(": ")[1].split("/v1")[0], socket)
            wait_connected(served)
            yield served
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=15)
            process.kill()
            process.communicate()


def wait_connected(served: Served) -> None:
    """Until both engines save and load: they find a new server by themselves, a little later."""
    for engine in served.engines:
        messages = fresh_conversation(60)

        def loads(engine: str = engine, messages: Any = messages) -> bool:
            served.forget()
            return served.ask(messages, engine).cached_tokens > 0

        wait_for(loads)


def wait_known(served: Served, messages: list[dict[str, str]], num_tokens: int) -> None:
    """Until the gateway knows that the cache server has a conversation's blocks."""
    wait_for(lambda: sum(served.tokens_by_tier(messages).values()) >= num_tokens)


def test_the_other_engine_loads_what_the_first_one_computed(served: Served) -> None:
    messages = fresh_conversation()
    first, second = served.engines
    computed = served.ask(messages, first)
    assert computed.cached_tokens == 0
    wait_known(served, messages, computed.full_blocks_tokens)
    loaded = served.ask(messages, second)
    assert loaded.cached_tokens == computed.full_blocks_tokens
    assert loaded.text == computed.text


def test_explain_shows_a_prefix_that_lies_only_in_the_cache_server(served: Served) -> None:
    messages = fresh_conversation()
    computed = served.ask(messages)
    wait_known(served, messages, computed.full_blocks_tokens)
    served.forget()
    for engine in served.engines:
        # An engine tells that it was emptied with its next step.
        served.ask(fresh_conversation(8), engine)

    def only_there() -> bool:
        return set(served.tokens_by_tier(messages)) == {"ram"}

    wait_for(only_there)
    loaded = served.ask(messages)
    assert loaded.cached_tokens == computed.full_blocks_tokens
    assert loaded.text == computed.text


def test_after_an_engine_restart_the_second_turns_prefix_is_loaded(served: Served) -> None:
    engine = served.engines[0]
    messages = fresh_conversation()
    turn = next_turn(messages, served.ask(messages, engine))
    before = served.ask(turn, engine)
    wait_known(served, turn, before.full_blocks_tokens)
    served.restart(engine)
    after = served.ask(turn, engine)
    assert after.cached_tokens == before.full_blocks_tokens
    assert after.text == before.text


def test_requests_go_on_while_the_cache_server_hangs(served: Served) -> None:
    messages = fresh_conversation()
    computed = served.ask(messages)
    served.forget()
    pid = served.cache_server()
    os.kill(pid, signal.SIGSTOP)
    try:
        assert served.ask(messages).text == computed.text
        assert served.ask(next_turn(messages, computed)).text
    finally:
        os.kill(pid, signal.SIGCONT)
    wait_connected(served)


def test_requests_go_on_when_the_cache_server_is_killed_and_its_successor_has_the_ssd(
    served: Served,
) -> None:
    messages = fresh_conversation()
    num_before = served.num_saved_to_ssd()
    computed = served.ask(messages)
    num_blocks = computed.full_blocks_tokens // BLOCK_SIZE
    wait_for(lambda: served.num_saved_to_ssd() >= num_before + num_blocks)
    served.forget()
    os.kill(served.cache_server(), signal.SIGKILL)
    assert served.ask(messages).text == computed.text
    assert served.ask(next_turn(messages, computed)).text
    wait_for(served.socket.is_socket)
    wait_connected(served)
    served.forget()
    loaded = served.ask(messages)
    assert loaded.cached_tokens > 0
    assert loaded.text == computed.text


def test_ctrl_c_ends_it_all(served: Served) -> None:
    served.process.send_signal(signal.SIGINT)
    served.process.communicate(timeout=30)
    assert served.process.returncode == 0
    assert not served.socket.exists()
