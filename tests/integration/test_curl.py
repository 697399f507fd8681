"""The same from a shell: what people paste first."""

from __future__ import annotations

import json
import subprocess

import pytest

from tests.integration.conftest import GatewayProcess

pytestmark = pytest.mark.engines


def curl(*arguments: str) -> str:
    done = subprocess.run(
        ["curl", "-sS", "--max-time", "120", *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def post(gateway: GatewayProcess, path: str, body: str, *more: str) -> str:
    header = "content-type: application/json"
    return curl(f"{gateway.url}{path}", "-H", header, "-d", body, *more)


def question(gateway: GatewayProcess, **fields: object) -> str:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    return json.dumps({"model": gateway.model, "messages": messages, "temperature": 0, **fields})


def test_an_answer(real_gateway: GatewayProcess) -> None:
    answer = json.loads(post(real_gateway, "/v1/chat/completions", question(real_gateway)))
    assert "Paris" in answer["choices"][0]["message"]["content"]


def test_a_stream_is_events_and_done(real_gateway: GatewayProcess) -> None:
    text = post(
        real_gateway, "/v1/chat/completions", question(real_gateway, stream=True), "-N", "-i"
    )
    head, _, body = text.replace("\r\n", "\n").partition("\n\n")
    assert "content-type: text/event-stream" in head.lower()
    assert "x-request-id: " in head.lower()
    events = body.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") for event in events)
    assert events[-1] == "data: [DONE]"
    assert "Paris" in "".join(
        json.loads(event[6:])["choices"][0]["delta"].get("content") or "" for event in events[:-1]
    )


def test_an_expected_continue_and_a_chunked_body(real_gateway: GatewayProcess) -> None:
    for header in ("expect: 100-continue", "transfer-encoding: chunked"):
        answer = post(real_gateway, "/v1/chat/completions", question(real_gateway), "-H", header)
        assert json.loads(answer)["object"] == "chat.completion"


def test_a_mistake(real_gateway: GatewayProcess) -> None:
    answer = post(real_gateway, "/v1/chat/completions", "{", "-w", "\n%{http_code}")
    body, status = answer.rsplit("\n", 1)
    assert status == "400"
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_tokens_there_and_back(real_gateway: GatewayProcess) -> None:
    asked = json.dumps({"model": real_gateway.model, "prompt": "The capital of France"})
    tokens = json.loads(post(real_gateway, "/tokenize", asked))["tokens"]
    asked = json.dumps({"model": real_gateway.model, "tokens": tokens})
    assert json.loads(post(real_gateway, "/detokenize", asked))["prompt"] == "The capital of France"


@pytest.mark.parametrize("path", ["/live", "/ready", "/health", "/metrics", "/version"])
def test_what_operators_ask(real_gateway: GatewayProcess, path: str) -> None:
    assert curl(f"{real_gateway.url}{path}", "-f")


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/sleep", "/invocations", "/v1/nope"])
def test_no_engine_route_leaks(real_gateway: GatewayProcess, path: str) -> None:
    answer = post(real_gateway, path, "{}", "-w", "\n%{http_code}")
    assert answer.endswith("\n404")
