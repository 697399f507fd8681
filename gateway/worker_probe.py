"""One look at a vLLM server: is it up, which process, what does it serve, where are its events."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from cache_router.errors import UpstreamError, UpstreamProtocolError, UpstreamTimeoutError
from cache_router.worker_registry import EventEndpoint, ServedModel
from gateway.upstream_client import Origin, UpstreamClient, UpstreamRequest

_START_TIME = re.compile(rb"^process_start_time_seconds(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_MAX_BYTES = 16 * 1024 * 1024


class _Model(msgspec.Struct):
    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    created: int = 0
    owned_by: str = ""


class _ModelList(msgspec.Struct):
    data: list[_Model]


class _EventSource(msgspec.Struct):
    endpoint: str | None = None
    replay_endpoint: str | None = None
    topic: str = ""
    enable_kv_cache_events: bool = True


_MODELS = msgspec.json.Decoder(_ModelList)
_SOURCES = msgspec.json.Decoder(dict[str, _EventSource])


@dataclass(frozen=True, slots=True)
class EventSources:
    """What a server says of its event publishers."""

    by_rank: Mapping[int, EventEndpoint]
    problem: str | None
    """Why there are none that can be followed, None if there are."""


class WorkerProbe:
    """Asks one server; every answer is bounded in time and size."""

    def __init__(self, client: UpstreamClient, url: str, timeout_s: float) -> None:
        """Ask the server at `url` with `timeout_s` seconds for each answer."""
        self._client = client
        self._url = url
        self._origin = Origin.parse(url)
        self._timeout_s = timeout_s

    async def _get(self, path: str) -> tuple[int, bytes]:
        request = UpstreamRequest(self._url, self._origin, b"GET", path)
        try:
            async with asyncio.timeout(self._timeout_s):
                response = await self._client.send_repeatable(request)
                try:
                    return response.status, await response.read_all(_MAX_BYTES)
                finally:
                    response.close()
        except TimeoutError as error:
            raise UpstreamTimeoutError(
                self._url, f"did not answer {path} in {self._timeout_s:g} s"
            ) from error

    async def check_health(self) -> None:
        """Ask whether the server can take requests.

        Raises:
            UpstreamError: It cannot, or does not answer.
        """
        status, _ = await self._get("/health")
        if status != 200:
            raise UpstreamProtocolError(self._url, f"answers /health with status {status}")

    async def models(self) -> list[ServedModel]:
        """Ask what is served.

        Raises:
            UpstreamError: No answer, or not a model list.
        """
        status, body = await self._get("/v1/models")
        if status in (401, 403):
            raise UpstreamProtocolError(
                self._url, "refuses the gateway's key; set RADIXGATE_WORKER_API_KEY"
            )
        try:
            listed = _MODELS.decode(body).data
        except msgspec.MsgspecError as error:
            raise UpstreamProtocolError(
                self._url, f"answers /v1/models with status {status} and no model list"
            ) from error
        return [
            ServedModel(
                name=model.id,
                root=model.root or model.id,
                max_model_len=model.max_model_len,
                parent=model.parent,
                created=model.created,
                owned_by=model.owned_by,
            )
            for model in listed
        ]

    async def process_start_s(self) -> float | None:
        """Ask when the process started, in seconds since the Unix epoch; None if it won't say."""
        try:
            status, body = await self._get("/metrics")
        except UpstreamError:
            return None
        found = _START_TIME.search(body) if status == 200 else None
        try:
            start_s = float(found[1]) if found else None
        except ValueError:
            return None
        # NaN differs even from itself: each look would find another process.
        return None if start_s is None or math.isnan(start_s) else start_s

    async def event_sources(self) -> EventSources:
        """Ask where the KV events are published.

        Raises:
            UpstreamError: It does not answer.
        """
        status, body = await self._get("/kv_event_sources")
        if status == 404:
            return EventSources(
                {}, "the server has no /kv_event_sources; give --worker URL,events=tcp://..."
            )
        try:
            sources = _SOURCES.decode(body)
            ranks = {int(rank): source for rank, source in sources.items()}
        except (msgspec.MsgspecError, ValueError):
            return EventSources({}, f"/kv_event_sources answers status {status} and no sources")
        by_rank: dict[int, EventEndpoint] = {}
        for rank, source in ranks.items():
            if not source.enable_kv_cache_events or source.endpoint is None:
                continue
            if not is_bound(source.endpoint):
                return EventSources(
                    {},
                    f"the engine connects to {source.endpoint} instead of listening; "
                    "start it with an endpoint like tcp://*:5557",
                )
            by_rank[rank] = EventEndpoint(
                reachable(source.endpoint, self._url),
                None
                if source.replay_endpoint is None
                else reachable(source.replay_endpoint, self._url),
                source.topic,
            )
        if not by_rank:
            return EventSources({}, "the engine publishes no KV events; see --kv-events-config")
        return EventSources(by_rank, None)


def is_bound(endpoint: str) -> bool:
    """Whether vLLM listens there: it binds wildcards and ipc, and connects to anything else."""
    if endpoint.startswith("ipc://"):
        return True
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    # Of tcp://*:0 it reports the node's own address, so an address may be one it listens on.
    return endpoint.startswith("tcp://") and host not in ("127.0.0.1", "localhost", "0.0.0.0")


def reachable(endpoint: str, worker_url: str) -> str:
    """Put the worker's own host where an endpoint as configured has a wildcard."""
    for wildcard in ("tcp://*:", "tcp://[::]:", "tcp://:::"):
        if endpoint.startswith(wildcard):
            host = urlsplit(worker_url).hostname or "127.0.0.1"
            host = f"[{host}]" if ":" in host else host
            return f"tcp://{host}:{endpoint.removeprefix(wildcard)}"
    return endpoint
