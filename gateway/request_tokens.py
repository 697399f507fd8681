"""The tokenizer as the routes see it: a request in, token ids out, and checks behind its back."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from random import Random
from types import TracebackType
from typing import Any, Self

import msgspec

from cache_router.errors import UpstreamProtocolError
from cache_router.router import CacheRouter
from cache_router.settings import Settings
from cache_router.types import RouteQuery, TokenIds
from cache_router.worker_registry import ServedModel, WorkerRegistry
from gateway.generation_request import Endpoint, GenerationRequest
from gateway.tokenizing.service import (
    Tokenized,
    TokenizerService,
    TokenizerState,
    TokenizerStats,
)
from gateway.upstream_client import Origin, UpstreamClient, UpstreamRequest

logger = logging.getLogger(__name__)

_MAX_ANSWER_BYTES = 64 * 1024 * 1024


class _TokenizeAnswer(msgspec.Struct):
    tokens: list[int]


_ANSWER = msgspec.json.Decoder(_TokenizeAnswer)


class EngineTokenizer:
    """Asks `/tokenize` of the least loaded worker of a model."""

    def __init__(
        self, registry: WorkerRegistry, router: CacheRouter, client: UpstreamClient
    ) -> None:
        self._registry = registry
        self._router = router
        self._client = client

    async def tokenize(self, model: str, payload: dict[str, Any]) -> list[int]:
        """Return the engine's token ids.

        Raises:
            NoWorkerError: No worker of the model is ready.
            UpstreamError: The worker failed, or refused the payload.
        """
        root = self._registry.prompt_root(model)
        worker_id = self._router.route(RouteQuery(root, ())).worker_id
        info = self._registry.get(worker_id)
        assert info is not None, "the router only names workers of the registry"
        response = await self._client.send_repeatable(
            UpstreamRequest(
                worker_id,
                Origin.parse(info.url),
                b"POST",
                "/tokenize",
                ((b"content-type", b"application/json"),),
                msgspec.json.encode(payload),
            )
        )
        try:
            body = await response.read_all(_MAX_ANSWER_BYTES)
        finally:
            response.close()
        try:
            return _ANSWER.decode(body).tokens
        except msgspec.MsgspecError as error:
            raise UpstreamProtocolError(
                worker_id, f"answers /tokenize with status {response.status} and no tokens"
            ) from error


class RequestTokens:
    """Token ids for requests; checks a sampled share against the engine in the background."""

    def __init__(
        self,
        settings: Settings,
        registry: WorkerRegistry,
        engine: EngineTokenizer,
        rng: Random,
    ) -> None:
        self._service = TokenizerService(settings, engine, settings.hub_cache_folder, rng.random)
        self._registry = registry
        self._roots: dict[str, str] = {}
        self._checks = asyncio.TaskGroup()
        self._running: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        """Be ready to check in the background."""
        await self._checks.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop the threads, and give up running checks."""
        self._service.close()
        for check in self._running:
            check.cancel()
        await self._checks.__aexit__(exc_type, exc, traceback)

    async def learn(self, models: Sequence[ServedModel]) -> None:
        """Load what models need before a worker that serves them gets its first request."""
        roots = {model.name: model.root for model in models}
        for model in models:
            # An adapter's prompts are tokenized as its base model's.
            root = roots.get(model.parent or model.name, model.root)
            known = self._roots.get(model.name)
            served = {
                other.root
                for worker in self._registry.workers_for(model.parent or model.name)
                for other in worker.models
            }
            # Workers may keep one model under different paths: the first that was loaded stays.
            if known is not None and known in served:
                root = known
            self._roots[model.name] = root
            # Also if it is known: another worker's look may have it loading at this moment.
            await self._service.add_model(model.name, root)

    async def tokenize(self, request: GenerationRequest) -> Tokenized:
        """Return a request's token ids, or none if they cannot be known exactly."""
        model, fields, num_bytes = request.model, request.fields, len(request.body.raw)
        if request.endpoint is Endpoint.CHAT:
            return await self._service.tokenize_chat(model, fields, num_bytes)
        return await self._service.tokenize_completion(model, fields, num_bytes)

    def check(
        self, request: GenerationRequest, tokenized: Tokenized, num_prompt_tokens: int
    ) -> None:
        """Hold what was routed by against what the engine did with it."""
        if tokenized.source != "gateway" or len(tokenized.prompts) != 1:
            return
        (token_ids,) = tokenized.prompts
        self._service.note_prompt_tokens(request.model, len(token_ids), num_prompt_tokens)
        if self._service.should_sample():
            check = self._checks.create_task(self._compare(request, token_ids), name="parity-check")
            self._running.add(check)
            check.add_done_callback(self._running.discard)

    async def _compare(self, request: GenerationRequest, token_ids: TokenIds) -> None:
        try:
            await self._service.check_parity(request.model, request.fields, token_ids)
        except Exception:
            # A check behind a request's back must not end the gateway in front of it.
            logger.exception("a parity check for %s failed in the gateway", request.model)

    def states(self) -> Mapping[str, TokenizerState]:
        """How each model is tokenized."""
        return self._service.states()

    def stats(self) -> TokenizerStats:
        """Counters of all models together."""
        return self._service.stats()
