from __future__ import annotations

import json

import httpx2

from tests.gateway.conftest import running_gateway, until_ready
from tests.gateway.fake_worker import FakeWorker, fake_worker

PROMPT = list(range(100))


async def test_explain_names_the_terms_and_runs_nothing(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    body = {"model": "m", "prompt": PROMPT}
    receipt = (await gateway.post("/v1/route/explain", json=body)).json()
    assert receipt["worker"] == worker.url
    assert receipt["reason"] == "load"
    assert receipt["prompt_tokens"] == 100
    (candidate,) = receipt["candidates"]
    terms = ("uncached_tokens", "waiting_tokens", "running_tokens")
    assert candidate["cost_tokens"] == sum(candidate[term] for term in terms)
    assert worker.seen == []


async def test_explain_and_the_route_agree() -> None:
    async with (
        fake_worker() as first,
        fake_worker() as second,
        running_gateway(first.url, second.url) as client,
    ):
        await until_ready(client)
        body = {"model": "m", "prompt": PROMPT}
        sent = await client.post("/v1/completions", json=body)
        receipt = (await client.post("/v1/route/explain", json=body)).json()
        assert receipt["worker"] == sent.headers["x-radixgate-worker"]
        assert receipt["reason"] == "prefix"


async def test_a_salt_sees_only_its_own_prefixes(gateway: httpx2.AsyncClient) -> None:
    async def cached_tokens(salt: str | None) -> int:
        body = {"model": "m", "prompt": PROMPT, "cache_salt": salt}
        receipt = (await gateway.post("/v1/route/explain", json=body)).json()
        return int(receipt["candidates"][0]["cached_tokens"])

    await gateway.post("/v1/completions", json={"model": "m", "prompt": PROMPT, "cache_salt": "a"})
    assert await cached_tokens("a") > 0
    assert await cached_tokens("b") == 0
    assert await cached_tokens(None) == 0


async def test_a_bad_body_is_told_as_on_the_generation_routes(gateway: httpx2.AsyncClient) -> None:
    for raw, status in ((b"{", 400), (b'{"model":"other"}', 404), (b"{}", 400)):
        response = await gateway.post(
            "/v1/route/explain", content=raw, headers={"content-type": "application/json"}
        )
        assert response.status_code == status
        assert json.loads(response.content)["error"]["message"]
    assert (await gateway.get("/v1/route/explain")).status_code == 405
