"""The one FastAPI app: hot routes as raw ASGI endpoints, everything else as FastAPI does it."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from gateway.asgi import Message, Receive, Responder, Scope, Send
from gateway.control_routes import control_routes
from gateway.error_responses import INTERNAL_ERROR, route_error
from gateway.explain import ExplainEndpoint
from gateway.generation import GenerationEndpoint
from gateway.generation_request import Endpoint
from gateway.openapi import HOT_ROUTE_PATHS, describe_hot_routes
from gateway.pass_through import PassThroughEndpoint
from gateway.services import Services

_HOT = frozenset(HOT_ROUTE_PATHS)


class _RequestIdMiddleware:
    """Puts `x-request-id` on what FastAPI answers; the hot routes do it themselves."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _HOT:
            await self._app(scope, receive, send)
            return
        echoed_id = Responder(scope, send).echoed_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", echoed_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


def build_app(services: Services) -> FastAPI:
    """Make the app over one gateway's parts; it starts and stops nothing itself."""
    app = FastAPI(
        title="radixgate",
        version=services.version,
        summary="OpenAI-compatible gateway that routes to the engine holding the KV cache.",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    endpoints: dict[str, Any] = {
        endpoint.value: GenerationEndpoint(services, endpoint) for endpoint in Endpoint
    }
    for path in ("/tokenize", "/detokenize"):
        endpoints[path] = PassThroughEndpoint(services, path)
    endpoints["/v1/route/explain"] = ExplainEndpoint(services, "/v1/route/explain")
    for path, endpoint in endpoints.items():
        app.router.routes.append(Route(path, endpoint, name=path))
    app.include_router(control_routes(services))
    describe_hot_routes(app)
    app.add_middleware(_RequestIdMiddleware)

    @app.exception_handler(HTTPException)
    async def answer_http_error(request: Request, error: HTTPException) -> Response:
        response = route_error(error.status_code, request.method, request.url.path)
        headers = dict(error.headers or {})
        return Response(
            response.body, response.status, headers=headers, media_type="application/json"
        )

    @app.exception_handler(Exception)
    async def answer_crash(_: Request, __: Exception) -> Response:
        return Response(INTERNAL_ERROR.body, INTERNAL_ERROR.status, media_type="application/json")

    return app
