"""The header before every stored block: what it is, and how to tell that it still is that.

A packed header is a fixed prefix (little-endian: magic, format version, two zero bytes, length of
the whole header, xxh3_64 of all its other bytes), then one msgpack array.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

import msgspec
import numpy as np
import xxhash

from cache_router.errors import BlockCorruptError
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.namespace import FORMAT_VERSION, Fingerprint

MAX_HEADER_BYTES = 64 * 1024
MAX_PAYLOAD_BYTES = 1 << 30
MAX_HASH_BYTES = 64
FINGERPRINT_BYTES = 16

_MAGIC = b"RGKB"
_PREFIX = struct.Struct("<4sHHIQ")
_CHECKSUM_OFFSET = _PREFIX.size - 8
PREFIX_BYTES = _PREFIX.size

ByteBuffer = bytes | bytearray | memoryview
"""Contiguous bytes, one dimension, one byte an item."""


class Codec(IntEnum):
    """How a payload is encoded."""

    RAW = 0
    """The engine's own bytes."""


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """Everything that is known of a stored block."""

    name: BlockName
    parent_hash: bytes | None
    """None for the first block of a prompt."""
    token_ids: tuple[int, ...]
    extra_keys: tuple[object, ...]
    """The engine's extra hash keys of this block as its KV events carry them: adapter, salt, ..."""
    lora_name: str | None
    codec: Codec
    payload_bytes: int
    checksum: int
    """xxh3_64 of the payload as stored."""
    mac: bytes | None = None
    """Keyed digest over header and payload, on shared tiers that are configured with a key."""

    @property
    def parent_name(self) -> BlockName | None:
        """Name of the block before it in its prefix."""
        if self.parent_hash is None:
            return None
        return BlockName(self.name.namespace, self.parent_hash)


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    namespace: bytes
    block_hash: bytes
    parent_hash: bytes | None
    token_ids: bytes
    """uint32, little-endian."""
    extra_keys: list[object]
    lora_name: str | None
    codec: int
    payload_bytes: int
    checksum: int
    mac: bytes | None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Body)


def pack(header: BlockHeader) -> bytes:
    """Return the header's bytes, the same for equal headers.

    Raises:
        ValueError: It cannot be stored: a token id that is none, extra keys of a type that no
            engine publishes, or more than `MAX_HEADER_BYTES`.
    """
    if not all(_is_publishable(key) for key in header.extra_keys):
        raise ValueError("extra keys of a type that no engine publishes")
    try:
        body = _Body(
            header.name.namespace,
            header.name.block_hash,
            header.parent_hash,
            np.array(header.token_ids, dtype="<u4").tobytes(),
            list(header.extra_keys),
            header.lora_name,
            header.codec,
            header.payload_bytes,
            header.checksum,
            header.mac,
        )
        encoded = _encoder.encode(body)
    except (OverflowError, TypeError, UnicodeEncodeError) as error:
        raise ValueError(f"header cannot be packed: {type(error).__name__}") from error
    problem = _out_of_bounds(body)
    if problem is not None:
        raise ValueError(f"header cannot be packed: {problem}")
    num_bytes = PREFIX_BYTES + len(encoded)
    if num_bytes > MAX_HEADER_BYTES:
        raise ValueError(f"header of {num_bytes} bytes, {MAX_HEADER_BYTES} are the limit")
    front = _PREFIX.pack(_MAGIC, FORMAT_VERSION, 0, num_bytes, 0)[:_CHECKSUM_OFFSET]
    checksum = _header_checksum(front, encoded)
    return b"".join((front, checksum.to_bytes(8, "little"), encoded))


