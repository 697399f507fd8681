"""Passing a worker's answer on: whole, or event by event as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

from cache_router.errors import (
    UpstreamError,
    UpstreamIncompleteError,
    UpstreamProtocolError,
    UpstreamTimeoutError,
)
from gateway.asgi import Responder
from gateway.error_responses import error_response, is_openai_shape, wrap_upstream_error
from gateway.http_connection import Header
from gateway.sse import DONE, KEEP_ALIVE, EventSplitter, StreamJudge, Usage, usage_of
from gateway.upstream_response import UpstreamResponse

_STREAM_HEADERS: tuple[Header, ...] = (
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
)
# What a worker says that its caller needs; everything else is between it and us.
_PASSED_ON = frozenset({b"content-type", b"retry-after", b"retry-after-ms", b"x-should-retry"})
_MAX_BODY_BYTES = 256 * 1024 * 1024
_MAX_EVENT_BYTES = 64 * 1024 * 1024
_MAX_ERROR_BYTES = 1024 * 1024
# How long a worker may take from its `[DONE]` to the end of the response.
_AFTER_DONE_S = 1.0


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How long a stream may be silent."""

    keep_alive_s: float
    """Seconds until a comment is sent."""
    silence_s: float
    """Seconds until the worker is given up."""


class StreamListener(Protocol):
    """Hears what passes, for metrics and for the router."""

    def first_data(self) -> None:
        """The first data event is about to be sent."""

    def next_data(self, interval_s: float) -> None:
        """Another one, `interval_s` seconds after the one before."""

    def broken(self, error: UpstreamError) -> None:
        """The stream ends in an error event, of the gateway's making or the engine's."""


def passed_headers(response: UpstreamResponse) -> list[Header]:
    """Return the response headers that a caller gets."""
    return [
        (name, value)
        for name, value in response.headers
        if name in _PASSED_ON or name.startswith(b"x-ratelimit-")
    ]


def is_event_stream(response: UpstreamResponse) -> bool:
    """Whether the body is a stream of events; what was asked for does not decide that."""
    return (response.header(b"content-type") or b"").lower().startswith(b"text/event-stream")


async def relay_whole(
    response: UpstreamResponse, responder: Responder, extra: list[Header], worker_id: str
) -> Usage | None:
    """Pass a whole answer on, errors in OpenAI's shape, and return its usage.

    Raises:
        UpstreamError: It could not be read, or refuses the gateway itself.
    """
    status = response.status
    if status in (401, 403):
        # The caller's key was not sent there: it is the gateway's that the worker refuses.
        raise UpstreamProtocolError(worker_id, f"refuses the gateway's own key (status {status})")
    if status != 200 and not 400 <= status < 600:
        # An empty success, a redirect to where only we could go, a status that does not exist.
        raise UpstreamProtocolError(worker_id, f"answers with status {status}")
    headers = passed_headers(response) + extra
    if status >= 400:
        body = await _read_plain(response, worker_id, _MAX_ERROR_BYTES)
        if not is_openai_shape(body):
            error = wrap_upstream_error(status, body)
            kept = [header for header in headers if not header[0].startswith(b"content-")]
            await responder.send_json(status, error.body, kept)
            return None
        await responder.send_body(status, body, headers)
        return None
    body = await _read_plain(response, worker_id, _MAX_BODY_BYTES)
    await responder.send_body(status, body, headers)
    return usage_of(body)


async def _read_plain(response: UpstreamResponse, worker_id: str, limit_bytes: int) -> bytes:
    """Read a whole body; unpack what was packed though identity was asked for.

    Raises:
        UpstreamError: It could not be read, or is packed in a way that callers were not offered.
    """
    body = await response.read_all(limit_bytes)
    encoding = (response.header(b"content-encoding") or b"identity").lower()
    if encoding == b"identity":
        return body
    if encoding != b"gzip":
        raise UpstreamProtocolError(worker_id, f"sent a body with encoding {encoding!r}")
    unpacker = zlib.decompressobj(wbits=31)
    try:
        plain = unpacker.decompress(body, limit_bytes)
    except zlib.error as error:
        raise UpstreamProtocolError(worker_id, f"sent a broken gzip body: {error}") from error
    if not unpacker.eof:
        raise UpstreamProtocolError(worker_id, "sent a gzip body that is cut off or too long")
    return plain


async def relay_stream(
    response: UpstreamResponse,
    responder: Responder,
    extra: list[Header],
    worker_id: str,
    *,
    hide_usage: bool,
    limits: StreamLimits,
    listener: StreamListener,
) -> Usage | None:
    """Pass a stream of events on and return its usage.

    Only whole events leave, so that an error event never lands in the middle of one. A stream that
    ends early ends in an error event and `[DONE]`: clients take a clean end for success.
    """
    if response.header(b"content-encoding") not in (None, b"identity"):
        raise UpstreamProtocolError(worker_id, "sent a packed stream though identity was asked for")
    judge = StreamJudge(hide_usage=hide_usage)
    splitter = EventSplitter(worker_id, _MAX_EVENT_BYTES)
    await responder.start(response.status, [*passed_headers(response), *_STREAM_HEADERS, *extra])
    last_data_s: float | None = None
    try:
        async for chunk in _read(response, responder, limits, judge):
            passing: list[bytes] = []
            for event in splitter.feed(chunk) if chunk else splitter.finish():
                verdict = judge.see(event)
                # `[DONE]` waits for the end: behind a broken answer it would call it a good one.
                if judge.saw_done or verdict.hidden:
                    continue
                passing.append(event)
                if verdict.is_data:
                    now_s = time.perf_counter()
                    if last_data_s is None:
                        listener.first_data()
                    else:
                        listener.next_data(now_s - last_data_s)
                    last_data_s = now_s
            if passing:
                await responder.write(b"".join(passing))
        if not judge.is_whole:
            raise UpstreamIncompleteError(worker_id, "ended its stream before its answer was whole")
        if judge.saw_error:
            listener.broken(UpstreamProtocolError(worker_id, "sent an error event"))
        await responder.finish(DONE)
    except UpstreamError as error:
        listener.broken(error)
        await responder.finish(error_response(error).event + DONE)
    return judge.usage


async def _read(
    response: UpstreamResponse, responder: Responder, limits: StreamLimits, judge: StreamJudge
) -> AsyncIterator[bytes]:
    """Yield what is read until `judge` has seen `[DONE]`, else b"" last; fill silence."""
    silent_s = 0.0
    while not judge.saw_done:
        try:
            chunk = await response.read_chunk(limits.keep_alive_s)
        except UpstreamTimeoutError:
            silent_s += limits.keep_alive_s
            if silent_s >= limits.silence_s:
                raise
            await responder.write(KEEP_ALIVE)
            continue
        silent_s = 0.0
        yield chunk
        if not chunk:
            return
    # Only so that the connection can be kept: the answer is over, whatever becomes of this.
    with contextlib.suppress(UpstreamError, TimeoutError):
        async with asyncio.timeout(_AFTER_DONE_S):
            while await response.read_chunk():
                pass
