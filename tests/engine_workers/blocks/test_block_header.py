from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_router.errors import BlockCorruptError
from engine_workers.blocks.block_header import (
    MAX_HEADER_BYTES,
    PREFIX_BYTES,
    BlockHeader,
    checksum_of,
    pack,
    packed_length,
    unpack,
    verify,
)
from engine_workers.blocks.block_name import BlockName
from tests.engine_workers.blocks.made_blocks import (
    OTHER_NAMESPACE,
    block_of,
    blocks,
    name_of,
    renamed,
)


@given(blocks())
def test_a_header_comes_back_as_it_was_packed(block: tuple[BlockHeader, bytes]) -> None:
    header, payload = block
    packed = pack(header)
    assert unpack(packed) == header
    assert pack(unpack(packed)) == packed
    assert packed_length(packed[:PREFIX_BYTES]) == len(packed)
    verify(header, payload, header.name)


@given(blocks(), st.data())
def test_any_flipped_bit_of_a_header_is_noticed(
    block: tuple[BlockHeader, bytes], data: st.DataObject
) -> None:
    packed = bytearray(pack(block[0]))
    bit = data.draw(st.integers(0, len(packed) * 8 - 1))
    packed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BlockCorruptError):
        unpack(packed)


@given(blocks(), st.data())
def test_a_header_that_is_cut_short_or_longer_is_none(
    block: tuple[BlockHeader, bytes], data: st.DataObject
) -> None:
    packed = pack(block[0])
    cut = data.draw(st.integers(0, len(packed) - 1))
    with pytest.raises(BlockCorruptError):
        unpack(packed[:cut])
    with pytest.raises(BlockCorruptError):
        unpack(packed + b"\0")


@given(st.binary(max_size=400))
def test_garbage_is_no_header(garbage: bytes) -> None:
    with pytest.raises(BlockCorruptError):
        unpack(garbage)
    with pytest.raises(BlockCorruptError):
        unpack(b"RGKB\x01\x00\x00\x00" + garbage)


@given(blocks(), st.data())
def test_any_flipped_bit_of_a_payload_is_noticed(
    block: tuple[BlockHeader, bytes], data: st.DataObject
) -> None:
    header, payload = block
    changed = bytearray(payload or b"\0")
    bit = data.draw(st.integers(0, len(changed) * 8 - 1))
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BlockCorruptError):
        verify(header, changed, header.name)


@given(blocks(), st.data())
def test_a_payload_that_is_cut_short_is_noticed(
    block: tuple[BlockHeader, bytes], data: st.DataObject
) -> None:
    header, payload = block
    if payload:
        cut = data.draw(st.integers(0, len(payload) - 1))
        with pytest.raises(BlockCorruptError, match="payload length"):
            verify(header, payload[:cut], header.name)


def test_another_block_of_the_namespace_is_not_taken_for_the_one_asked_for() -> None:
    header, payload = block_of(1)
    with pytest.raises(BlockCorruptError, match="block hash"):
        verify(header, payload, name_of(2))


def test_a_block_of_another_namespace_is_not_taken_for_the_one_asked_for() -> None:
    header, payload = block_of(1, namespace=OTHER_NAMESPACE)
    with pytest.raises(BlockCorruptError, match="namespace"):
        verify(header, payload, name_of(1))


def test_what_could_not_be_read_back_is_not_packed() -> None:
    header, _ = block_of(1)
    unfit = [
        replace(header, token_ids=(-1,)),
        replace(header, token_ids=(1 << 32,)),
        replace(header, token_ids=tuple(range(MAX_HEADER_BYTES // 4))),
        replace(header, extra_keys=({"a": 1},)),
        replace(header, extra_keys=(1 << 64,)),
        replace(header, parent_hash=b""),
        replace(header, checksum=1 << 64),
        replace(header, payload_bytes=-1),
        replace(header, lora_name="\ud800"),
        renamed(header, BlockName(header.name.namespace, bytes(65))),
    ]
    for case in unfit:
        with pytest.raises(ValueError, match=r"header|extra keys"):
            pack(case)


def test_a_checksum_is_the_same_for_any_kind_of_buffer() -> None:
    _, payload = block_of(1)
    assert (
        checksum_of(payload) == checksum_of(memoryview(payload)) == checksum_of(bytearray(payload))
    )
