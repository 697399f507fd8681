from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.engine_workers.cache_server.wire_client import WireClient, block_hash
from tests.radixgate.conftest import Start
from tests.radixgate.test_cache_server import started


@pytest.fixture
async def path(start: Start, tmp_path: Path) -> Path:
    """A server that keeps two blocks."""
    path = tmp_path / "cache.sock"
    started(start, path, tmp_path)
    client = await WireClient.connect(path)
    assert isinstance(client, WireClient)
    await client.save([1, 2])
    client.close()
    return path


def output(start: Start, path: Path, *arguments: str) -> str:
    process = start("cache", *arguments, "--cache-socket", str(path))
    printed, errors = process.communicate()
    assert (process.returncode, errors) == (0, "")
    return printed


async def test_every_command_answers_with_one_json_value(start: Start, path: Path) -> None:
    digits = block_hash(1).hex()
    stats = json.loads(output(start, path, "stats", "--json"))
    assert {tier["tier"]: tier["num_blocks"] for tier in stats["tiers"]}["ram"] == 2
    listed = json.loads(output(start, path, "ls", "--json"))
    assert [block["block_hash"] for block in listed["blocks"]] == [
        block_hash(1).hex(),
        block_hash(2).hex(),
    ]
    assert json.loads(output(start, path, "pin", digits, "--json")) == {"num_blocks": 1}
    assert json.loads(output(start, path, "unpin", digits, "--json")) == {"num_blocks": 1}
    verified = json.loads(output(start, path, "verify", "ram", "--json"))
    assert verified == {"num_good": 2, "num_bad": 0}
    assert json.loads(output(start, path, "clear", "ram", "--json")) == {"num_blocks": 2}


async def test_tables_are_for_people(start: Start, path: Path) -> None:
    assert "ram" in output(start, path, "stats")
    listed = output(start, path, "ls").splitlines()
    assert len(listed) == 3
    assert listed[1].startswith(block_hash(1).hex()[:16])
    assert output(start, path, "verify", "ram") == "2 good, 0 dropped\n"


async def test_an_unknown_tier_is_one_line(start: Start, path: Path) -> None:
    process = start("cache", "ls", "tape", "--cache-socket", str(path))
    _, errors = process.communicate()
    assert process.returncode == 1
    assert errors == "radixgate: there is no tier 'tape' here, only ram, ssd\n"


def test_without_a_server_one_line_says_how_to_start_one(start: Start, tmp_path: Path) -> None:
    process = start("cache", "stats", "--cache-socket", str(tmp_path / "none"))
    _, errors = process.communicate()
    assert process.returncode == 2
    assert errors.startswith("radixgate: RADIXGATE_CACHE_SOCKET: no cache server answers")
    assert errors.count("\n") == 1


class Gateway(BaseHTTPRequestHandler):
    """Answers as a gateway does, and keeps what it was asked."""

    asked: list[tuple[str, dict[str, object]]]

    def do_GET(self) -> None:
        self._answer(b'{"data": [{"id": "tiny"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.asked.append((self.path, body))
        self._answer(b"{}")

    def _answer(self, body: bytes) -> None:
        self.send_response(400 if self.asked and "bad" in str(self.asked[-1]) else 200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def gateway() -> Iterator[HTTPServer]:
    Gateway.asked = []
    with HTTPServer(("127.0.0.1", 0), Gateway) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield server
        server.shutdown()
        serving.join()


def warm(start: Start, gateway: HTTPServer, prompts: Path) -> tuple[int, str, str]:
    url = f"http://127.0.0.1:{gateway.server_address[1]}"
    process = start("cache", "warm", str(prompts), "--url", url, "--json")
    printed, errors = process.communicate()
    return process.returncode, printed, errors


def test_warming_sends_each_prompt_for_one_token(
    start: Start, gateway: HTTPServer, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text(
        'Once upon a time\n\n{"messages": [], "model": "other", "stream": true, "n": 4}\n'
    )
    assert warm(start, gateway, prompts) == (0, '{"num_prompts":2}\n', "")
    assert Gateway.asked == [
        ("/v1/completions", {"prompt": "Once upon a time", "model": "tiny", "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [], "model": "other", "max_completion_tokens": 1}),
    ]


def test_a_prompt_that_is_refused_is_named_by_its_line_and_not_shown(
    start: Start, gateway: HTTPServer, tmp_path: Path
) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text("good\nbad secret\n")
    status, printed, errors = warm(start, gateway, prompts)
    assert (status, printed, errors) == (1, "", "radixgate: line 2: status 400\n")


def test_a_file_that_is_not_there_is_one_line(
    start: Start, gateway: HTTPServer, tmp_path: Path
) -> None:
    status, _, errors = warm(start, gateway, tmp_path / "none")
    assert status == 2
    assert errors.count("\n") == 1
