"""How blocks lie on shared tiers: as they are, authenticated, or encrypted.

A checksum finds accidents. Whoever can write to a shared store can also make up a block with the
right checksum, and its KV steers what a model says; a key that only this cluster has stops that.
A record is a head and a body, one after the other; the head says how long it is.
"""

from __future__ import annotations

import hmac
import secrets
import struct
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from cache_router.errors import BlockCorruptError, ConfigurationError
from engine_workers.blocks.block_header import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    BlockHeader,
    ByteBuffer,
    pack,
    packed_length,
    unpack,
    verify,
)
from engine_workers.blocks.block_name import BlockName

MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 4096
_DIGEST_BYTES = 32
_TAG_BYTES = 16
_SALT_BYTES = 32

_ENVELOPE = struct.Struct("<4sI32s")
_ENVELOPE_MAGIC = b"RGKE"
# A key encrypts one record only, so its two messages can have fixed nonces.
_HEAD_NONCE = bytes(12)
_BODY_NONCE = bytes(11) + b"\x01"

MIN_HEAD_BYTES = max(PREFIX_BYTES, _ENVELOPE.size)
"""As many first bytes of a record tell how long its head is."""
MAX_HEAD_BYTES = _ENVELOPE.size + MAX_HEADER_BYTES + _TAG_BYTES


class Seal(Protocol):
    """Turns blocks into records of a shared tier and back. Safe to call from several threads."""

    scope: str
    """Goes into every record's name on the store: nodes with another key see other records, so a
    node with a wrong one finds nothing rather than deleting what it cannot read."""
    body_overhead: int
    """Bytes by which a body is longer than its payload."""

    def label(self, name: BlockName) -> str:
        """Return what stands for the block's hash in its name on the store, in hexadecimal."""

    def close(self, header: BlockHeader, payload: ByteBuffer) -> tuple[bytes, ByteBuffer]:
        """Return head and body; the body may be `payload` itself.

        Raises:
            ValueError: The header cannot be packed.
        """

    def head_length(self, first_bytes: ByteBuffer) -> int:
        """Return how long the head is that begins with these `MIN_HEAD_BYTES` or more.

        Raises:
            BlockCorruptError: They begin no head of this kind.
        """

    def open_head(self, head: ByteBuffer, name: BlockName) -> BlockHeader:
        """Read a head.

        Raises:
            BlockCorruptError: It is not one, or not of `name`.
        """

    def open_body(
        self, header: BlockHeader, name: BlockName, body: ByteBuffer, payload: memoryview
    ) -> BlockHeader:
        """Check a body against its header, leave the payload in `payload`, and return the header.

        It is as `close` took it, without what sealing added. `body` may be `payload` itself where
        `body_overhead` is 0.

        Raises:
            BlockCorruptError: It is not what its header says. `payload` is undefined.
        """


class OpenSeal:
    """No key: header and payload as they are, with their checksums."""

    scope = "open"
    body_overhead = 0

    def label(self, name: BlockName) -> str:
        """Return the block's hash."""
        return name.block_hash.hex()

    def close(self, header: BlockHeader, payload: ByteBuffer) -> tuple[bytes, ByteBuffer]:
        """Return head and body."""
        return pack(header), payload

    def head_length(self, first_bytes: ByteBuffer) -> int:
        """Return how long the head is."""
        return packed_length(first_bytes)

    def open_head(self, head: ByteBuffer, name: BlockName) -> BlockHeader:
        """Read a head."""
        return _named(unpack(head), name)

    def open_body(
        self, header: BlockHeader, name: BlockName, body: ByteBuffer, payload: memoryview
    ) -> BlockHeader:
        """Check a body and leave it in `payload`."""
        _fill(payload, body)
        verify(header, payload, name)
        return header


class MacSeal:
    """Keyed BLAKE2b over header and payload: nobody without the key can make up a block.

    The header, and so the prompt's token ids, can still be read by whoever reads the store.
    """

    body_overhead = 0

    def __init__(self, key: bytes) -> None:
        self._key = _derived(key, b"radixgate mac")
        self.scope = f"mac-{_key_id(key)}"

    def label(self, name: BlockName) -> str:
        """Return the block's hash."""
        return name.block_hash.hex()

    def close(self, header: BlockHeader, payload: ByteBuffer) -> tuple[bytes, ByteBuffer]:
        """Return head, with the MAC in it, and body."""
        return pack(replace(header, mac=self._mac(header, payload))), payload

    def head_length(self, first_bytes: ByteBuffer) -> int:
        """Return how long the head is."""
        return packed_length(first_bytes)

    def open_head(self, head: ByteBuffer, name: BlockName) -> BlockHeader:
        """Read a head; nothing in it can be believed before its body is opened."""
        return _named(unpack(head), name)

    def open_body(
        self, header: BlockHeader, name: BlockName, body: ByteBuffer, payload: memoryview
    ) -> BlockHeader:
        """Check a body and leave it in `payload`."""
        _fill(payload, body)
        verify(header, payload, name)
        if header.mac is None or not hmac.compare_digest(header.mac, self._mac(header, payload)):
            raise BlockCorruptError("mac")
        return replace(header, mac=None)

    def _mac(self, header: BlockHeader, payload: ByteBuffer) -> bytes:
        head = pack(replace(header, mac=None))
        digest = blake2b(head, key=self._key, digest_size=_DIGEST_BYTES)
        digest.update(payload)
        return digest.digest()


