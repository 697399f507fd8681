"""Routes that any worker of a model can answer: `/tokenize`, `/detokenize`."""

from __future__ import annotations

import logging

from cache_router.errors import RadixgateError, UpstreamError
from cache_router.types import RouteQuery
from gateway.asgi import (
    ClientGoneError,
    Receive,
    Responder,
    Scope,
    Send,
    client_present,
    read_body,
)
from gateway.error_responses import error_response, route_error
from gateway.generation_request import model_of
from gateway.json_body import JsonBody
from gateway.relay import relay_whole
from gateway.services import Services

logger = logging.getLogger(__name__)


class PassThroughEndpoint:
    """One `POST` route, forwarded under the same path to the least loaded worker."""

    def __init__(self, services: Services, path: str) -> None:
        self._services = services
        self._path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        responder = Responder(scope, send)
        if scope["method"] != "POST":
            error = route_error(405, scope["method"], self._path)
            await responder.send_error(error, ((b"allow", b"POST"),))
            return
        try:
            with self._services.intake.slot():
                limit_bytes = self._services.settings.max_body_bytes
                raw = await read_body(scope, receive, limit_bytes)
                async with client_present(receive):
                    await self._answer(responder, raw)
        except ClientGoneError:
            self._services.metrics.count_disconnect("waiting")
        except RadixgateError as error:
            if isinstance(error, UpstreamError):
                logger.warning("request %s: %s", responder.request_id, error)
            if responder.started:
                raise
            await responder.send_error(error_response(error))

    async def _answer(self, responder: Responder, raw: bytes) -> None:
        services = self._services
        body = JsonBody(raw)
        root = services.prompt_root(model_of(body), None)
        worker_id = services.router.route(RouteQuery(root, ())).worker_id
        response = await services.client.send_repeatable(
            worker_id,
            services.discovery.target(worker_id).origin,
            b"POST",
            self._path,
            (
                (b"content-type", b"application/json"),
                (b"x-request-id", responder.request_id.encode()),
            ),
            raw,
        )
        try:
            await relay_whole(response, responder, [], worker_id)
        finally:
            response.close()
