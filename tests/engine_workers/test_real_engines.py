from __future__ import annotations

import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

from engine_workers.process_tree import living_processes
from tests.real_engines import RunningEngines

pytestmark = pytest.mark.engines


def call(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    try:
        if body is None:
            connection.request("GET", path)
        else:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


def test_each_engine_serves_the_model_and_publishes_its_events(engines: RunningEngines) -> None:
    endpoints = set()
    for url in engines.urls:
        (model,) = call(url, "/v1/models")["data"]
        assert model["id"] == engines.model
        assert model["root"] == str(engines.model_folder)
        assert model["max_model_len"] == engines.max_model_len
        source = call(url, "/kv_event_sources")["0"]
        assert source["enable_kv_cache_events"] is True
        endpoints |= {source["endpoint"], source["replay_endpoint"]}
    assert len(endpoints) == 2 * len(engines.urls)


def test_the_converted_model_answers_and_cached_tokens_are_counted(
    engines: RunningEngines,
) -> None:
    body = {
        "model": engines.model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_tokens": 16,
    }
    answers = [call(engines.urls[0], "/v1/chat/completions", body) for _ in range(2)]
    for answer in answers:
        assert answer["choices"][0]["message"]["content"] == "The capital of France is Paris."
    # 37 tokens hold one whole block of 32.
    assert answers[1]["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


def test_an_engine_that_is_killed_comes_back_as_another_process(engines: RunningEngines) -> None:
    before = {process.pid for process in living_processes()}
    engines.restart(1)
    assert call(engines.urls[1], "/v1/models")["data"][0]["id"] == engines.model
    assert {process.pid for process in living_processes()} - before
