from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from cache_router.errors import EventDecodeError
from cache_router.hashing import hash_blocks, hash_event_blocks, root_hash
from cache_router.types import BlockHash, PromptRoot, TokenIds

BLOCK_SIZE = 4

_token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=40)
_names = st.none() | st.text(min_size=1, max_size=4)
_roots = st.builds(PromptRoot, st.sampled_from(["m", "n"]), _names, _names)


def tokens(ids: list[int]) -> TokenIds:
    return np.array(ids, dtype=np.uint32)


def engine_keys(root: PromptRoot, num_blocks: int) -> list[list[str] | None]:
    """Extra keys of a text-only request, as vLLM puts them on the wire."""
    lora = [] if root.lora_name is None else [root.lora_name]
    salt = [root.cache_salt] if root.cache_salt else []
    return [(lora + salt if i == 0 else lora) or None for i in range(num_blocks)]


def hash_as_events(ids: list[int], root: PromptRoot, cut: int) -> list[BlockHash]:
    """The same sequence stored in two events, the second continuing the first."""
    num_blocks = len(ids) // BLOCK_SIZE
    keys = engine_keys(root, num_blocks)
    hashes: list[BlockHash] = []
    parent = root_hash(root.model)
    for first, last in ((0, min(cut, num_blocks)), (min(cut, num_blocks), num_blocks)):
        part = ids[first * BLOCK_SIZE : last * BLOCK_SIZE]
        stored = hash_event_blocks(
            parent, part, last - first, BLOCK_SIZE, root.lora_name, keys[first:last]
        )
        hashes += stored
        parent = hashes[-1] if hashes else parent
    return hashes


@given(_token_ids, _roots, st.integers(0, 10))
def test_a_request_and_the_events_it_causes_have_the_same_hashes(
    ids: list[int], root: PromptRoot, cut: int
) -> None:
    assert hash_blocks(tokens(ids), BLOCK_SIZE, root) == hash_as_events(ids, root, cut)


@given(_token_ids, _roots, _token_ids, _roots)
def test_requests_that_differ_in_anything_share_no_hash_from_there_on(
    ids: list[int], root: PromptRoot, other_ids: list[int], other_root: PromptRoot
) -> None:
    ours = hash_blocks(tokens(ids), BLOCK_SIZE, root)
    theirs = hash_blocks(tokens(other_ids), BLOCK_SIZE, other_root)
    num_same = 0
    if root == other_root:
        while (
            num_same < min(len(ours), len(theirs))
            and ids[: (num_same + 1) * BLOCK_SIZE] == other_ids[: (num_same + 1) * BLOCK_SIZE]
        ):
            num_same += 1
    assert ours[:num_same] == theirs[:num_same]
    assert not set(ours[num_same:]) & set(theirs[num_same:])


@given(st.text(min_size=1), st.lists(st.integers(0, 9), min_size=BLOCK_SIZE, max_size=20))
def test_a_lora_name_never_equals_a_salt(name: str, ids: list[int]) -> None:
    with_lora = hash_blocks(tokens(ids), BLOCK_SIZE, PromptRoot("m", lora_name=name))
    with_salt = hash_blocks(tokens(ids), BLOCK_SIZE, PromptRoot("m", cache_salt=name))
    assert not set(with_lora) & set(with_salt)


@given(st.text(min_size=1, max_size=6), st.text(min_size=1, max_size=6))
def test_where_a_lora_name_ends_and_a_salt_begins_counts(left: str, right: str) -> None:
    assume(left != left + right[:1])
    ids = tokens([1, 2, 3, 4])
    moved = PromptRoot("m", left + right[:1], right[1:] or None)
    assert hash_blocks(ids, 4, PromptRoot("m", left, right)) != hash_blocks(ids, 4, moved)


def test_a_partial_block_has_no_hash() -> None:
    assert len(hash_blocks(tokens([1] * 11), 4, PromptRoot("m"))) == 2
    assert hash_blocks(tokens([]), 4, PromptRoot("m")) == []


def test_an_empty_salt_is_none_as_in_the_engine() -> None:
    ids = tokens([1, 2, 3, 4])
    assert hash_blocks(ids, 4, PromptRoot("m", cache_salt="")) == hash_blocks(
        ids, 4, PromptRoot("m")
    )


def test_half_a_surrogate_pair_is_a_salt_like_any_other() -> None:
    assert len(hash_blocks(tokens([1, 2]), 2, PromptRoot("m", cache_salt="\ud800"))) == 1


def test_a_strided_or_wider_array_hashes_like_a_plain_one() -> None:
    plain = tokens(list(range(8)))
    strided = np.arange(16, dtype=np.uint32)[::2] // 2
    assert hash_blocks(strided, 4, PromptRoot("m")) == hash_blocks(plain, 4, PromptRoot("m"))


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="block size 0"):
        hash_blocks(tokens([1]), 0, PromptRoot("m"))


def test_a_lora_event_without_extra_keys_hashes_like_the_request() -> None:
    root = PromptRoot("m", lora_name="ad")
    stored = hash_event_blocks(root_hash("m"), [1, 2, 3, 4], 2, 2, "ad", None)
    assert stored == hash_blocks(tokens([1, 2, 3, 4]), 2, root)


@pytest.mark.parametrize(
    "other",
    [None, ["img"], [["img", 1]], [["imh", 0]], [b"img"], [["img", 0], "salt"]],
)
def test_what_is_in_a_block_besides_tokens_counts(other: list[object] | None) -> None:
    def stored(keys: list[object] | None) -> list[BlockHash]:
        return hash_event_blocks(root_hash("m"), [1, 2], 1, 2, None, [keys])

    assert stored([["img", 0]]) == stored([["img", 0]])
    assert stored([["img", 0]]) != stored(other)


@pytest.mark.parametrize(
    ("num_blocks", "block_size", "lora_name", "extra_keys"),
    [
        (1, 2, None, None),  # four tokens are not one block of two
        (2, 0, None, None),
        (2, 2, None, [None]),
        (2, 2, "ad", [["ad"], ["other"]]),
        (2, 2, "ad", [["ad"], None]),
        (2, 2, None, [None, [1.5]]),
        (2, 2, None, [None, [["img", True]]]),
        (2, 2, None, [None, [["img", 0, 1]]]),
    ],
)
def test_an_event_whose_parts_do_not_fit_is_refused(
    num_blocks: int,
    block_size: int,
    lora_name: str | None,
    extra_keys: list[list[object] | None] | None,
) -> None:
    with pytest.raises(EventDecodeError):
        hash_event_blocks(
            root_hash("m"), [1, 2, 3, 4], num_blocks, block_size, lora_name, extra_keys
        )