def packed_length(prefix: ByteBuffer) -> int:
    """Return how long the header is whose first `PREFIX_BYTES` (or more) bytes these are.

    Raises:
        BlockCorruptError: These bytes do not begin a header.
    """
    if len(prefix) < PREFIX_BYTES:
        raise BlockCorruptError("header cut short")
    magic, version, reserved, num_bytes, _ = _PREFIX.unpack_from(prefix)
    if magic != _MAGIC or reserved:
        raise BlockCorruptError("magic")
    if version != FORMAT_VERSION:
        raise BlockCorruptError("format version")
    if not PREFIX_BYTES < num_bytes <= MAX_HEADER_BYTES:
        raise BlockCorruptError("header length")
    return int(num_bytes)


def unpack(buffer: ByteBuffer) -> BlockHeader:
    """Read one packed header, which is all that `buffer` holds.

    Raises:
        BlockCorruptError: It is none, is cut short, is longer, or has changed since it was packed.
    """
    if packed_length(buffer) != len(buffer):
        raise BlockCorruptError("header length")
    view = memoryview(buffer)
    body_bytes = view[PREFIX_BYTES:]
    checksum = int.from_bytes(view[_CHECKSUM_OFFSET:PREFIX_BYTES], "little")
    if _header_checksum(view[:_CHECKSUM_OFFSET], body_bytes) != checksum:
        raise BlockCorruptError("header checksum")
    try:
        body = _decoder.decode(body_bytes)
        codec = Codec(body.codec)
        extra_keys = tuple(_frozen(key) for key in body.extra_keys)
        is_publishable = all(_is_publishable(key) for key in extra_keys)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise BlockCorruptError("header fields") from error
    if not is_publishable:
        raise BlockCorruptError("extra keys")
    problem = _out_of_bounds(body)
    if problem is not None:
        raise BlockCorruptError(problem)
    return BlockHeader(
        name=BlockName(Fingerprint(body.namespace), body.block_hash),
        parent_hash=body.parent_hash,
        token_ids=tuple(np.frombuffer(body.token_ids, dtype="<u4").tolist()),
        extra_keys=extra_keys,
        lora_name=body.lora_name,
        codec=codec,
        payload_bytes=body.payload_bytes,
        checksum=body.checksum,
        mac=body.mac,
    )


def checksum_of(payload: ByteBuffer) -> int:
    """xxh3_64 of the payload: it finds what broke by accident, not what was forged."""
    return xxhash.xxh3_64_intdigest(payload)


def verify(header: BlockHeader, payload: ByteBuffer, expected_name: BlockName) -> None:
    """Check that header and payload are those of the block that was asked for.

    Raises:
        BlockCorruptError: Another namespace, another block, another length, or changed bytes.
    """
    if header.name.namespace != expected_name.namespace:
        raise BlockCorruptError("namespace")
    if header.name.block_hash != expected_name.block_hash:
        raise BlockCorruptError("block hash")
    if header.payload_bytes != len(payload):
        raise BlockCorruptError("payload length")
    if header.checksum != checksum_of(payload):
        raise BlockCorruptError("payload checksum")


def _header_checksum(front: ByteBuffer, body: ByteBuffer) -> int:
    digest = xxhash.xxh3_64(front)
    digest.update(body)
    return digest.intdigest()


def _out_of_bounds(body: _Body) -> str | None:
    """Name the first field that no header may have like this."""
    hashes = (body.block_hash,) if body.parent_hash is None else (body.block_hash, body.parent_hash)
    if len(body.namespace) != FINGERPRINT_BYTES:
        return "namespace length"
    if not all(1 <= len(block_hash) <= MAX_HASH_BYTES for block_hash in hashes):
        return "hash length"
    if len(body.token_ids) % 4:
        return "token ids"
    if not 0 <= body.payload_bytes <= MAX_PAYLOAD_BYTES:
        return "payload length"
    return None if 0 <= body.checksum < 1 << 64 else "payload checksum"


def _is_publishable(key: object) -> bool:
    if isinstance(key, tuple):
        return all(_is_publishable(item) for item in key)
    return key is None or isinstance(key, str | bytes | int | float)


def _frozen(key: object) -> object:
    """Give arrays back as the tuples that engines publish."""
    if isinstance(key, list):
        return tuple(_frozen(item) for item in key)
    return key