class AesSeal:
    """AES-256-GCM over header and payload, each record under a key of its own."""

    body_overhead = _TAG_BYTES

    def __init__(self, key: bytes) -> None:
        self._key = _derived(key, b"radixgate aes")
        self.scope = f"aes-{_key_id(key)}"
        self._label_key = _derived(key, b"radixgate label")

    def label(self, name: BlockName) -> str:
        """Return a keyed digest of the block's hash, with which a guessed prompt is not found."""
        return blake2b(name.block_hash, key=self._label_key, digest_size=_DIGEST_BYTES).hexdigest()

    def close(self, header: BlockHeader, payload: ByteBuffer) -> tuple[bytes, ByteBuffer]:
        """Return head and body, both encrypted."""
        salt = secrets.token_bytes(_SALT_BYTES)
        cipher = self._cipher(salt)
        packed = pack(replace(header, mac=salt))
        front = _ENVELOPE.pack(_ENVELOPE_MAGIC, _ENVELOPE.size + len(packed) + _TAG_BYTES, salt)
        head = front + cipher.encrypt(_HEAD_NONCE, packed, front)
        return head, cipher.encrypt(_BODY_NONCE, payload, packed)

    def head_length(self, first_bytes: ByteBuffer) -> int:
        """Return how long the head is."""
        if len(first_bytes) < _ENVELOPE.size:
            raise BlockCorruptError("envelope cut short")
        magic, num_bytes, _ = _ENVELOPE.unpack_from(first_bytes)
        if magic != _ENVELOPE_MAGIC:
            raise BlockCorruptError("envelope magic")
        if not _ENVELOPE.size + _TAG_BYTES < num_bytes <= MAX_HEAD_BYTES:
            raise BlockCorruptError("envelope length")
        return int(num_bytes)

    def open_head(self, head: ByteBuffer, name: BlockName) -> BlockHeader:
        """Decrypt and read a head."""
        if self.head_length(head) != len(head):
            raise BlockCorruptError("envelope length")
        view = memoryview(head)
        _, _, salt = _ENVELOPE.unpack_from(head)
        try:
            packed = self._cipher(salt).decrypt(
                _HEAD_NONCE, view[_ENVELOPE.size :], bytes(view[: _ENVELOPE.size])
            )
        except InvalidTag as error:
            raise BlockCorruptError("encrypted header") from error
        return _named(unpack(packed), name)

    def open_body(
        self, header: BlockHeader, name: BlockName, body: ByteBuffer, payload: memoryview
    ) -> BlockHeader:
        """Decrypt a body into `payload`."""
        if len(body) != len(payload) + _TAG_BYTES or header.mac is None:
            raise BlockCorruptError("payload length")
        try:
            self._cipher(header.mac).decrypt_into(_BODY_NONCE, body, pack(header), payload)
        except InvalidTag as error:
            raise BlockCorruptError("encrypted payload") from error
        verify(header, payload, name)
        return replace(header, mac=None)

    def _cipher(self, salt: bytes) -> AESGCM:
        # A key of its own for each record: no count of messages after which random nonces repeat.
        return AESGCM(blake2b(salt, key=self._key, digest_size=_DIGEST_BYTES).digest())


def open_record(
    seal: Seal, name: BlockName, record: memoryview, payload: memoryview
) -> BlockHeader:
    """Check a whole record, leave its payload in `payload` and return its header.

    Raises:
        BlockCorruptError: It is not a record of this block under this seal.
    """
    length = seal.head_length(record)
    if length > len(record):
        raise BlockCorruptError("head cut short")
    header = seal.open_head(record[:length], name)
    return seal.open_body(header, name, record[length:], payload)


def configured_seal(key_file: Path | None, *, encrypt: bool) -> Seal:
    """Return how this cluster's blocks lie on shared tiers.

    Raises:
        ConfigurationError: The key file cannot be read, or has no usable key; or encryption is
            asked for without one.
    """
    if key_file is None:
        if encrypt:
            raise ConfigurationError("RADIXGATE_TIER_ENCRYPT", "needs RADIXGATE_TIER_KEY_FILE")
        return OpenSeal()
    try:
        with key_file.open("rb") as file:
            key = file.read(MAX_KEY_BYTES + 1).strip()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
        raise ConfigurationError("RADIXGATE_TIER_KEY_FILE", problem) from error
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        raise ConfigurationError(
            "RADIXGATE_TIER_KEY_FILE",
            f"has to hold {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes that nobody can guess, "
            "`openssl rand -hex 32` for example",
        )
    return AesSeal(key) if encrypt else MacSeal(key)


def _named(header: BlockHeader, name: BlockName) -> BlockHeader:
    if header.name != name:
        raise BlockCorruptError("name")
    return header


def _fill(payload: memoryview, body: ByteBuffer) -> None:
    if len(body) != len(payload):
        raise BlockCorruptError("payload length")
    if body is not payload:
        payload[:] = body


def _derived(key: bytes, purpose: bytes) -> bytes:
    return blake2b(purpose, key=blake2b(key).digest(), digest_size=_DIGEST_BYTES).digest()


def _key_id(key: bytes) -> str:
    return _derived(key, b"radixgate key id")[:4].hex()
