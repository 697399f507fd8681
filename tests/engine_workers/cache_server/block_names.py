"""Block names and headers for tests that need many of them and none of their bytes."""

from __future__ import annotations

from engine_workers.blocks.block_header import BlockHeader, Codec
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.namespace import Fingerprint

NAMESPACE = Fingerprint(b"n" * 16)


def name_of(number: int, namespace: Fingerprint = NAMESPACE) -> BlockName:
    return BlockName(namespace, number.to_bytes(32, "little"))


def header_of(
    number: int,
    parent: int | None = None,
    extra_keys: tuple[object, ...] = (),
    lora_name: str | None = None,
    namespace: Fingerprint = NAMESPACE,
) -> BlockHeader:
    return BlockHeader(
        name=name_of(number, namespace),
        parent_hash=None if parent is None else name_of(parent).block_hash,
        token_ids=(),
        extra_keys=extra_keys,
        lora_name=lora_name,
        codec=Codec.RAW,
        payload_bytes=1,
        checksum=0,
    )
