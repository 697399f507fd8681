"""The little of ASGI that the hot routes need: read a body, answer, and notice the client leave."""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from cache_router.errors import BodyTooLargeError, BodyTooSlowError, UnsupportedMediaTypeError
from gateway.error_responses import ErrorResponse
from gateway.http_connection import Header

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_JSON = (b"content-type", b"application/json")


class ClientGoneError(Exception):
    """The client closed its connection. Not an answer to anyone; only for the log and metrics."""


def header_of(scope: Scope, name: bytes) -> bytes | None:
    """The first request header of that (lower-case) name."""
    headers: Sequence[Header] = scope["headers"]
    return next((value for key, value in headers if key == name), None)


_PROCESS_ID = secrets.token_hex(8)
_num_requests = itertools.count(1)


def new_request_id() -> str:
    """Make an id that no other request has: engines hang or mix up requests that share one."""
    # Random once a process: to ask the kernel for randomness costs more than to parse a request.
    return f"req-{_PROCESS_ID}-{next(_num_requests):x}"


class Responder:
    """Sends one response; every one of them carries `x-request-id`."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._send = send
        self.request_id = new_request_id()
        """What the engine is told; unique."""
        theirs = header_of(scope, b"x-request-id")
        valid = theirs is not None and _REQUEST_ID.fullmatch(theirs) is not None
        self.echoed_id = theirs if valid and theirs is not None else self.request_id.encode()
        self.started = False
        self.status = 0
        self.received_s = time.perf_counter()

    async def start(self, status: int, headers: Sequence[Header]) -> None:
        """Send the head."""
        self.started = True
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [*headers, (b"x-request-id", self.echoed_id)],
            }
        )

    async def write(self, data: bytes) -> None:
        """Send a piece of the body; waits while the client reads slowly."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Send the last piece."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def send_body(self, status: int, body: bytes, headers: Sequence[Header]) -> None:
        """Send a whole response."""
        await self.start(status, [*headers, (b"content-length", b"%d" % len(body))])
        await self.finish(body)

    async def send_json(self, status: int, body: bytes, headers: Sequence[Header] = ()) -> None:
        """Send a whole JSON response."""
        await self.send_body(status, body, [_JSON, *headers])

    async def send_error(self, error: ErrorResponse, headers: Sequence[Header] = ()) -> None:
        """Send an error as a whole response."""
        await self.send_json(error.status, error.body, [*error.headers, *headers])


async def read_body(scope: Scope, receive: Receive, limit_bytes: int, silence_s: float) -> bytes:
    """Read a JSON request body.

    Raises:
        UnsupportedMediaTypeError: Declared as something else than JSON.
        BodyTooLargeError: Longer than `limit_bytes`, declared or found.
        BodyTooSlowError: Nothing of it came for `silence_s` seconds.
        ClientGoneError: The client left before its end.
    """
    # A body without a declared type is read as JSON: curl users forget the header.
    media_type = (header_of(scope, b"content-type") or b"").split(b";")[0].strip().lower()
    if media_type and media_type != b"application/json" and not media_type.endswith(b"+json"):
        raise UnsupportedMediaTypeError(media_type.decode("latin-1")[:128])
    declared = header_of(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
        raise BodyTooLargeError(limit_bytes)
    message = await _next_piece(receive, silence_s)
    body: bytes = message.get("body", b"")
    if not message.get("more_body"):
        if len(body) > limit_bytes:
            raise BodyTooLargeError(limit_bytes)
        return body
    pieces = [body]
    size = len(body)
    while message.get("more_body"):
        message = await _next_piece(receive, silence_s)
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > limit_bytes:
            raise BodyTooLargeError(limit_bytes)
    return b"".join(pieces)


async def _next_piece(receive: Receive, silence_s: float) -> Message:
    try:
        async with asyncio.timeout(silence_s):
            message = await receive()
    except TimeoutError as error:
        raise BodyTooSlowError(silence_s) from error
    if message["type"] == "http.disconnect":
        raise ClientGoneError
    return message


@asynccontextmanager
async def client_present(receive: Receive) -> AsyncIterator[None]:
    """Run a block only while the client is there; the body must have been read.

    Raises:
        ClientGoneError: It left, and whatever the block waited for was cancelled.
    """
    worker = asyncio.current_task()
    assert worker is not None
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        worker.cancel()

    watcher = asyncio.create_task(watch(), name="client-watch")
    try:
        yield
    except asyncio.CancelledError:
        if gone and worker.uncancel() == 0:
            raise ClientGoneError from None
        raise
    finally:
        watcher.cancel()
