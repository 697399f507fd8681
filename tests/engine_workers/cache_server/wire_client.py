"""An engine's end of the wire, small and obedient unless a test makes it lie."""

from __future__ import annotations

import asyncio
import mmap
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from engine_workers.blocks.block_header import BlockHeader, Codec, checksum_of, pack
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.namespace import Namespace
from engine_workers.cache_server.admin_wire import Answer, Question
from engine_workers.cache_wire import (
    PROTOCOL_VERSION,
    Forget,
    Freed,
    FromEngine,
    FromServer,
    Hello,
    Lookup,
    Put,
    Refused,
    Release,
    Staged,
    Staging,
    Welcome,
)

BLOCK_BYTES = 10_000
BLOCK_SIZE = 128
MessageT = TypeVar("MessageT")


def namespace(**changes: object) -> Namespace:
    base = Namespace(
        model="tiny",
        revision="1",
        weight_quantization="none",
        dtype="float32",
        kv_dtype="float32",
        num_layers=2,
        kv_heads=1,
        head_size=8,
        block_size=BLOCK_SIZE,
        layout="test",
        isa="test",
        tp_size=1,
        tp_rank=0,
        hash_algorithm="sha256_cbor",
        hash_seed="0",
    )
    return msgspec.structs.replace(base, **changes)


def block_hash(number: int) -> bytes:
    return number.to_bytes(32, "big")


def hashes(count: int, first: int = 1) -> list[bytes]:
    return [block_hash(number) for number in range(first, first + count)]


def payload(number: int, num_bytes: int = BLOCK_BYTES) -> bytes:
    return np.random.default_rng(number).bytes(num_bytes)


def header(number: int, space: Namespace, num_bytes: int = BLOCK_BYTES) -> BlockHeader:
    """The header of the block that is the `number`th of the one chain there is."""
    return BlockHeader(
        name=BlockName(space.fingerprint, block_hash(number)),
        parent_hash=block_hash(number - 1) if number > 1 else None,
        token_ids=tuple(range(BLOCK_SIZE)),
        extra_keys=(),
        lora_name=None,
        codec=Codec.RAW,
        payload_bytes=num_bytes,
        checksum=checksum_of(payload(number, num_bytes)),
    )


