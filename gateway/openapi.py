"""OpenAPI entries of the hot routes, which FastAPI does not see as its own."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI

_PROMPT = {
    "description": "A text, several texts, token ids, or several lists of token ids.",
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        {
            "type": "array",
            "items": {"type": "array", "items": {"type": "integer", "minimum": 0}},
        },
    ],
}
_MESSAGES = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": {"type": "string"},
            "content": {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "object"}},
                    {"type": "null"},
                ]
            },
        },
    },
}
_SAMPLING = {
    "stream": {"type": "boolean", "default": False},
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": {"type": "boolean"}},
    },
    "n": {"type": "integer", "minimum": 1},
    "max_tokens": {"type": "integer", "minimum": 1},
    "temperature": {"type": "number", "minimum": 0},
    "top_p": {"type": "number"},
    "seed": {"type": "integer"},
    "stop": {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
    "prompt_cache_key": {"type": "string", "description": "Keeps a session on one worker."},
    "cache_salt": {"type": "string", "description": "Separates cached prefixes by salt."},
}
_MODEL = {"model": {"type": "string"}}
_CHAT = {**_MODEL, "messages": _MESSAGES, **_SAMPLING}
_COMPLETION = {**_MODEL, "prompt": _PROMPT, **_SAMPLING}
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def _object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    # What is not listed here is the engine's to know: nothing is refused for being unknown.
    return {
        "type": "object",
        "required": required,
        "properties": properties,
        "additionalProperties": True,
    }


_ROUTES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "/v1/chat/completions": (
        "Generate the next message of a conversation.",
        "generation",
        _object(_CHAT, ["model", "messages"]),
    ),
    "/v1/completions": (
        "Generate what follows a prompt.",
        "generation",
        _object(_COMPLETION, ["model", "prompt"]),
    ),
    "/tokenize": (
        "Show a prompt's token ids, as the engine makes them.",
        "tokens",
        _object({**_MODEL, "prompt": {"type": "string"}, "messages": _MESSAGES}, ["model"]),
    ),
    "/detokenize": (
        "Show the text of token ids.",
        "tokens",
        _object({**_MODEL, "tokens": {"type": "array", "items": {"type": "integer"}}}, ["model"]),
    ),
    "/v1/route/explain": (
        "Say where a request would go and why; nothing runs.",
        "operations",
        _object({**_CHAT, "prompt": _PROMPT}, ["model"]),
    ),
}
HOT_ROUTE_PATHS = tuple(_ROUTES)


def describe_hot_routes(app: FastAPI) -> None:
    """Add the hot routes to what the app says of itself under `/openapi.json`."""
    of_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = of_fastapi()
            for path, (summary, tag, body) in _ROUTES.items():
                schema["paths"][path] = {"post": _operation(path, summary, tag, body)}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _operation(path: str, summary: str, tag: str, body: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"application/json": {"schema": {"type": "object"}}}
    if tag == "generation":
        answer["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": summary,
        "operationId": path.strip("/").replace("/", "_"),
        "tags": [tag],
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": "The engine's answer.", "content": answer},
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": _ERROR}},
            },
        },
    }
