"""The routes that FastAPI itself answers: models, health, metrics, version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from cache_router.errors import UnknownModelError
from cache_router.worker_registry import ServedModel
from gateway.error_responses import error_response
from gateway.health import health_report, is_ready
from gateway.services import Services


def control_routes(services: Services) -> APIRouter:
    """Make the router of these routes over one gateway's parts."""
    router = APIRouter()

    @router.get("/v1/models", tags=["models"])
    async def list_models() -> dict[str, Any]:
        """List the models, adapters included, that some worker serves."""
        return {"object": "list", "data": [_item(model) for model in services.registry.models()]}

    # Ids contain slashes, plain or as %2F.
    @router.get("/v1/models/{model_id:path}", tags=["models"])
    async def get_model(model_id: str) -> Response:
        """Describe one model."""
        for model in services.registry.models():
            if model.name == model_id:
                return JSONResponse(_item(model))
        error = error_response(UnknownModelError(model_id))
        return Response(error.body, error.status, media_type="application/json")

    @router.head("/live", include_in_schema=False)
    @router.get("/live", tags=["operations"])
    async def live() -> dict[str, str]:
        """Say that the process runs."""
        return {"status": "alive"}

    @router.head("/ready", include_in_schema=False)
    @router.get("/ready", tags=["operations"])
    async def ready() -> Response:
        """Say whether a request can be answered: some worker is up."""
        if is_ready(services):
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not ready"}, 503, {"retry-after": "1"})

    @router.head("/health", include_in_schema=False)
    @router.get("/health", tags=["operations"])
    async def health() -> dict[str, Any]:
        """Describe workers, models, tokenizers and the index, for people."""
        return health_report(services)

    @router.get("/metrics", tags=["operations"])
    async def metrics() -> Response:
        """Prometheus metrics."""
        # generate_latest takes the registry's locks; it reads memory only.
        return Response(generate_latest(services.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/version", tags=["operations"])
    async def show_version() -> dict[str, str]:
        """Say which version this is."""
        return {"version": services.version}

    return router


def _item(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": model.owned_by,
        # A folder on a worker's disk is nobody's business out here.
        "root": model.name if model.root.startswith("/") else model.root,
        "parent": model.parent,
        "max_model_len": model.max_model_len,
    }
