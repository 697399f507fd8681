from __future__ import annotations

import numpy as np
import pytest

from cache_router.errors import TokenizerError
from gateway.tokenizing.prompts import read_prompts, truncated
from gateway.tokenizing.request_fields import Truncation


def test_each_of_the_four_shapes_is_read() -> None:
    assert read_prompts("a") == ["a"]
    assert read_prompts(["a", ""]) == ["a", ""]
    (single,) = read_prompts([1, 2])
    assert isinstance(single, np.ndarray)
    assert single.dtype == np.uint32
    assert [list(ids) for ids in read_prompts([[1], [2, 3]])] == [[1], [2, 3]]


@pytest.mark.parametrize(
    "prompt",
    [None, "", [], [[]], ["a", 1], [1, "a"], [[1], 2], [[1], []], [-1], [True], [1.0], [2**32], 5],
)
def test_anything_else_is_refused(prompt: object) -> None:
    with pytest.raises(TokenizerError):
        read_prompts(prompt)


@pytest.mark.parametrize("prompt", ["a", [1]])
def test_more_prompts_than_are_worth_routing_by_are_refused(prompt: object) -> None:
    assert len(read_prompts([prompt] * 1024)) == 1024
    with pytest.raises(TokenizerError, match="more than 1024 prompts"):
        read_prompts([prompt] * 1025)


def test_the_start_gives_way_unless_the_end_is_told_to() -> None:
    ids = np.arange(5, dtype=np.uint32)
    assert list(truncated(ids, Truncation(2))) == [3, 4]
    assert list(truncated(ids, Truncation(2, "left"))) == [3, 4]
    assert list(truncated(ids, Truncation(2, "right"))) == [0, 1]
    assert list(truncated(ids, Truncation(9))) == [0, 1, 2, 3, 4]
    assert list(truncated(ids, Truncation())) == [0, 1, 2, 3, 4]
