"""The generation routes: a request's one way from bytes to a worker and back."""

from __future__ import annotations

import logging
import time

from cache_router.errors import (
    UpstreamConnectError,
    UpstreamStaleError,
    UpstreamUnreachableError,
)
from cache_router.types import RouteQuery, WorkerId
from gateway.attempt import Attempt, Sending
from gateway.generation_request import Endpoint, GenerationRequest
from gateway.post_endpoint import Exchange, PostEndpoint
from gateway.services import Services

logger = logging.getLogger(__name__)

# A request may be what its worker died of: it is sent, and workers are found dead, twice at most.
_MAX_SENT = 2
_MAX_UNREACHABLE = 2


class GenerationEndpoint(PostEndpoint):
    """`POST /v1/chat/completions` or `POST /v1/completions`."""

    def __init__(self, services: Services, endpoint: Endpoint) -> None:
        super().__init__(services, endpoint.value)
        self._endpoint = endpoint

    async def answer(self, exchange: Exchange, raw: bytes) -> None:
        """Parse, tokenize, route and relay; what fails before the first byte can be re-routed."""
        services, metrics = self.services, self.services.metrics
        request = GenerationRequest.parse(self._endpoint, raw)
        model = request.model
        root = services.prompt_root(model, request.cache_salt)
        exchange.model, exchange.is_stream = model, request.is_stream

        exchange.phase = "tokenizing"
        began_s = time.perf_counter()
        tokenized = await services.tokenizer.tokenize(request)
        metrics.tokenize.labels(model).observe(time.perf_counter() - began_s)

        sending = Sending(request, tokenized, request.upstream_body())
        excluded: frozenset[WorkerId] = frozenset()
        num_sent = 0
        while True:
            query = RouteQuery(
                root,
                tokenized.prompts,
                request.max_output_tokens,
                request.session_key,
                excluded,
            )
            began_s = time.perf_counter()
            decision = services.router.route(query)
            metrics.route.labels(model).observe(time.perf_counter() - began_s)
            metrics.count_decision(model, decision)
            with services.router.reserve(query, decision) as reservation:
                try:
                    await Attempt(services, exchange, sending, decision, reservation).run(
                        fresh=num_sent > 0
                    )
                except UpstreamUnreachableError as error:
                    num_sent += not isinstance(error, UpstreamConnectError)
                    # Nothing is known against a worker whose idle connection had gone stale.
                    if not isinstance(error, UpstreamStaleError):
                        services.discovery.suspect(decision.worker_id)
                        excluded |= {decision.worker_id}
                    others = len(services.registry.workers_for(model)) - len(excluded)
                    spent = num_sent == _MAX_SENT or len(excluded) == _MAX_UNREACHABLE
                    if exchange.responder.started or spent or not others:
                        raise
                    request_id = exchange.responder.request_id
                    logger.warning("request %s re-routed: %s", request_id, error)
                    metrics.count_retry(decision.worker_id)
                else:
                    return
