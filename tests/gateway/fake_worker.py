"""A worker that speaks vLLM's HTTP interface and misbehaves where a test tells it to."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Seen:
    """One request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Answer = Callable[[Seen, asyncio.StreamWriter], Awaitable[None]]


def event(**fields: Any) -> bytes:
    chunk = {"id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "m", **fields}
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def delta(text: str, finish_reason: str | None = None) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish_reason}
    return event(choices=[choice])


USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 2,
    "total_tokens": 14,
    "prompt_tokens_details": {"cached_tokens": 4},
}
DONE = b"data: [DONE]\n\n"
COMPLETION = json.dumps(
    {
        "id": "c1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi"},
                "finish_reason": "stop",
            }
        ],
        "usage": USAGE,
    }
).encode()


async def send(
    writer: asyncio.StreamWriter,
    status: int,
    body: bytes,
    content_type: str = "application/json",
    extra: str = "",
) -> None:
    head = (
        f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\n"
        f"content-length: {len(body)}\r\n{extra}\r\n"
    )
    writer.write(head.encode() + body)
    await writer.drain()


async def start_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(
        b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    await writer.drain()


async def send_piece(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


async def end_stream(writer: asyncio.StreamWriter) -> None:
    writer.write(b"0\r\n\r\n")
    await writer.drain()


async def well_behaved(seen: Seen, writer: asyncio.StreamWriter) -> None:
    """Answer as vLLM would."""
    body = seen.json
    if not body.get("stream"):
        await send(writer, 200, COMPLETION)
        return
    await start_stream(writer)
    await send_piece(writer, delta("He"))
    await send_piece(writer, delta("llo", "stop"))
    if (body.get("stream_options") or {}).get("include_usage"):
        await send_piece(writer, event(choices=[], usage=USAGE))
    await send_piece(writer, DONE)
    await end_stream(writer)


@dataclass(slots=True)
class FakeWorker:
    """Listens on a port of its own; `answer` decides what a generation request gets."""

    model: str = "m"
    root: str = "/nowhere"
    max_model_len: int | None = 4096
    answer: Answer = well_behaved
    event_sources: dict[str, Any] | None = None
    healthy: bool = True
    start_time_s: float = 1000.0
    seen: list[Seen] = field(default_factory=list)
    tokenized: list[Seen] = field(default_factory=list)
    client_left: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""
    _listener: asyncio.Server | None = None
    _writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def start(self, port: int = 0) -> None:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", port, limit=1 << 26)
        self.url = f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    def die(self) -> None:
        """Go away as a killed process does: connections reset, the port refuses."""
        if self._listener is not None:
            self._listener.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        try:
            while True:
                seen = await _read(reader)
                if seen.path.startswith("/v1/") and seen.method == "POST":
                    self.seen.append(seen)
                    await self._answer(seen, reader, writer)
                else:
                    await self._control(seen, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(
        self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        # A client that leaves while it is being answered is what an engine aborts for.
        answering = asyncio.ensure_future(self.answer(seen, writer))
        leaving = asyncio.ensure_future(reader.read(1))
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not answering.done():
            answering.cancel()
            self.client_left.set()
            raise ConnectionResetError
        leaving.cancel()
        await asyncio.wait({leaving})
        answering.result()

    async def _control(self, seen: Seen, writer: asyncio.StreamWriter) -> None:
        if seen.path == "/health":
            await send(writer, 200 if self.healthy else 503, b"")
        elif seen.path == "/v1/models":
            item = {"id": self.model, "object": "model", "created": 7, "owned_by": "vllm"}
            models = [{**item, "root": self.root, "max_model_len": self.max_model_len}]
            await send(writer, 200, json.dumps({"object": "list", "data": models}).encode())
        elif seen.path == "/kv_event_sources" and self.event_sources is not None:
            await send(writer, 200, json.dumps(self.event_sources).encode())
        elif seen.path == "/metrics":
            line = f"process_start_time_seconds {self.start_time_s}\n"
            await send(writer, 200, line.encode(), "text/plain")
        elif seen.path in ("/tokenize", "/detokenize"):
            self.tokenized.append(seen)
            text = json.dumps(seen.json.get("messages") or seen.json.get("prompt"))
            tokens = list(text.encode())
            await send(writer, 200, json.dumps({"count": len(tokens), "tokens": tokens}).encode())
        else:
            await send(writer, 404, b'{"detail":"Not Found"}')


async def _read(reader: asyncio.StreamReader) -> Seen:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ")
    headers = {
        name.lower(): value.strip()
        for name, _, value in (line.partition(":") for line in lines[1:] if line)
    }
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Seen(method, path, headers, body)


@asynccontextmanager
async def fake_worker(**options: Any) -> AsyncIterator[FakeWorker]:
    worker = FakeWorker(**options)
    await worker.start()
    try:
        yield worker
    finally:
        worker.die()
