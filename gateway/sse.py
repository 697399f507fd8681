"""Server-sent events as bytes: cut a stream into events, and judge it while it passes.

Nothing is decoded chunk by chunk and nothing is re-encoded: an event leaves as the bytes that came.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import msgspec

from cache_router.errors import UpstreamIncompleteError, UpstreamProtocolError

# Atomic, or the two halves of one \r\n would pass for two line ends.
_BLANK_LINE = re.compile(rb"(?>\r\n|\n|\r){2}")
_LINE_END = re.compile(rb"\r\n|\n|\r")
DONE = b"data: [DONE]\n\n"
# One newline: a comment with a blank line behind it is an event of its own to some clients.
KEEP_ALIVE = b": keep-alive\n"


# Counters only go up: a usage with a count below zero is none.
_Count = Annotated[int, msgspec.Meta(ge=0)]


class PromptTokensDetails(msgspec.Struct, gc=False):
    """What the engine did not have to compute; None where it does not say."""

    cached_tokens: _Count | None = None


class Usage(msgspec.Struct, gc=False):
    """The counts that metering and the index's check need; other fields are not looked at."""

    prompt_tokens: _Count
    completion_tokens: _Count | None = None
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens that came from a cache; None is unknown, which is not zero."""
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class _Choice(msgspec.Struct, gc=False):
    finish_reason: str | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


_CHUNK_DECODER = msgspec.json.Decoder(_Chunk)


def usage_of(body: bytes) -> Usage | None:
    """Return the usage of a whole (not streamed) answer, None if it has none that we know."""
    try:
        return _CHUNK_DECODER.decode(body).usage
    except msgspec.MsgspecError:
        return None


class EventSplitter:
    """Cuts a byte stream at blank lines, whatever the reads were and whichever newline is used."""

    def __init__(self, worker_id: str, max_event_bytes: int) -> None:
        """Hold back at most `max_event_bytes` of an event that is not whole yet."""
        self._worker_id = worker_id
        self._max_event_bytes = max_event_bytes
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Yield each event that `data` completes, its blank line included.

        Raises:
            UpstreamProtocolError: An event grows beyond the limit.
        """
        if not self._rest and 0 < data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
            # What engines nearly always do: one whole event a read.
            yield data
            return
        # Only the tail of what was held back can be the first half of a blank line.
        search_from = max(0, len(self._rest) - 3)
        self._rest += data
        start = 0
        while found := _BLANK_LINE.search(self._rest, max(search_from, start)):
            end = found.end()
            # A lone \r at the end of what has come may be half of a \r\n.
            if end == len(self._rest) and self._rest.endswith(b"\r"):
                break
            yield bytes(self._rest[start:end])
            start = end
        del self._rest[:start]
        if len(self._rest) > self._max_event_bytes:
            raise UpstreamProtocolError(
                self._worker_id, f"sent an event of over {self._max_event_bytes} bytes"
            )

    def finish(self) -> Iterator[bytes]:
        """Yield the last event if the stream's end is what completes it.

        Raises:
            UpstreamIncompleteError: The stream ended within an event.
        """
        rest = bytes(self._rest)
        self._rest.clear()
        if _BLANK_LINE.search(rest):
            yield rest
        elif rest.strip():
            raise UpstreamIncompleteError(self._worker_id, "ended its stream within an event")


@dataclass(frozen=True, slots=True)
class EventVerdict:
    """What one event means for the stream it is part of."""

    is_data: bool
    """Whether a client sees anything of it: from the first on, nothing can be re-routed."""
    hidden: bool = False
    """Whether it exists only because the gateway asked for usage."""


class StreamJudge:
    """Watches the events of one stream: usage, errors, and whether it ended as it should."""

    def __init__(self, *, hide_usage: bool) -> None:
        """Hide the usage event if `hide_usage`: the client did not ask for one."""
        self._hide_usage = hide_usage
        self.usage: Usage | None = None
        self.saw_done = False
        self.saw_error = False
        self._num_choice_events = 0

    def see(self, event: bytes) -> EventVerdict:
        """Judge one event as `EventSplitter` cut it."""
        payload = event_data(event)
        if payload is None:
            return EventVerdict(is_data=False)
        if payload == b"[DONE]":
            self.saw_done = True
            return EventVerdict(is_data=True)
        try:
            chunk = _CHUNK_DECODER.decode(payload)
        except msgspec.MsgspecError:
            # Not a chat chunk as we know it. The client may know better: let it pass.
            self._num_choice_events += 1
            return EventVerdict(is_data=True)
        if chunk.error is not msgspec.UNSET and bytes(chunk.error) != b"null":
            self.saw_error = True
            return EventVerdict(is_data=True)
        if chunk.usage is not None:
            self.usage = chunk.usage
            if self._hide_usage and not chunk.choices:
                return EventVerdict(is_data=False, hidden=True)
        if chunk.choices:
            self._num_choice_events += 1
        return EventVerdict(is_data=True)

    @property
    def is_whole(self) -> bool:
        """Whether the stream, being over, said how it went: an answer and `[DONE]`, or an error."""
        return self.saw_error or (self.saw_done and self._num_choice_events > 0)


def event_data(event: bytes) -> bytes | None:
    """Return the payload of an event's data lines, joined as the format says; None without any."""
    if event.startswith(b"data: ") and event.endswith(b"\n\n") and event.count(b"\n") == 2:
        return event[6:-2].rstrip(b"\r")
    lines = [
        line[5:].removeprefix(b" ")
        for line in _LINE_END.split(event)
        if line.startswith(b"data:") or line == b"data"
    ]
    return b"\n".join(lines) if lines else None
