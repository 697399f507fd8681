"""The only place that knows statuses: every error as OpenAI's clients expect it.

Before the first byte it is a JSON body, after it an event on the stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from cache_router.errors import (
    BlockCorruptError,
    BlockLostError,
    BodyTooLargeError,
    BodyTooSlowError,
    CacheWireError,
    ConfigurationError,
    EngineError,
    EventDecodeError,
    HeadTooLargeError,
    InvalidRequestError,
    NoWorkerError,
    OverloadedError,
    PromptTooLongError,
    RadixgateError,
    RequestError,
    TierError,
    TokenizerError,
    UnknownModelError,
    UnsupportedMediaTypeError,
    UpstreamConnectError,
    UpstreamError,
    UpstreamIncompleteError,
    UpstreamProtocolError,
    UpstreamStaleError,
    UpstreamTimeoutError,
    UpstreamUnreachableError,
)
from gateway.http_connection import Header

MAX_MESSAGE_CHARS = 2000
_RETRY_AFTER_S = 1


@dataclass(frozen=True, slots=True)
class ErrorResponse:
    """One error, ready to be sent in either form."""

    status: int
    message: str
    type: str
    code: str
    param: str | None = None
    headers: Sequence[Header] = field(default=())

    @property
    def body(self) -> bytes:
        """The JSON body: `{"error": {message, type, param, code}}`."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message[:MAX_MESSAGE_CHARS],
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )

    @property
    def event(self) -> bytes:
        """The same as one server-sent event."""
        return b"data: " + self.body + b"\n\n"


@dataclass(frozen=True, slots=True)
class _Shape:
    status: int
    type: str
    code: str
    message: str | None = None
    """What callers are told in place of the exception's text, which names workers."""
    retry_after_s: int | None = None


_CLIENT = "invalid_request_error"
_SERVER = "server_error"
SHAPES: dict[type[RadixgateError], _Shape] = {
    InvalidRequestError: _Shape(400, _CLIENT, "invalid_request"),
    PromptTooLongError: _Shape(400, _CLIENT, "context_length_exceeded"),
    UnknownModelError: _Shape(404, _CLIENT, "model_not_found"),
    HeadTooLargeError: _Shape(431, _CLIENT, "head_too_large"),
    BodyTooLargeError: _Shape(413, _CLIENT, "body_too_large"),
    BodyTooSlowError: _Shape(408, _CLIENT, "request_timeout"),
    UnsupportedMediaTypeError: _Shape(415, _CLIENT, "unsupported_media_type"),
    RequestError: _Shape(400, _CLIENT, "invalid_request"),
    NoWorkerError: _Shape(
        503,
        _SERVER,
        "no_ready_worker",
        "No worker that serves this model is ready. Try again shortly.",
        retry_after_s=_RETRY_AFTER_S,
    ),
    OverloadedError: _Shape(
        503, _SERVER, "server_is_overloaded", "The server is overloaded. Try again shortly."
    ),
    UpstreamUnreachableError: _Shape(
        502, _SERVER, "upstream_unreachable", "The worker for this request could not be reached."
    ),
    UpstreamConnectError: _Shape(
        502, _SERVER, "upstream_unreachable", "The worker for this request could not be reached."
    ),
    UpstreamStaleError: _Shape(
        502, _SERVER, "upstream_unreachable", "The worker for this request could not be reached."
    ),
    UpstreamTimeoutError: _Shape(
        504, _SERVER, "upstream_timeout", "The worker for this request did not answer in time."
    ),
    UpstreamIncompleteError: _Shape(
        502, _SERVER, "upstream_incomplete", "The worker's answer ended before it was whole."
    ),
    UpstreamProtocolError: _Shape(
        502, _SERVER, "upstream_protocol", "The worker's answer could not be understood."
    ),
    UpstreamError: _Shape(502, _SERVER, "upstream_error", "The worker for this request failed."),
    # These are for the command line and the log; over HTTP they can only be a fault of ours.
    ConfigurationError: _Shape(500, _SERVER, "internal_error", "Internal error."),
    TokenizerError: _Shape(500, _SERVER, "internal_error", "Internal error."),
    EventDecodeError: _Shape(500, _SERVER, "internal_error", "Internal error."),
    EngineError: _Shape(500, _SERVER, "internal_error", "Internal error."),
    CacheWireError: _Shape(500, _SERVER, "internal_error", "Internal error."),
    TierError: _Shape(500, _SERVER, "internal_error", "Internal error."),
    BlockLostError: _Shape(500, _SERVER, "internal_error", "Internal error."),
    BlockCorruptError: _Shape(500, _SERVER, "internal_error", "Internal error."),
}

INTERNAL_ERROR = ErrorResponse(500, "Internal error.", _SERVER, "internal_error")


def error_response(error: RadixgateError) -> ErrorResponse:
    """Return what a caller is told about `error`."""
    shape = SHAPES[type(error)]
    retry_after_s = shape.retry_after_s
    param = None
    code = shape.code
    if isinstance(error, OverloadedError):
        retry_after_s = error.retry_after_s
    if isinstance(error, RequestError):
        param, code = error.param, error.code
    headers: tuple[Header, ...] = ()
    if retry_after_s is not None:
        headers = ((b"retry-after", b"%d" % retry_after_s),)
    if isinstance(error, BodyTooSlowError):
        # Nothing can follow on a connection that is still within a request.
        headers = ((b"connection", b"close"),)
    return ErrorResponse(
        shape.status, shape.message or str(error), shape.type, code, param, headers
    )


def route_error(status: int, method: str, path: str) -> ErrorResponse:
    """Return the answer to a request that no route takes: 404, or 405 for a wrong method."""
    if status == 405:
        return ErrorResponse(
            405,
            f"Method {method[:16]} is not allowed for {path[:256]}.",
            _CLIENT,
            "method_not_allowed",
        )
    return ErrorResponse(
        404, f"Unknown request URL: {method[:16]} {path[:256]}.", _CLIENT, "not_found"
    )


class _Nested(msgspec.Struct):
    message: str


class _NestedBody(msgspec.Struct):
    error: _Nested


class _FlatBody(msgspec.Struct):
    message: str | None = None
    error: str | None = None
    detail: str | None = None


def is_openai_shape(body: bytes) -> bool:
    """Whether an upstream's error body may be forwarded as it is."""
    try:
        msgspec.json.decode(body, type=_NestedBody)
    except msgspec.MsgspecError:
        return False
    return True


def wrap_upstream_error(status: int, body: bytes) -> ErrorResponse:
    """Put an upstream's error of another shape into OpenAI's, keeping its status and its words."""
    try:
        flat = msgspec.json.decode(body, type=_FlatBody)
        message = flat.message or flat.error or flat.detail or ""
    except msgspec.MsgspecError:
        # HTML or plain text of some proxy in between: its status says all a caller can use.
        message = ""
    return ErrorResponse(
        status,
        message or f"The worker answered with status {status}.",
        _CLIENT if status < 500 else _SERVER,
        "invalid_request" if status < 500 else "upstream_error",
    )
