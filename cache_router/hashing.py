"""Our own chained block hashes, the same for a request as for the event that it will cause.

Each hash is XXH3-64 over the block's token ids with the parent's hash as the seed. What else
changes a block's KV bytes (LoRA adapter, cache salt, images, prompt embeddings) is tagged,
written with its length, and hashed into the seed of just that block; the chain carries it on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from xxhash import xxh3_64_intdigest

from cache_router.errors import EventDecodeError
from cache_router.types import BlockHash, PromptRoot, TokenIds

_TOKEN_BYTES = 4

# Seeds of their own for roots and extra keys: no run of token ids, whatever its bytes, can
# pass for one of them.
_ROOT_SEED = 0x726F6F74
_EXTRA_KEYS_MASK = 0x6578747261


def root_hash(model: str) -> BlockHash:
    """The parent of every first block of this base model."""
    return BlockHash(xxh3_64_intdigest(_utf8(model), _ROOT_SEED))


def hash_blocks(token_ids: TokenIds, block_size: int, root: PromptRoot) -> list[BlockHash]:
    """Chain-hash full blocks, parent first: (num_tokens,) to (num_tokens // block_size,).

    The LoRA name counts on every block, the cache salt on the first one only, as in the engine,
    which takes an empty salt for none.

    Raises:
        ValueError: `block_size` is below 1.
    """
    if block_size < 1:
        raise ValueError(f"block size {block_size} is below 1")
    num_blocks = len(token_ids) // block_size
    lora = b"" if root.lora_name is None else _keyed(b"L", _utf8(root.lora_name))
    salt = _keyed(b"S", _utf8(root.cache_salt)) if root.cache_salt else b""
    extra_keys = [lora] * num_blocks
    if extra_keys:
        extra_keys[0] = lora + salt
    return _chain(root_hash(root.model), token_ids, block_size, extra_keys)


def hash_event_blocks(
    parent: BlockHash,
    token_ids: Sequence[int],
    num_blocks: int,
    block_size: int,
    lora_name: str | None,
    extra_keys: Sequence[Sequence[Any] | None] | None,
) -> list[BlockHash]:
    """Chain-hash the blocks of one stored event: (num_blocks * block_size,) to (num_blocks,).

    Args:
        parent: Our hash of the block before the first one, or the model's root.
        token_ids: Token ids of all the blocks, each in 32 bits.
        num_blocks: How many blocks the event names.
        block_size: Tokens of each block.
        lora_name: The adapter that the blocks were computed with.
        extra_keys: For each block, as the wire carries them: the LoRA name if there is one,
            `(identifier, offset)` of images and the like, the cache salt, embedding digests.

    Raises:
        EventDecodeError: tokens or extra keys do not belong to that many blocks, or an extra
            key is of no known kind; hashes made of them would match the wrong requests.
    """
    if block_size < 1 or len(token_ids) != num_blocks * block_size:
        raise EventDecodeError(
            f"{len(token_ids)} token ids are not {num_blocks} blocks of {block_size}"
        )
    if extra_keys is not None and len(extra_keys) != num_blocks:
        raise EventDecodeError(f"extra keys of {len(extra_keys)} blocks for {num_blocks}")
    if extra_keys is None:
        encoded = [b"" if lora_name is None else _keyed(b"L", _utf8(lora_name))] * num_blocks
    else:
        encoded = [_encode_event_keys(keys or (), lora_name) for keys in extra_keys]
    return _chain(parent, np.array(token_ids, dtype=np.uint32), block_size, encoded)


def _chain(
    parent: BlockHash, token_ids: TokenIds, block_size: int, extra_keys: Sequence[bytes]
) -> list[BlockHash]:
    """Hash as many blocks as there are encoded extra keys (`b""` is none)."""
    little_endian = np.ascontiguousarray(token_ids, dtype="<u4")
    view = little_endian.view(np.uint8).data
    block_bytes = block_size * _TOKEN_BYTES
    hashes: list[BlockHash] = []
    seed: int = parent
    start = 0
    for keys in extra_keys:
        if keys:
            seed = xxh3_64_intdigest(keys, seed ^ _EXTRA_KEYS_MASK)
        end = start + block_bytes
        seed = xxh3_64_intdigest(view[start:end], seed)
        start = end
        hashes.append(BlockHash(seed))
    return hashes


def _encode_event_keys(keys: Sequence[Any], lora_name: str | None) -> bytes:
    """Put back the tags that the wire leaves out.

    Only the position tells a LoRA name from a salt, so a list that does not begin with the
    event's own LoRA name is refused rather than read as something else.
    """
    parts: list[bytes] = []
    rest = keys
    if lora_name is not None:
        if not keys or keys[0] != lora_name:
            raise EventDecodeError("extra keys of a LoRA block do not begin with its name")
        parts.append(_keyed(b"L", _utf8(lora_name)))
        rest = keys[1:]
    for key in rest:
        match key:
            case str():
                parts.append(_keyed(b"S", _utf8(key)))
            case bytes():
                parts.append(_keyed(b"E", key))
            case [str() as identifier, int() as offset] if not isinstance(offset, bool):
                parts.append(_keyed(b"M", _utf8(identifier)))
                parts.append(_keyed(b"O", str(offset).encode()))
            case _:
                raise EventDecodeError(f"an extra key of an unknown kind: {type(key).__name__}")
    return b"".join(parts)


def _keyed(tag: bytes, value: bytes) -> bytes:
    return tag + len(value).to_bytes(8, "little") + value


def _utf8(text: str) -> bytes:
    # JSON lets a client send half of a surrogate pair as its salt; it is only a name here.
    return text.encode("utf-8", "surrogatepass")
