from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache_router.errors import BlockCorruptError, ConfigurationError
from engine_workers.blocks.block_header import BlockHeader, checksum_of
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.sealing import (
    MIN_HEAD_BYTES,
    AesSeal,
    MacSeal,
    OpenSeal,
    Seal,
    configured_seal,
)
from tests.engine_workers.blocks.made_blocks import OTHER_NAMESPACE, block_of, blocks, name_of

KEY = b"k" * 32
SEALS: list[Seal] = [OpenSeal(), MacSeal(KEY), AesSeal(KEY)]
KEYED_SEALS = SEALS[1:]
each_seal = pytest.mark.parametrize("seal", SEALS, ids=lambda seal: seal.scope[:4])
each_keyed_seal = pytest.mark.parametrize("seal", KEYED_SEALS, ids=lambda seal: seal.scope[:4])


def sealed(seal: Seal, header: BlockHeader, payload: bytes) -> bytes:
    head, body = seal.close(header, payload)
    return bytes(head) + bytes(body)


def opened(seal: Seal, record: bytes, name: BlockName, num_bytes: int) -> tuple[BlockHeader, bytes]:
    length = seal.head_length(record[:MIN_HEAD_BYTES])
    header = seal.open_head(record[:length], name)
    payload = bytearray(num_bytes)
    with memoryview(payload) as view:
        header = seal.open_body(header, name, record[length:], view)
    return header, bytes(payload)


@each_seal
@given(block=blocks())
def test_a_block_comes_back_as_it_was_sealed(seal: Seal, block: tuple[BlockHeader, bytes]) -> None:
    header, payload = block
    record = sealed(seal, header, payload)
    assert opened(seal, record, header.name, len(payload)) == (header, payload)
    head_bytes = seal.head_length(record)
    assert len(record) == head_bytes + len(payload) + seal.body_overhead


@each_seal
@given(block=blocks(), data=st.data())
def test_any_flipped_bit_of_a_record_is_noticed(
    seal: Seal, block: tuple[BlockHeader, bytes], data: st.DataObject
) -> None:
    header, payload = block
    record = bytearray(sealed(seal, header, payload))
    bit = data.draw(st.integers(0, len(record) * 8 - 1))
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(BlockCorruptError):
        opened(seal, bytes(record), header.name, len(payload))


@each_seal
@given(block=blocks(), data=st.data())
def test_a_record_that_is_cut_short_is_noticed(
    seal: Seal, block: tuple[BlockHeader, bytes], data: st.DataObject
) -> None:
    header, payload = block
    record = sealed(seal, header, payload)
    cut = data.draw(st.integers(0, len(record) - 1))
    with pytest.raises(BlockCorruptError):
        opened(seal, record[:cut], header.name, len(payload))


@each_seal
def test_another_blocks_record_is_noticed_in_whole_and_in_part(seal: Seal) -> None:
    one, one_payload = block_of(1)
    two, two_payload = block_of(2)
    one_record, two_record = sealed(seal, one, one_payload), sealed(seal, two, two_payload)
    with pytest.raises(BlockCorruptError):
        opened(seal, two_record, one.name, len(one_payload))
    cut = seal.head_length(one_record)
    with pytest.raises(BlockCorruptError):
        opened(seal, one_record[:cut] + two_record[cut:], one.name, len(one_payload))


@each_seal
def test_another_namespaces_block_is_noticed(seal: Seal) -> None:
    header, payload = block_of(1, namespace=OTHER_NAMESPACE)
    with pytest.raises(BlockCorruptError):
        opened(seal, sealed(seal, header, payload), name_of(1), len(payload))


@each_keyed_seal
def test_a_block_with_a_right_checksum_but_without_the_key_is_refused(seal: Seal) -> None:
    header, _ = block_of(1)
    forged = bytes(header.payload_bytes)
    header = replace(header, checksum=checksum_of(forged))
    for forger in (OpenSeal(), MacSeal(b"g" * 32), AesSeal(b"g" * 32)):
        with pytest.raises(BlockCorruptError):
            opened(seal, sealed(forger, header, forged), header.name, len(forged))


@each_keyed_seal
def test_a_forged_header_before_a_true_payload_is_refused(seal: Seal) -> None:
    header, payload = block_of(1)
    head, body = seal.close(header, payload)
    forged, _ = OpenSeal().close(replace(header, token_ids=(1, 2, 3), mac=bytes(32)), payload)
    with pytest.raises(BlockCorruptError):
        opened(seal, forged + bytes(body), header.name, len(payload))
    assert opened(seal, head + bytes(body), header.name, len(payload)) == (header, payload)


def test_encryption_shows_neither_tokens_nor_payload_and_never_repeats() -> None:
    header, payload = block_of(1)
    record, again = (sealed(AesSeal(KEY), header, payload) for _ in range(2))
    head = OpenSeal().close(header, payload)[0]
    assert payload[:32] not in record
    assert head[-64:] not in record
    assert record != again


def test_encryption_hides_the_hash_and_all_nodes_find_the_block_all_the_same() -> None:
    name = name_of(1)
    assert AesSeal(KEY).label(name) == AesSeal(KEY).label(name) != name.block_hash.hex()
    assert AesSeal(KEY).label(name) != AesSeal(KEY).label(name_of(2))
    assert AesSeal(KEY).label(name) != AesSeal(b"g" * 32).label(name)


def test_a_node_with_another_key_or_none_looks_under_other_names() -> None:
    others: list[Seal] = [MacSeal(b"g" * 32), AesSeal(b"g" * 32)]
    assert len({seal.scope for seal in [*SEALS, *others]}) == 5
    assert all(KEY.hex()[:8] not in seal.scope for seal in SEALS)


def test_the_key_comes_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef" * 4 + b"\n")
    assert isinstance(configured_seal(None, encrypt=False), OpenSeal)
    assert configured_seal(file, encrypt=False).scope == MacSeal(b"0123456789abcdef" * 4).scope
    assert isinstance(configured_seal(file, encrypt=True), AesSeal)


def test_a_key_file_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_bytes(b"short")
    for file in (tmp_path / "missing", tmp_path, short):
        with pytest.raises(ConfigurationError, match="RADIXGATE_TIER_KEY_FILE"):
            configured_seal(file, encrypt=False)
    with pytest.raises(ConfigurationError, match="RADIXGATE_TIER_KEY_FILE"):
        configured_seal(None, encrypt=True)
