"""`POST /v1/route/explain`: where a request would go and why; nothing runs."""

from __future__ import annotations

from typing import Any

import msgspec

from cache_router.types import Candidate, RouteQuery
from gateway.generation_request import Endpoint, GenerationRequest
from gateway.json_body import JsonBody
from gateway.post_endpoint import Exchange, PostEndpoint


class ExplainEndpoint(PostEndpoint):
    """Takes the body of a chat or a completions request and says how it would be routed."""

    async def answer(self, exchange: Exchange, raw: bytes) -> None:
        """Say it, as one JSON object."""
        services = self.services
        body = JsonBody(raw)
        endpoint = Endpoint.CHAT if "messages" in body.fields else Endpoint.COMPLETIONS
        request = GenerationRequest.of(endpoint, body)
        # Hashed under the salt that the body carries: nobody sees what other salts have cached.
        root = services.prompt_root(request.model, request.cache_salt)
        exchange.model = request.model
        exchange.phase = "tokenizing"
        tokenized = await services.tokenizer.tokenize(request)
        query = RouteQuery(root, tokenized.prompts, request.max_output_tokens, request.session_key)
        decision = services.router.route(query)
        receipt = {
            "object": "route.explanation",
            "model": request.model,
            "worker": decision.worker_id,
            "reason": decision.reason,
            "predicted_cached_tokens": decision.predicted_cached_tokens,
            "prompt_tokens": query.num_prompt_tokens if query.prompts else None,
            "tokenized_by": tokenized.source,
            "candidates": [_terms(candidate) for candidate in decision.candidates],
        }
        await exchange.responder.send_json(200, msgspec.json.encode(receipt))


def _terms(candidate: Candidate) -> dict[str, Any]:
    return {
        "worker": candidate.worker_id,
        "cached_tokens": candidate.cached_tokens,
        "tokens_by_tier": candidate.tokens_by_tier,
        "uncached_tokens": candidate.uncached_tokens,
        "load_tokens": candidate.load_tokens,
        "waiting_tokens": candidate.waiting_tokens,
        "running_tokens": candidate.running_tokens,
        "cost_tokens": candidate.cost_tokens,
        "num_running": candidate.num_running,
        "trust": candidate.trust,
    }
