"""Blocks to test with: valid ones, and strategies that make any."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import strategies as st

from engine_workers.blocks.block_header import BlockHeader, Codec, checksum_of
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.namespace import Fingerprint

NAMESPACE = Fingerprint(bytes(range(16)))
OTHER_NAMESPACE = Fingerprint(bytes(range(16, 32)))


def name_of(number: int, namespace: Fingerprint = NAMESPACE) -> BlockName:
    return BlockName(namespace, number.to_bytes(32, "big"))


def block_of(
    number: int, num_bytes: int = 4096, namespace: Fingerprint = NAMESPACE
) -> tuple[BlockHeader, bytes]:
    """A valid block and its payload, the same for the same arguments."""
    payload = random.Random(number).randbytes(num_bytes)
    header = BlockHeader(
        name=name_of(number, namespace),
        parent_hash=None if number == 0 else (number - 1).to_bytes(32, "big"),
        token_ids=tuple(range(number, number + 32)),
        extra_keys=("adapter", ("image", 3)),
        lora_name=None,
        codec=Codec.RAW,
        payload_bytes=num_bytes,
        checksum=checksum_of(payload),
    )
    return header, payload


def renamed(header: BlockHeader, name: BlockName) -> BlockHeader:
    return replace(header, name=name)


hashes = st.binary(min_size=1, max_size=64)
_leaves = st.none() | st.booleans() | st.text(max_size=20) | st.binary(max_size=20)
_keys = st.recursive(
    _leaves | st.integers(-(2**63), 2**63), lambda inner: st.tuples(inner, inner), max_leaves=6
)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[BlockHeader, bytes]:
    payload = draw(st.binary(max_size=300))
    header = BlockHeader(
        name=BlockName(Fingerprint(draw(st.binary(min_size=16, max_size=16))), draw(hashes)),
        parent_hash=draw(st.none() | hashes),
        token_ids=tuple(draw(st.lists(st.integers(0, 2**32 - 1), max_size=64))),
        extra_keys=tuple(draw(st.lists(_keys, max_size=4))),
        lora_name=draw(st.none() | st.text(max_size=20)),
        codec=Codec.RAW,
        payload_bytes=len(payload),
        checksum=checksum_of(payload),
    )
    return header, payload
