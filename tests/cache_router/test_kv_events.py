from __future__ import annotations

import contextlib
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cache_router.errors import EventDecodeError
from cache_router.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
)
from cache_router.types import Medium, TierId


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.5, list(events), 0])


MAP_STORED = {
    "type": "BlockStored",
    "block_hashes": [2**64 - 1, b"\x01" * 32],
    "parent_block_hash": 7,
    "token_ids": [1, 2, 3, 2**32 - 1],
    "block_size": 2,
    "lora_id": 1,
    "medium": "GPU",
    "lora_name": "ad",
    "extra_keys": [["ad", ["img", 3], "salt"], None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
    "session_id": "a field that we do not know",
}


def test_map_form_of_vllm_0_32_is_read() -> None:
    removed = {"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU", "group_idx": 1}
    removed["ownership"] = "ram"
    decoded = decode_batch(batch(MAP_STORED, removed, {"type": "AllBlocksCleared"}))
    assert decoded == EventBatch(
        [
            BlockStored(
                [2**64 - 1, b"\x01" * 32],
                7,
                [1, 2, 3, 2**32 - 1],
                2,
                Medium.GPU,
                "ad",
                [["ad", ["img", 3], "salt"], None],
                0,
                "full_attention",
            ),
            BlockRemoved([5], Medium.CPU, 1, "ram"),
            AllBlocksCleared(),
        ]
    )


@pytest.mark.parametrize(
    "tail",
    [[], ["GPU"], ["GPU", None], ["GPU", None, None], ["GPU", None, None, None, None, 0, "new"]],
)
def test_array_form_of_older_versions_is_read(tail: list[Any]) -> None:
    stored = ["BlockStored", [b"h"], None, [1, 2], 2, None, *tail]
    decoded = decode_batch(batch(stored, ["BlockRemoved", [b"h"]], ["AllBlocksCleared"]))
    assert decoded == EventBatch(
        [BlockStored([b"h"], None, [1, 2], 2), BlockRemoved([b"h"]), AllBlocksCleared()]
    )


def test_unknown_event_types_are_skipped_and_counted_in_both_forms() -> None:
    decoded = decode_batch(batch({"type": "New", "x": 1}, ["Newer", 2], ["AllBlocksCleared"]))
    assert decoded == EventBatch([AllBlocksCleared()], num_unknown=2)


def test_a_batch_without_rank_or_events_is_read() -> None:
    assert decode_batch(msgspec.msgpack.encode([1.5, []])) == EventBatch([])


@pytest.mark.parametrize(
    ("name", "medium"),
    [
        (None, Medium.GPU),
        ("GPU", Medium.GPU),
        ("CPU", Medium.CPU),
        ("cpu", Medium.CPU),
        ("STORAGE", Medium.STORAGE),
        ("holographic", Medium.STORAGE),
    ],
)
def test_no_medium_is_gpu_and_an_unknown_one_the_slowest(name: str | None, medium: Medium) -> None:
    decoded = decode_batch(batch({"type": "BlockRemoved", "block_hashes": [1], "medium": name}))
    assert decoded.events == [BlockRemoved([1], medium)]


@pytest.mark.parametrize(
    "change",
    [{"token_ids": []}, {"block_size": 0}, {"lora_name": None}],
    ids=["no token ids", "block size 0", "adapter by number"],
)
def test_blocks_that_cannot_be_named_by_content_are_skipped_and_counted(
    change: dict[str, Any],
) -> None:
    assert decode_batch(batch(MAP_STORED | change)) == EventBatch([], num_undescribed=1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"not msgpack at all",
        b"\x91" * 100_000,
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.5]),
        batch(3),
        batch([]),
        batch({}),
        batch([3, 4]),
        batch(["BlockStored", [1]]),
        batch({"type": "BlockRemoved"}),
        batch(MAP_STORED | {"token_ids": [-1]}),
        batch(MAP_STORED | {"token_ids": [2**32]}),
        batch(MAP_STORED | {"block_size": -2}),
        batch(MAP_STORED | {"block_hashes": [1.5]}),
    ],
)
def test_what_no_engine_sends_is_refused(payload: bytes) -> None:
    with pytest.raises(EventDecodeError):
        decode_batch(payload)


@given(st.binary(max_size=200))
@example(batch(MAP_STORED)[:-20])
def test_garbage_is_read_or_refused_and_nothing_else_happens(payload: bytes) -> None:
    with contextlib.suppress(EventDecodeError):
        assert isinstance(decode_batch(payload), EventBatch)


@pytest.mark.parametrize(
    ("medium", "ownership", "tier"),
    [
        (None, None, TierId.GPU),
        ("GPU", "s3", TierId.GPU),
        ("CPU", None, TierId.RAM),
        ("STORAGE", "ssd", TierId.SSD),
        ("STORAGE", "redis", TierId.REDIS),
        ("STORAGE", "s3", TierId.S3),
        ("STORAGE", "gpu", TierId.OTHER),
        ("STORAGE", "tape", TierId.OTHER),
        ("STORAGE", None, TierId.OTHER),
        ("STORAGE", 7, TierId.OTHER),
        ("tape", None, TierId.OTHER),
    ],
)
def test_storage_is_told_apart_by_who_owns_it(
    medium: str | None, ownership: object, tier: TierId
) -> None:
    raw = {"type": "BlockRemoved", "block_hashes": [1], "medium": medium, "ownership": ownership}
    (event,) = decode_batch(batch(raw)).events
    assert isinstance(event, BlockRemoved)
    assert event.tier is tier
