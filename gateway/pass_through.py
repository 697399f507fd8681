"""Routes that any worker of a model can answer: `/tokenize`, `/detokenize`."""

from __future__ import annotations

from cache_router.types import RouteQuery
from gateway.generation_request import model_of
from gateway.json_body import JsonBody
from gateway.post_endpoint import Exchange, PostEndpoint
from gateway.relay import relay_whole
from gateway.upstream_client import UpstreamRequest


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
        request = UpstreamRequest(
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
        response = await services.client.send_repeatable(request)
        try:
            await relay_whole(response, exchange.responder, [], worker_id)
        finally:
            response.close()