class WireClient:
    """One connection."""

    def __init__(self, connection: socket.socket, hello: Hello) -> None:
        self.hello = hello
        self.num_sent_bytes = 0
        self.num_received_bytes = 0
        self.arena_fd = -1
        self.arena: mmap.mmap | None = None
        self.ring: NDArray[np.uint8] = np.empty((0, 0), np.uint8)
        self._connection = connection

    @classmethod
    async def connect(
        cls,
        path: Path,
        *,
        role: str = "worker",
        engine_id: str = "engine-1",
        space: Namespace | None = None,
        block_bytes: int = BLOCK_BYTES,
        ring_slots: int = 8,
        protocol: int = PROTOCOL_VERSION,
        served_models: Sequence[str] = (),
    ) -> WireClient | Refused:
        connection = await raw_connection(path)
        slots = ring_slots if role == "worker" else 0
        hello = Hello(
            protocol,
            engine_id,
            role,
            space or namespace(),
            block_bytes,
            slots,
            list(served_models),
        )
        client = cls(connection, hello)
        await client.send(hello)
        answer = await client._receive_welcome()
        if isinstance(answer, Refused):
            client.close()
            return answer
        client.welcome = answer
        return client

    welcome: Welcome

    async def _receive_welcome(self) -> Welcome | Refused:
        await _readable(self._connection)
        data, fds, _, _ = socket.recv_fds(self._connection, 65536, 4)
        message = msgspec.msgpack.decode(data[4:], type=FromServer)
        assert isinstance(message, Welcome | Refused)
        if isinstance(message, Refused):
            assert not fds
            return message
        self.arena_fd = fds[0]
        self.arena = mmap.mmap(fds[0], message.arena_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        if message.ring_slots:
            mapped = mmap.mmap(fds[1], message.ring_slots * message.ring_slot_bytes)
            flat = np.frombuffer(mapped, np.uint8)
            self.ring = flat.reshape(message.ring_slots, message.ring_slot_bytes)
            os.close(fds[1])
        return message

    async def send(self, message: FromEngine | Question) -> None:
        await self.send_bytes(frame(message))

    async def send_bytes(self, data: bytes) -> None:
        self.num_sent_bytes += len(data)
        await asyncio.get_running_loop().sock_sendall(self._connection, data)

    async def receive(self, kind: type[MessageT]) -> MessageT:
        message = await self.receive_any()
        assert isinstance(message, kind), message
        return message

    async def receive_any(self) -> FromServer | None:
        body = await self._body()
        return None if body is None else msgspec.msgpack.decode(body, type=FromServer)

    async def ask(self, question: Question) -> Answer:
        await self.send(question)
        body = await self._body()
        assert body is not None
        answer: Answer = msgspec.msgpack.decode(body, type=Answer)
        return answer

    async def _body(self) -> bytes | None:
        head = await self._exactly(4)
        if head is None:
            return None
        (length,) = struct.unpack("<I", head)
        return await self._exactly(length)

    async def _exactly(self, count: int) -> bytes | None:
        received = b""
        while len(received) < count:
            try:
                more = await asyncio.get_running_loop().sock_recv(
                    self._connection, count - len(received)
                )
            except ConnectionResetError:
                return None
            if not more:
                return None
            received += more
        self.num_received_bytes += count
        return received

    def write(self, slot: int, block: BlockHeader, data: bytes) -> None:
        """Put a block into a slot of the ring; nobody is told yet."""
        self.write_packed(slot, pack(block), data)

    def write_packed(self, slot: int, packed: bytes, data: bytes) -> None:
        start = -(-(4 + len(packed)) // 64) * 64
        row = self.ring[slot]
        row[:4] = np.frombuffer(struct.pack("<I", len(packed)), np.uint8)
        row[4 : 4 + len(packed)] = np.frombuffer(packed, np.uint8)
        row[start : start + len(data)] = np.frombuffer(data, np.uint8)

    async def save(self, numbers: Sequence[int]) -> Freed:
        """Save blocks of the one chain, as many at a time as the ring holds."""
        num_kept = 0
        slots_used: list[int] = []
        for start in range(0, len(numbers), len(self.ring)):
            part = numbers[start : start + len(self.ring)]
            for slot, number in enumerate(part):
                num_bytes = self.hello.block_bytes
                self.write(
                    slot,
                    header(number, self.hello.namespace, num_bytes),
                    payload(number, num_bytes),
                )
            slots = list(range(len(part)))
            await self.send(Put(slots, [block_hash(number) for number in part]))
            freed = await self.receive(Freed)
            assert freed.slots == slots
            num_kept += freed.num_kept
            slots_used += slots
        return Freed(self.welcome.boot_token, slots_used, num_kept)

    async def look_up(
        self, block_hashes: list[bytes], num_local: int = 0, request_id: str = "r"
    ) -> Staged:
        await self.send(Lookup(request_id, block_hashes, num_local, len(block_hashes) * BLOCK_SIZE))
        message = await self.receive_any()
        if isinstance(message, Staging):
            message = await self.receive_any()
        assert isinstance(message, Staged)
        assert message.request_id == request_id
        return message

    async def release(self, *leases: int) -> None:
        await self.send(Release(list(leases)))

    async def forget(self, *numbers: int) -> None:
        await self.send(Forget([block_hash(number) for number in numbers]))

    def read(self, offset: int) -> bytes:
        assert self.arena is not None
        return self.arena[offset : offset + self.hello.block_bytes]

    def close(self) -> None:
        self._connection.close()
        if self.arena_fd >= 0:
            os.close(self.arena_fd)
            self.arena_fd = -1


def frame(message: FromEngine | Question) -> bytes:
    body = msgspec.msgpack.encode(message)
    return struct.pack("<I", len(body)) + body


async def raw_connection(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, os.fspath(path))
    return connection


async def _readable(connection: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(connection.fileno(), ready.set_result, None)
    try:
        await ready
    finally:
        loop.remove_reader(connection.fileno())
