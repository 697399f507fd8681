from __future__ import annotations

import httpx2
import pytest

from tests.gateway.conftest import running_gateway, until_ready
from tests.gateway.fake_worker import FakeWorker, fake_worker


async def test_models_are_the_union_of_what_workers_serve() -> None:
    async with (
        fake_worker(model="org/a", max_model_len=512) as first,
        fake_worker(model="org/a", max_model_len=2048) as second,
        fake_worker(model="b", max_model_len=None) as third,
        running_gateway(first.url, second.url, third.url) as client,
    ):
        await until_ready(client)
        listed = (await client.get("/v1/models")).json()
        assert listed["object"] == "list"
        assert {item["id"]: item["max_model_len"] for item in listed["data"]} == {
            "org/a": 2048,
            "b": None,
        }


@pytest.mark.parametrize("spelling", ["org/a", "org%2Fa", "org%2fa"])
async def test_a_models_id_may_have_slashes(spelling: str) -> None:
    async with fake_worker(model="org/a") as worker, running_gateway(worker.url) as client:
        await until_ready(client)
        response = await client.get(f"/v1/models/{spelling}")
        assert (response.status_code, response.json()["id"]) == (200, "org/a")


async def test_an_unknown_model_is_404(gateway: httpx2.AsyncClient) -> None:
    response = await gateway.get("/v1/models/no/such")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.headers["x-request-id"]


async def test_a_folder_on_a_workers_disk_is_not_told(gateway: httpx2.AsyncClient) -> None:
    assert "/nowhere" not in (await gateway.get("/v1/models")).text


@pytest.mark.parametrize("path", ["/live", "/ready", "/health"])
async def test_probes_may_ask_with_head(gateway: httpx2.AsyncClient, path: str) -> None:
    response = await gateway.head(path)
    assert (response.status_code, response.content) == (200, b"")


async def test_alive_but_not_ready_without_a_worker(unused_tcp_port: int) -> None:
    async with running_gateway(f"http://127.0.0.1:{unused_tcp_port}") as client:
        assert (await client.get("/live")).status_code == 200
        ready = await client.get("/ready")
        assert (ready.status_code, ready.headers["retry-after"]) == (503, "1")
        health = (await client.get("/health")).json()
        assert health["status"] == "down"
        assert "cannot be reached" in next(iter(health["unusable_workers"].values()))


async def test_health_says_how_each_model_is_tokenized(gateway: httpx2.AsyncClient) -> None:
    tokenizer = (await gateway.get("/health")).json()["tokenizers"]["m"]
    assert tokenizer["source"] == "engine"
    assert tokenizer["reason"]


async def test_version_is_the_distributions(gateway: httpx2.AsyncClient) -> None:
    version = (await gateway.get("/version")).json()["version"]
    assert (
        f'radixgate_build_info{{version="{version}"}} 1.0' in (await gateway.get("/metrics")).text
    )


async def test_a_wrong_method_is_405_in_openais_shape(gateway: httpx2.AsyncClient) -> None:
    response = await gateway.delete("/v1/models")
    assert response.status_code == 405
    assert response.json()["error"]["code"] == "method_not_allowed"
    assert "GET" in response.headers["allow"]


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_token_routes_are_any_workers_answer(
    gateway: httpx2.AsyncClient, worker: FakeWorker, path: str
) -> None:
    response = await gateway.post(path, json={"model": "m", "prompt": "Hi"})
    assert response.json()["count"] == 4
    assert worker.tokenized[-1].path == path
    unknown = await gateway.post(path, json={"model": "other", "prompt": "Hi"})
    assert unknown.status_code == 404
    assert (await gateway.get(path)).status_code == 405


async def test_openapi_lists_the_hot_routes_too(gateway: httpx2.AsyncClient) -> None:
    paths = (await gateway.get("/openapi.json")).json()["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/models"} <= set(paths)
