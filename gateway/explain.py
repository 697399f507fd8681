"""`POST /v1/route/explain`: where a request would go and why; nothing runs."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from cache_router.errors import RadixgateError
from cache_router.types import Candidate, RouteQuery
from gateway.asgi import ClientGoneError, Receive, Responder, Scope, Send, read_body
from gateway.error_responses import error_response, route_error
from gateway.generation_request import Endpoint, GenerationRequest
from gateway.json_body import JsonBody
from gateway.services import Services

logger = logging.getLogger(__name__)


class ExplainEndpoint:
    """Takes the body of a chat or a completions request and says how it would be routed."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        responder = Responder(scope, send)
        if scope["method"] != "POST":
            error = route_error(405, scope["method"], scope["path"])
            await responder.send_error(error, ((b"allow", b"POST"),))
            return
        try:
            with self._services.intake.slot():
                limit_bytes = self._services.settings.max_body_bytes
                raw = await read_body(scope, receive, limit_bytes)
                receipt = await self._explain(raw)
            await responder.send_json(200, msgspec.json.encode(receipt))
        except ClientGoneError:
            self._services.metrics.count_disconnect("reading")
        except RadixgateError as error:
            await responder.send_error(error_response(error))

    async def _explain(self, raw: bytes) -> dict[str, Any]:
        services = self._services
        is_chat = "messages" in JsonBody(raw).fields
        request = GenerationRequest.parse(Endpoint.CHAT if is_chat else Endpoint.COMPLETIONS, raw)
        # Hashed under the salt that the body carries: nobody sees what other salts have cached.
        root = services.prompt_root(request.model, request.cache_salt)
        tokenized = await services.tokenizer.tokenize(request)
        query = RouteQuery(root, tokenized.prompts, request.max_output_tokens, request.session_key)
        decision = services.router.route(query)
        return {
            "object": "route.explanation",
            "model": request.model,
            "worker": decision.worker_id,
            "reason": decision.reason,
            "predicted_cached_tokens": decision.predicted_cached_tokens,
            "prompt_tokens": query.num_prompt_tokens if query.prompts else None,
            "tokenized_by": tokenized.source,
            "candidates": [_terms(candidate) for candidate in decision.candidates],
        }


def _terms(candidate: Candidate) -> dict[str, Any]:
    return {
        "worker": candidate.worker_id,
        "cached_tokens": candidate.cached_tokens,
        "uncached_tokens": candidate.uncached_tokens,
        "waiting_tokens": candidate.waiting_tokens,
        "running_tokens": candidate.running_tokens,
        "cost_tokens": candidate.cost_tokens,
        "num_running": candidate.num_running,
        "trust": candidate.trust,
    }
