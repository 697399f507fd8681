from __future__ import annotations

import asyncio
import gzip
import json
import socket
import struct
from typing import Any

import httpx2
import pytest

from tests.gateway.conftest import running_gateway, until, until_ready
from tests.gateway.fake_worker import (
    COMPLETION,
    DONE,
    USAGE,
    FakeWorker,
    Seen,
    delta,
    end_stream,
    event,
    fake_worker,
    send,
    send_piece,
    start_stream,
)

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": MESSAGES, **fields}


async def post(client: httpx2.AsyncClient, raw: bytes, path: str = CHAT) -> httpx2.Response:
    return await client.post(path, content=raw, headers={"content-type": "application/json"})


def error_of(response: httpx2.Response) -> dict[str, Any]:
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    return dict(error)


async def in_flight(client: httpx2.AsyncClient) -> tuple[int, int, int]:
    health = (await client.get("/health")).json()
    worker = health["workers"][0]
    return health["in_flight"], worker["in_flight"], worker["waiting_tokens"]


async def test_a_body_is_forwarded_byte_for_byte(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    raw = (
        b' {"model" : "m",\n "messages":[{"role":"user","content":"\\u00e9\xc3\xa9"}],'
        b'"unknown_field":1.50, "temperature" : 1e-1 } '
    )
    response = await post(gateway, raw)
    assert (response.status_code, response.content) == (200, COMPLETION)
    assert worker.seen[-1].body == raw


@pytest.mark.parametrize("asked", [None, {"include_usage": False}])
async def test_usage_is_asked_for_and_taken_out_where_the_client_did_not_ask(
    gateway: httpx2.AsyncClient, worker: FakeWorker, asked: dict[str, Any] | None
) -> None:
    response = await gateway.post(CHAT, json=body(stream=True, stream_options=asked))
    assert response.content == delta("He") + delta("llo", "stop") + DONE
    assert worker.seen[-1].json["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("yes", [True, 1, "true"])
async def test_usage_passes_where_the_client_asked(
    gateway: httpx2.AsyncClient, worker: FakeWorker, yes: object
) -> None:
    request = body(stream=True, stream_options={"include_usage": yes})
    response = await gateway.post(CHAT, json=request)
    usage = event(choices=[], usage=USAGE)
    assert response.content == delta("He") + delta("llo", "stop") + usage + DONE
    assert worker.seen[-1].json == request
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers


async def test_keys_that_the_gateway_owns_do_not_reach_the_engine(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    await gateway.post(
        CHAT,
        json=body(
            request_id="same",
            priority=-5,
            kv_transfer_params={"remote_host": "x"},
            vllm_xargs={"kv_cache_report_mode": "full", "kept": 1},
        ),
    )
    assert worker.seen[-1].json == body(vllm_xargs={"kept": 1})


@pytest.mark.parametrize(
    ("raw", "status", "code", "param"),
    [
        (b"", 400, "invalid_request", None),
        (b"nonsense", 400, "invalid_request", None),
        (b"[]", 400, "invalid_request", None),
        (b'{"messages":[]}', 400, "invalid_request", "model"),
        (b'{"model":null}', 400, "invalid_request", "model"),
        (b'{"model":7}', 400, "invalid_request", "model"),
        (b'{"model":["m"]}', 400, "invalid_request", "model"),
        (b'{"model":"m","model":"m","messages":[]}', 400, "invalid_request", None),
        (b'{"model":"other","messages":[]}', 404, "model_not_found", "model"),
        (b'{"model":"","messages":[]}', 404, "model_not_found", "model"),
        (b'{"model":"' + b"x" * 100_000 + b'"}', 404, "model_not_found", "model"),
    ],
)
async def test_a_callers_mistake_is_told_and_never_sent_on(
    gateway: httpx2.AsyncClient,
    worker: FakeWorker,
    raw: bytes,
    status: int,
    code: str,
    param: str | None,
) -> None:
    response = await post(gateway, raw)
    error = error_of(response)
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert len(response.content) < 4096
    assert worker.seen == []
    assert await in_flight(gateway) == (0, 0, 0)


async def test_a_body_of_another_media_type_is_415(gateway: httpx2.AsyncClient) -> None:
    response = await gateway.post(CHAT, content=b"a=b", headers={"content-type": "text/plain"})
    assert (response.status_code, error_of(response)["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_over_the_limit_is_413(worker: FakeWorker, chunked: bool) -> None:
    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 100

    async with running_gateway(worker.url, max_body_bytes=1000) as client:
        await until_ready(client)
        response = await client.post(
            CHAT,
            content=pieces() if chunked else b" " * 2000,
            headers={"content-type": "application/json"},
        )
    assert (response.status_code, error_of(response)["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "OPTIONS"])
async def test_a_wrong_method_is_405(gateway: httpx2.AsyncClient, method: str) -> None:
    response = await gateway.request(method, CHAT)
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


@pytest.mark.parametrize(
    "path",
    ["/", "/v1", "/v1/nope", "/v1/chat/completions/", "/reset_prefix_cache", "/docs", "/v1/sleep"],
)
async def test_an_unknown_route_is_404_in_openais_shape(
    gateway: httpx2.AsyncClient, path: str
) -> None:
    response = await gateway.post(path, json={})
    assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


async def test_an_engines_refusal_passes_unchanged(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    refusal = b'{"error":{"message":"no","type":"BadRequestError","param":"n","code":400}}'

    async def refuse(_: Seen, writer: asyncio.StreamWriter) -> None:
        await send(writer, 400, refusal)

    worker.answer = refuse
    for stream in (False, True):
        response = await gateway.post(CHAT, json=body(stream=stream))
        assert (response.status_code, response.content) == (400, refusal)
    assert await in_flight(gateway) == (0, 0, 0)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"<html>Bad Gateway</html>", "The worker answered with status 422."),
        (b'{"detail":"no such thing"}', "no such thing"),
        (b'{"object":"error","message":"flat","code":1}', "flat"),
        (b'{"error":"Unauthorized"}', "Unauthorized"),
        (b"", "The worker answered with status 422."),
    ],
)
async def test_an_error_of_another_shape_is_put_into_openais(
    gateway: httpx2.AsyncClient, worker: FakeWorker, answer: bytes, message: str
) -> None:
    async def refuse(_: Seen, writer: asyncio.StreamWriter) -> None:
        await send(writer, 422, answer, "text/html")

    worker.answer = refuse
    response = await gateway.post(CHAT, json=body())
    assert (response.status_code, error_of(response)["message"]) == (422, message)


async def test_a_workers_limits_are_told_under_their_standard_names(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    async def refuse(_: Seen, writer: asyncio.StreamWriter) -> None:
        extra = "retry-after: 7\r\nx-ratelimit-remaining-requests: 0\r\nserver: engine\r\n"
        await send(writer, 429, b"slow down", "text/plain", extra)

    worker.answer = refuse
    response = await gateway.post(CHAT, json=body())
    assert response.status_code == 429
    assert response.headers["retry-after"] == "7"
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert "server" not in response.headers
    assert len(worker.seen) == 1


@pytest.mark.parametrize("status", [401, 403])
async def test_a_worker_that_refuses_the_gateways_key_is_not_the_callers_fault(
    gateway: httpx2.AsyncClient, worker: FakeWorker, status: int
) -> None:
    async def refuse(_: Seen, writer: asyncio.StreamWriter) -> None:
        await send(writer, status, b'{"error":"Unauthorized"}')

    worker.answer = refuse
    response = await gateway.post(CHAT, json=body())
    assert response.status_code == 502
    assert "key" not in error_of(response)["message"]


async def test_keys_and_cookies_of_the_client_stay_here(worker: FakeWorker) -> None:
    async with running_gateway(worker.url, worker_api_key="sk-worker") as client:
        await until_ready(client)
        await client.post(
            CHAT,
            json=body(),
            headers={
                "authorization": "Bearer sk-client",
                "cookie": "a=b",
                "x-request-id": "mine",
                "traceparent": "00-1-2-01",
            },
        )
    headers = worker.seen[-1].headers
    assert headers["authorization"] == "Bearer sk-worker"
    assert headers["traceparent"] == "00-1-2-01"
    assert "cookie" not in headers
    assert headers["x-request-id"] != "mine"


async def test_a_clients_request_id_is_echoed_and_the_engines_is_unique(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    for _ in range(2):
        response = await gateway.post(CHAT, json=body(), headers={"x-request-id": "same"})
        assert response.headers["x-request-id"] == "same"
    assert worker.seen[0].headers["x-request-id"] != worker.seen[1].headers["x-request-id"]


@pytest.mark.parametrize("theirs", [b"a\tb\xff", b"x" * 129, b"", b"a b"])
async def test_an_unusable_request_id_is_replaced(
    gateway: httpx2.AsyncClient, theirs: bytes
) -> None:
    response = await gateway.post(CHAT, json=body(), headers={b"x-request-id": theirs})
    assert response.status_code == 200
    assert response.headers["x-request-id"].startswith("req-")


async def test_a_packed_answer_is_unpacked(gateway: httpx2.AsyncClient, worker: FakeWorker) -> None:
    async def pack(_: Seen, writer: asyncio.StreamWriter) -> None:
        packed = gzip.compress(COMPLETION)
        await send(writer, 200, packed, extra="content-encoding: gzip\r\n")

    worker.answer = pack
    response = await gateway.post(CHAT, json=body(), headers={"accept-encoding": "identity"})
    assert response.content == COMPLETION
    assert "content-encoding" not in response.headers


# --- what a worker does wrong ---


async def broken_stream(worker: FakeWorker, client: httpx2.AsyncClient) -> list[bytes]:
    response = await client.post(CHAT, json=body(stream=True))
    assert response.status_code == 200
    assert await in_flight(client) == (0, 0, 0)
    return response.content.removesuffix(b"\n\n").split(b"\n\n")


def reset(writer: asyncio.StreamWriter) -> None:
    linger = struct.pack("ii", 1, 0)
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    writer.transport.abort()


async def test_a_stream_cut_within_an_event_ends_in_a_readable_error(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    async def die(_: Seen, writer: asyncio.StreamWriter) -> None:
        await start_stream(writer)
        await send_piece(writer, delta("He"))
        await send_piece(writer, b'data: {"id":"c1","choi')
        await asyncio.sleep(0.05)
        reset(writer)

    worker.answer = die
    events = await broken_stream(worker, gateway)
    assert events[0] + b"\n\n" == delta("He")
    error = json.loads(events[1].removeprefix(b"data: "))["error"]
    assert error["code"] == "upstream_incomplete"
    assert events[2:] == [b"data: [DONE]"]


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [DONE],
        [b": only a comment\n\n", DONE],
        [delta("He")],
        [delta("He"), b"data: {"],
        [event(choices=[], usage=USAGE), DONE],
    ],
)
async def test_a_stream_that_ends_early_never_passes_for_a_whole_one(
    gateway: httpx2.AsyncClient, worker: FakeWorker, pieces: list[bytes]
) -> None:
    async def end_early(_: Seen, writer: asyncio.StreamWriter) -> None:
        await start_stream(writer)
        for piece in pieces:
            await send_piece(writer, piece)
        await end_stream(writer)

    worker.answer = end_early
    events = await broken_stream(worker, gateway)
    assert json.loads(events[-2].removeprefix(b"data: "))["error"]["code"] == "upstream_incomplete"
    assert events[-1] == b"data: [DONE]"
    assert events.count(b"data: [DONE]") == 1
    metrics = (await gateway.get("/metrics")).text
    assert 'reason="upstream_incomplete"' in metrics


async def test_an_engines_error_event_passes_unchanged(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    error = event(error={"message": "kv load failed", "type": "x", "param": None, "code": 500})

    async def fail(_: Seen, writer: asyncio.StreamWriter) -> None:
        await start_stream(writer)
        await send_piece(writer, delta("He") + error)
        await end_stream(writer)

    worker.answer = fail
    events = await broken_stream(worker, gateway)
    assert [events[1] + b"\n\n", events[2]] == [error, b"data: [DONE]"]


async def test_an_event_of_megabytes_in_many_reads_arrives_whole(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    big = delta("안녕🙂" * 200_000)

    async def stream(_: Seen, writer: asyncio.StreamWriter) -> None:
        await start_stream(writer)
        for start in range(0, len(big), 100_001):
            await send_piece(writer, big[start : start + 100_001])
        await send_piece(writer, DONE)
        await end_stream(writer)

    worker.answer = stream
    response = await gateway.post(CHAT, json=body(stream=True))
    assert response.content == big + DONE


async def test_silence_is_filled_with_comments_of_one_line(worker: FakeWorker) -> None:
    async def wait(_: Seen, writer: asyncio.StreamWriter) -> None:
        await start_stream(writer)
        await asyncio.sleep(0.2)
        await send_piece(writer, delta("He", "stop") + DONE)
        await end_stream(writer)

    worker.answer = wait
    async with running_gateway(worker.url, sse_keep_alive_s=0.02) as client:
        await until_ready(client)
        response = await client.post(CHAT, json=body(stream=True))
    comments, _, rest = response.content.partition(b"data: ")
    assert comments.count(b": keep-alive\n") >= 2
    assert comments.replace(b": keep-alive\n", b"") == b""
    assert b"data: " + rest == delta("He", "stop") + DONE


async def test_a_worker_that_stays_silent_is_a_504_or_an_error_event(worker: FakeWorker) -> None:
    async def hang(seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.json.get("stream"):
            await start_stream(writer)
        await asyncio.sleep(3600)

    worker.answer = hang
    async with running_gateway(
        worker.url, header_timeout_s=0.1, chunk_timeout_s=0.1, sse_keep_alive_s=0.05
    ) as client:
        await until_ready(client)
        whole = await client.post(CHAT, json=body())
        stream = await client.post(CHAT, json=body(stream=True))
    assert (whole.status_code, error_of(whole)["code"]) == (504, "upstream_timeout")
    assert b'"upstream_timeout"' in stream.content


async def test_a_dead_workers_request_goes_to_another_one() -> None:
    async with fake_worker() as first, fake_worker() as second:
        async with running_gateway(first.url, second.url, worker_poll_s=60) as client:
            await until_ready(client)
            first.die()
            for _ in range(8):
                response = await client.post(CHAT, json=body())
                assert response.status_code == 200
            assert response.headers["x-radixgate-worker"] == second.url
        assert len(second.seen) == 8


async def test_a_request_that_kills_its_worker_before_a_byte_is_tried_once_more_only() -> None:
    async def die(_: Seen, writer: asyncio.StreamWriter) -> None:
        reset(writer)

    async with (
        fake_worker(answer=die) as a,
        fake_worker(answer=die) as b,
        fake_worker(answer=die) as c,
        running_gateway(a.url, b.url, c.url, worker_poll_s=60) as client,
    ):
        await until_ready(client)
        response = await client.post(CHAT, json=body())
        assert (response.status_code, error_of(response)["code"]) == (502, "upstream_unreachable")
        assert len(a.seen) + len(b.seen) + len(c.seen) == 2


async def test_a_connection_that_went_stale_is_no_failure_of_its_worker() -> None:
    async def answer_once(seen: Seen, writer: asyncio.StreamWriter) -> None:
        # The request on the used connection gets no byte, as when the worker just closed it.
        if answered.is_set():
            answered.clear()
            reset(writer)
            return
        answered.set()
        await send(writer, 200, COMPLETION)

    answered = asyncio.Event()
    async with (
        fake_worker(answer=answer_once) as worker,
        running_gateway(worker.url, worker_poll_s=60) as client,
    ):
        await until_ready(client)
        for _ in range(2):
            assert (await client.post(CHAT, json=body())).status_code == 200
        assert len(worker.seen) == 3
        assert (await client.get("/ready")).status_code == 200


async def test_without_a_worker_it_is_503_with_retry_after() -> None:
    async with fake_worker() as worker, running_gateway(worker.url) as client:
        await until_ready(client)
        worker.die()

        async def is_down() -> bool:
            return (await client.get("/ready")).status_code == 503

        await until(is_down)
        response = await client.post(CHAT, json=body())
        assert (response.status_code, error_of(response)["code"]) == (503, "no_ready_worker")
        assert response.headers["retry-after"]


async def test_a_model_that_a_worker_not_seen_yet_may_serve_is_503_not_404(
    unused_tcp_port: int,
) -> None:
    async with running_gateway(f"http://127.0.0.1:{unused_tcp_port}") as client:
        response = await client.post(CHAT, json=body())
        assert response.status_code == 503


async def test_a_worker_that_comes_back_gets_requests_again(unused_tcp_port: int) -> None:
    url = f"http://127.0.0.1:{unused_tcp_port}"
    async with running_gateway(url) as client:
        assert (await client.get("/ready")).status_code == 503
        worker = FakeWorker()
        await worker.start(unused_tcp_port)
        try:
            await until_ready(client)
            assert (await client.post(CHAT, json=body())).status_code == 200
        finally:
            worker.die()


# --- clients that leave ---


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_frees_its_worker(worker: FakeWorker, stream: bool) -> None:
    arrived = asyncio.Event()

    async def hang(_: Seen, writer: asyncio.StreamWriter) -> None:
        if stream:
            await start_stream(writer)
            await send_piece(writer, delta("He"))
        arrived.set()
        await asyncio.sleep(3600)

    worker.answer = hang
    async with running_gateway(worker.url) as client:
        await until_ready(client)
        leaving = asyncio.create_task(client.post(CHAT, json=body(stream=stream)))
        await arrived.wait()
        leaving.cancel()
        await asyncio.wait({leaving})
        await worker.client_left.wait()

        async def all_is_free() -> bool:
            return await in_flight(client) == (0, 0, 0)

        await until(all_is_free)
        phase = "streaming" if stream else "waiting"
        metrics = (await client.get("/metrics")).text
        assert f'radixgate_client_disconnects_total{{phase="{phase}"}} 1.0' in metrics


async def test_what_is_over_the_limit_is_refused_and_the_place_comes_back(
    worker: FakeWorker,
) -> None:
    arrived, go_on = asyncio.Event(), asyncio.Event()

    async def wait(_: Seen, writer: asyncio.StreamWriter) -> None:
        arrived.set()
        await go_on.wait()
        await send(writer, 200, COMPLETION)

    worker.answer = wait
    async with running_gateway(worker.url, max_inflight_per_worker=1) as client:
        await until_ready(client)
        first = asyncio.create_task(client.post(CHAT, json=body()))
        await arrived.wait()
        refused = await client.post(CHAT, json=body())
        assert (refused.status_code, error_of(refused)["code"]) == (503, "server_is_overloaded")
        assert refused.headers["retry-after"]
        go_on.set()
        assert (await first).status_code == 200
        assert (await client.post(CHAT, json=body())).status_code == 200


# --- what is told of the route ---


async def test_route_headers_are_only_there_when_asked_for(worker: FakeWorker) -> None:
    for shown in (True, False):
        async with running_gateway(worker.url, route_headers=shown) as client:
            await until_ready(client)
            for stream in (True, False):
                headers = (await client.post(CHAT, json=body(stream=stream))).headers
                assert ("x-radixgate-worker" in headers) is shown
                assert ("x-radixgate-route" in headers) is shown


async def test_metrics_count_by_configured_names_only(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    await gateway.post(CHAT, json=body())

    async def num_lines() -> int:
        return len((await gateway.get("/metrics")).text.splitlines())

    await gateway.post(CHAT, json=body(model="junk"))
    before = await num_lines()
    for number in range(50):
        await gateway.post(CHAT, json=body(model=f"junk-{number}"))
    assert await num_lines() == before


async def test_what_the_engine_counted_is_metered(
    gateway: httpx2.AsyncClient, worker: FakeWorker
) -> None:
    for stream in (True, False):
        await gateway.post(CHAT, json=body(stream=stream))
    metrics = (await gateway.get("/metrics")).text
    for name, count in (("prompt", 24), ("completion", 4), ("cached_prompt", 8)):
        assert f'radixgate_{name}_tokens_total{{model="m"}} {count}.0' in metrics
    assert 'radixgate_time_to_first_token_seconds_count{endpoint="/v1/chat/completions"' in metrics
