"""What the whole is for: requests go where their prefix is, as the engines themselves confirm."""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.integration.conftest import GatewayProcess, gateway_process
from tests.real_engines import RunningEngines

pytestmark = pytest.mark.engines

_fresh = itertools.count(1)


def fresh_text(num_words: int) -> str:
    """Text that no request had before, about 1.3 tokens a word."""
    number = next(_fresh)
    return " ".join(f"w{number}x{word}" if word % 9 == 0 else "word" for word in range(num_words))


def ask(gateway: GatewayProcess, messages: list[dict[str, str]], **options: Any) -> httpx2.Response:
    body = {"model": gateway.model, "messages": messages, "max_tokens": 4, **options}
    response = httpx2.post(f"{gateway.url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response


def cached_tokens(response: httpx2.Response) -> int:
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def predicted_tokens(response: httpx2.Response) -> int:
    return int(response.headers["x-radixgate-predicted-cached-tokens"])


def metric(url: str, name: str) -> float:
    lines = httpx2.get(f"{url}/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))


def wait_for(condition: Any) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def test_turns_go_to_the_engine_that_holds_the_conversation(real_gateway: GatewayProcess) -> None:
    messages = [{"role": "user", "content": fresh_text(400)}]
    first = ask(real_gateway, messages)
    assert (predicted_tokens(first), cached_tokens(first)) == (0, 0)
    for _ in range(3):
        answer = first.json()["choices"][0]["message"]["content"]
        messages += [
            {"role": "assistant", "content": answer},
            {"role": "user", "content": fresh_text(10)},
        ]
        turn = ask(real_gateway, messages)
        assert turn.headers["x-radixgate-route"] == "prefix"
        assert turn.headers["x-radixgate-worker"] == first.headers["x-radixgate-worker"]
        assert predicted_tokens(turn) >= 500
        assert cached_tokens(turn) == predicted_tokens(turn)


def test_predicted_and_actual_hits_agree_in_the_metrics(real_gateway: GatewayProcess) -> None:
    messages = [{"role": "user", "content": fresh_text(200)}]
    before = [
        metric(real_gateway.url, f"radixgate_{kind}_hit_tokens_total")
        for kind in ("predicted", "actual")
    ]
    for _ in range(2):
        ask(real_gateway, messages)
    predicted, actual = (
        metric(real_gateway.url, f"radixgate_{kind}_hit_tokens_total") - then
        for kind, then in zip(("predicted", "actual"), before, strict=True)
    )
    assert predicted == actual > 200


def test_explain_says_what_the_route_then_does(real_gateway: GatewayProcess) -> None:
    messages = [{"role": "user", "content": fresh_text(200)}]
    ask(real_gateway, messages)
    body = {"model": real_gateway.model, "messages": messages}
    receipt = httpx2.post(f"{real_gateway.url}/v1/route/explain", json=body).json()
    again = ask(real_gateway, messages)
    assert receipt["worker"] == again.headers["x-radixgate-worker"]
    assert receipt["predicted_cached_tokens"] == cached_tokens(again)
    assert receipt["tokenized_by"] == "gateway"
    assert len(receipt["candidates"]) == 2
    assert {candidate["trust"] for candidate in receipt["candidates"]} == {"exact"}


async def burst(
    gateway: GatewayProcess, prefix: str, num_requests: int, num_own_words: int
) -> list[httpx2.Response]:
    async with httpx2.AsyncClient(timeout=280) as client:
        return await asyncio.gather(
            *(
                client.post(
                    f"{gateway.url}/v1/chat/completions",
                    json={
                        "model": gateway.model,
                        "messages": [
                            {"role": "system", "content": prefix},
                            {"role": "user", "content": fresh_text(num_own_words)},
                        ],
                        "max_tokens": 4,
                    },
                )
                for _ in range(num_requests)
            )
        )


async def test_a_burst_of_siblings_computes_their_prefix_once(
    real_gateway: GatewayProcess,
) -> None:
    responses = await burst(real_gateway, fresh_text(700), 8, 20)
    usages = [response.json()["usage"] for response in responses]
    own_tokens = sum(u["prompt_tokens"] for u in usages) - 8 * min(
        u["prompt_tokens"] for u in usages
    )
    computed = sum(u["prompt_tokens"] - u["prompt_tokens_details"]["cached_tokens"] for u in usages)
    prefix_tokens = min(u["prompt_tokens"] for u in usages)
    # Once in full, and for each of the others its own few words and a part of a block.
    assert computed < 1.5 * prefix_tokens + own_tokens + 8 * 32
    assert len({response.headers["x-radixgate-worker"] for response in responses}) == 1


async def test_a_shared_system_prompt_does_not_herd_everyone_to_one_worker(
    real_gateway: GatewayProcess,
) -> None:
    system = fresh_text(380)
    ask(real_gateway, [{"role": "system", "content": system}, {"role": "user", "content": "Hi"}])
    responses = await burst(real_gateway, system, 16, 150)
    workers = [response.headers["x-radixgate-worker"] for response in responses]
    assert all(response.status_code == 200 for response in responses)
    assert len(set(workers)) == 2
    assert max(workers.count(worker) for worker in set(workers)) <= 12


def test_a_salt_never_hits_what_another_one_left(real_gateway: GatewayProcess) -> None:
    messages = [{"role": "user", "content": fresh_text(200)}]
    ask(real_gateway, messages, cache_salt="a")
    for salt, hits in (("b", False), ("a", True)):
        response = ask(real_gateway, messages, cache_salt=salt)
        assert (predicted_tokens(response) > 0) is hits
        assert (cached_tokens(response) > 0) is hits
    plain = ask(real_gateway, messages)
    assert (predicted_tokens(plain), cached_tokens(plain)) == (0, 0)


def test_a_gateway_that_starts_late_knows_what_engines_hold(
    engines: RunningEngines, real_gateway: GatewayProcess, tmp_path: Path
) -> None:
    messages = [{"role": "user", "content": fresh_text(200)}]
    held_by = ask(real_gateway, messages).headers["x-radixgate-worker"]
    with gateway_process(engines, tmp_path / "late.log") as late:
        response = ask(late, messages)
    assert response.headers["x-radixgate-worker"] == held_by
    assert predicted_tokens(response) == cached_tokens(response) > 0


def running_on(engines: RunningEngines) -> float:
    return sum(metric(url, "vllm:num_requests_running") for url in engines.urls)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_engine(
    real_gateway: GatewayProcess, engines: RunningEngines, stream: bool
) -> None:
    body = {
        "model": real_gateway.model,
        "messages": [{"role": "user", "content": "Count."}],
        "max_tokens": 1500,
        "ignore_eos": True,
        "stream": stream,
    }
    url = f"{real_gateway.url}/v1/chat/completions"
    client = subprocess.Popen(
        ["curl", "-sN", url, "-H", "content-type: application/json", "-d", json.dumps(body)],
        stdout=subprocess.DEVNULL,
    )
    wait_for(lambda: running_on(engines) == 1)
    client.kill()
    client.wait()
    wait_for(lambda: running_on(engines) == 0)
    health = httpx2.get(f"{real_gateway.url}/health").json()
    assert health["in_flight"] == 0


def test_requests_that_share_a_clients_id_both_complete(real_gateway: GatewayProcess) -> None:
    async def both() -> list[httpx2.Response]:
        async with httpx2.AsyncClient(timeout=120) as client:
            return await asyncio.gather(
                *(
                    client.post(
                        f"{real_gateway.url}/v1/chat/completions",
                        json={
                            "model": real_gateway.model,
                            "messages": [{"role": "user", "content": "Hi"}],
                            "request_id": "same",
                            "max_tokens": 20,
                        },
                        headers={"x-request-id": "same"},
                    )
                    for _ in range(2)
                )
            )

    first, second = asyncio.run(both())
    assert (first.status_code, second.status_code) == (200, 200)
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "same"
    assert first.json()["id"] != second.json()["id"]


EMPTY_BODIES: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": []},
    {"prompt": [""]},
    {"prompt": [[]]},
    {"prompt": None},
    {},
    {"prompt": ["a", ""]},
    {"prompt": [-1]},
    {"prompt": [2**40]},
    {"prompt": [1, "a"]},
    {"prompt": {"a": 1}},
    {"messages": []},
    {"messages": None},
    {"messages": [{"role": "user", "content": ""}]},
    {"messages": [{"role": "user", "content": []}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{}]},
    {"messages": ["x"]},
    {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
]


@pytest.mark.parametrize("fields", EMPTY_BODIES, ids=str)
def test_odd_and_empty_prompts_get_the_engines_own_answer(
    real_gateway: GatewayProcess, engines: RunningEngines, fields: dict[str, Any]
) -> None:
    path = "/v1/chat/completions" if "messages" in fields else "/v1/completions"
    body = {"model": real_gateway.model, "max_tokens": 2, "temperature": 0, **fields}
    through = httpx2.post(f"{real_gateway.url}{path}", json=body, timeout=120)
    direct = httpx2.post(f"{engines.urls[0]}{path}", json=body, timeout=120)
    assert through.status_code == direct.status_code
    if direct.status_code != 200:
        assert through.json() == direct.json()
    assert httpx2.get(f"{real_gateway.url}/health").json()["status"] == "ok"


@pytest.fixture
def own_gateway(engines: RunningEngines, tmp_path: Path) -> Iterator[GatewayProcess]:
    with gateway_process(engines, tmp_path / "gateway.log") as gateway:
        yield gateway


def test_a_restarted_engine_is_expected_to_hold_nothing(
    own_gateway: GatewayProcess, engines: RunningEngines
) -> None:
    messages = [{"role": "user", "content": fresh_text(200)}]
    first = ask(own_gateway, messages)
    holder = engines.urls.index(first.headers["x-radixgate-worker"])

    engines.restart(holder)

    def is_back() -> bool:
        workers = httpx2.get(f"{own_gateway.url}/health").json()["workers"]
        return all(worker["ready"] and worker["trust"] == "exact" for worker in workers)

    wait_for(is_back)
    body = {"model": own_gateway.model, "messages": messages}
    receipt = httpx2.post(f"{own_gateway.url}/v1/route/explain", json=body).json()
    cached = {c["worker"]: c["cached_tokens"] for c in receipt["candidates"]}
    assert cached[engines.urls[holder]] == 0
    again = ask(own_gateway, messages)
    assert predicted_tokens(again) == cached_tokens(again)


def test_nothing_of_a_prompt_is_logged(own_gateway: GatewayProcess) -> None:
    ask(own_gateway, [{"role": "user", "content": "a-word-to-look-for"}])
    body = b'{"model":"no-such","messages":[{"role":"user","content":"a-word-to-look-for"}]}'
    headers = {"content-type": "application/json", "authorization": "Bearer a-key-to-look-for"}
    httpx2.post(f"{own_gateway.url}/v1/chat/completions", content=body, headers=headers)
    log = own_gateway.log.read_text()
    assert log
    assert "a-word-to-look-for" not in log
    assert "a-key-to-look-for" not in log
