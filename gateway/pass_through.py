"""Routes that any worker of a model can answer: `/tokenize`, `/detokenize`."""

from __future__ import annotations

import logging

from cache_router.errors import UpstreamUnreachableError
from cache_router.types import RouteQuery, WorkerId
from gateway.generation_request import model_of
from gateway.json_body import JsonBody
from gateway.post_endpoint import Exchange, PostEndpoint
from gateway.relay import relay_whole
from gateway.upstream_client import UpstreamRequest
from gateway.upstream_response import UpstreamResponse

logger = logging.getLogger(__name__)


class PassThroughEndpoint(PostEndpoint):
    """Forwards a body under the route's own path to the least loaded worker."""

    async def answer(self, exchange: Exchange, raw: bytes) -> None:
        """Forward, and pass the answer on."""
        services = self.services
        body = JsonBody(raw)
        model = model_of(body)
        root = services.prompt_root(model, None)
        exchange.model = model
        exchange.phase = "waiting"
        worker_id = services.router.route(RouteQuery(root, ())).worker_id
        try:
            response = await self._send(exchange, raw, worker_id)
        except UpstreamUnreachableError as error:
            services.discovery.suspect(worker_id)
            if len(services.registry.workers_for(model)) == 1:
                raise
            logger.warning("request %s re-routed: %s", exchange.responder.request_id, error)
            services.metrics.count_retry(worker_id)
            excluded = frozenset({worker_id})
            worker_id = services.router.route(RouteQuery(root, (), excluded=excluded)).worker_id
            response = await self._send(exchange, raw, worker_id)
        try:
            await relay_whole(response, exchange.responder, [], worker_id)
        finally:
            response.close()

    async def _send(self, exchange: Exchange, raw: bytes, worker_id: WorkerId) -> UpstreamResponse:
        services = self.services
        return await services.client.send_repeatable(
            UpstreamRequest(
                worker_id,
                services.discovery.target(worker_id).origin,
                b"POST",
                self.path,
                (
                    (b"content-type", b"application/json"),
                    (b"x-request-id", exchange.responder.request_id.encode()),
                ),
                raw,
            )
        )
