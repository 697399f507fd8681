"""How a block lies in Redis: one string, or for a large block one and several more.

The first string is a manifest and as much of the record as fits in one part; the manifest says how
many further parts there are, under names with a store's own random id, so that of two nodes that
store the same block at once each keeps to its own parts. All names of a block have its hash as
their hash tag, which keeps them on one node of a cluster.
"""

from __future__ import annotations

import secrets
import struct
from dataclasses import dataclass

from cache_router.errors import BlockCorruptError
from engine_workers.blocks.block_header import MAX_PAYLOAD_BYTES, ByteBuffer
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.sealing import Seal

PART_BYTES = 8 * 1024 * 1024
"""While Redis moves one string it does nothing else."""

_MANIFEST = struct.Struct("<4sHH16s")
_MAGIC = b"RGKR"
_VERSION = 1
MANIFEST_BYTES = _MANIFEST.size
_MAX_PARTS = MAX_PAYLOAD_BYTES // PART_BYTES + 1
MAX_FIRST_BYTES = MANIFEST_BYTES + PART_BYTES


@dataclass(frozen=True, slots=True)
class Manifest:
    """What stands before a record in its first string."""

    num_parts: int
    """Further strings that belong to it."""
    store_id: bytes

    def part_keys(self, key: str) -> list[str]:
        """Return the names of the further strings of the block whose first one is `key`."""
        return [f"{key}:{self.store_id.hex()}:{part}" for part in range(self.num_parts)]


@dataclass(frozen=True, slots=True)
class Strings:
    """A record, cut into what is stored."""

    manifest: Manifest
    first: bytes
    parts: list[bytes]

    @property
    def num_bytes(self) -> int:
        """Bytes of all of them."""
        return len(self.first) + sum(len(part) for part in self.parts)


def key_of(seal: Seal, name: BlockName) -> str:
    """Return the name of a block's first string."""
    return f"radixgate:{seal.scope}:{name.namespace.hex()}:{{{seal.label(name)}}}"


def cut(head: bytes, body: ByteBuffer) -> Strings:
    """Cut a record into strings of at most `PART_BYTES` and a manifest."""
    view = memoryview(body)
    first_bytes = PART_BYTES - len(head)
    parts = [
        bytes(view[begin : begin + PART_BYTES])
        for begin in range(first_bytes, len(view), PART_BYTES)
    ]
    manifest = Manifest(len(parts), secrets.token_bytes(16))
    packed = _MANIFEST.pack(_MAGIC, _VERSION, manifest.num_parts, manifest.store_id)
    return Strings(manifest, b"".join((packed, head, view[:first_bytes])), parts)


def manifest_of(first: ByteBuffer) -> Manifest:
    """Read the manifest of a first string.

    Raises:
        BlockCorruptError: There is none.
    """
    if len(first) < MANIFEST_BYTES:
        raise BlockCorruptError("manifest cut short")
    magic, version, num_parts, store_id = _MANIFEST.unpack_from(first)
    if magic != _MAGIC or version != _VERSION or num_parts > _MAX_PARTS:
        raise BlockCorruptError("manifest")
    return Manifest(num_parts, store_id)
