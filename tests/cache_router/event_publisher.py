"""A real ZMQ publisher that speaks vLLM's event protocol and can be told to misbehave."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
import zmq
import zmq.asyncio


def stored(*blocks: int, after: tuple[int, ...] = ()) -> dict[str, Any]:
    """A stored event in wire form: one number a block of two tokens."""
    names = [repr((*after, *blocks[: i + 1])).encode() for i in range(len(blocks))]
    return {
        "type": "BlockStored",
        "block_hashes": names,
        "parent_block_hash": repr(after).encode() if after else None,
        "token_ids": [block for block in blocks for _ in range(2)],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }


def removed(*blocks: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [repr(blocks).encode()], "medium": "GPU"}


CLEARED = {"type": "AllBlocksCleared"}


class EventPublisher:
    """One life of a publisher; the same address can be bound again by the next one."""

    _num_made = 0

    def __init__(
        self,
        context: zmq.asyncio.Context,
        endpoint: str = "tcp://127.0.0.1:*",
        replay_endpoint: str = "tcp://127.0.0.1:*",
        buffer_steps: int = 10_000,
    ) -> None:
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=buffer_steps)
        self._next = 0
        EventPublisher._num_made += 1
        self._started = EventPublisher._num_made
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        # XPUB is PUB that also shows subscriptions, so that a test can wait for one.
        self._publisher = context.socket(zmq.XPUB)
        self._router = context.socket(zmq.ROUTER)
        self.answers_replay = asyncio.Event()
        self.answers_replay.set()

    async def __aenter__(self) -> Self:
        self.endpoint = await _bind(self._publisher, self.endpoint)
        self.replay_endpoint = await _bind(self._router, self.replay_endpoint)
        self._server = asyncio.create_task(self._serve_replay())
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.cancel()
        await asyncio.wait([self._server])
        self._publisher.close(linger=0)
        self._router.close(linger=0)

    async def subscribed(self) -> None:
        """Wait until the follower's subscription has arrived here."""
        async with asyncio.timeout(10):
            while (await self._publisher.recv())[:1] != b"\x01":
                pass

    def buffer(self, *events: dict[str, Any]) -> tuple[int, bytes]:
        """Publish a batch that the live stream loses."""
        # Two lives never make equal batches: vLLM's carry the time.
        payload = msgspec.msgpack.encode([self._started + self._next / 1e6, list(events), 0])
        return self.buffer_raw(payload)

    def buffer_raw(self, payload: bytes) -> tuple[int, bytes]:
        batch = (self._next, payload)
        self._buffer.append(batch)
        self._next += 1
        return batch

    async def publish(self, *events: dict[str, Any]) -> tuple[int, bytes]:
        batch = self.buffer(*events)
        await self.send(batch)
        return batch

    async def send(self, batch: tuple[int, bytes]) -> None:
        await self.send_frames((b"", batch[0].to_bytes(8, "big"), batch[1]))

    async def send_frames(self, frames: Sequence[bytes]) -> None:
        await self._publisher.send_multipart(frames)

    async def _serve_replay(self) -> None:
        while True:
            frames = await self._router.recv_multipart()
            await self.answers_replay.wait()
            if len(frames) != 3:
                continue
            client, _, start = frames
            for sequence, payload in list(self._buffer):
                if sequence >= int.from_bytes(start, "big"):
                    await self._router.send_multipart(
                        (client, b"", b"", sequence.to_bytes(8, "big"), payload)
                    )
            end = (-1).to_bytes(8, "big", signed=True)
            await self._router.send_multipart((client, b"", b"", end, b""))


async def _bind(socket: zmq.asyncio.Socket, endpoint: str) -> str:
    """Bind, once the last life's socket has left the address: ZMQ closes in the background."""
    async with asyncio.timeout(10):
        while True:
            try:
                socket.bind(endpoint)
            except zmq.ZMQError as error:
                if error.errno != zmq.EADDRINUSE:
                    raise
                await asyncio.sleep(0.01)
            else:
                return str(socket.getsockopt_string(zmq.LAST_ENDPOINT))
