"""Everything that decides what the bytes of a KV block mean; blocks never cross namespaces."""

from __future__ import annotations

import hashlib
from typing import NewType

import msgspec

FORMAT_VERSION = 1

Fingerprint = NewType("Fingerprint", bytes)
"""16 bytes that stand for a namespace in names and headers."""


class Namespace(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine's way of computing and laying out KV blocks.

    Two engines may exchange blocks only if all of these are equal. A request's own cache salt and
    adapter are not here: they are in the chained hash of its first block, and so of all others.
    """

    model: str
    """Hub id or a digest of the model folder's configuration and weights' names and sizes."""
    revision: str
    weight_quantization: str
    dtype: str
    kv_dtype: str
    num_layers: int
    kv_heads: int
    head_size: int
    block_size: int
    """Tokens in a block."""
    layout: str
    """Shape and order of a block within a layer, and of the layers."""
    isa: str
    """What the layout depends on beside the shape: CPU engines pack keys by instruction set."""
    tp_size: int
    tp_rank: int
    hash_algorithm: str
    hash_seed: str
    tenant_salt: str = ""
    """Separates deployments that share a store."""
    format_version: int = FORMAT_VERSION

    @property
    def fingerprint(self) -> Fingerprint:
        """Digest over all fields, the same in every process and version of Python."""
        canonical = msgspec.json.encode(self, order="deterministic")
        return Fingerprint(hashlib.blake2b(canonical, digest_size=16).digest())

    def differences(self, other: Namespace) -> dict[str, tuple[object, object]]:
        """Fields that differ, with both values; to be named when engines cannot share."""
        return {
            name: (getattr(self, name), getattr(other, name))
            for name in self.__struct_fields__
            if getattr(self, name) != getattr(other, name)
        }
