from __future__ import annotations

import mmap

import numpy as np
import pytest

from engine_workers.connector.block_layout import BlockLayout, LayerMemory
from engine_workers.connector.huge_pages import advise_huge_pages

BLOCK_BYTES = 64 * 1024


@pytest.fixture
def layer() -> tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], LayerMemory]:
    memory = np.frombuffer(mmap.mmap(-1, 128 * BLOCK_BYTES, mmap.MAP_PRIVATE), np.uint8)
    return memory, LayerMemory(memory.ctypes.data, BLOCK_BYTES, BLOCK_BYTES)


def test_advice_changes_no_content(
    layer: tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], LayerMemory],
) -> None:
    memory, where = layer
    memory[:] = 7
    assert advise_huge_pages(BlockLayout((where,), 128)) in (0, 1)
    assert (memory == 7).all()


def test_memory_smaller_than_a_large_page_is_left_alone(
    layer: tuple[np.ndarray[tuple[int], np.dtype[np.uint8]], LayerMemory],
) -> None:
    _, where = layer
    assert advise_huge_pages(BlockLayout((where,), 1)) == 0


def test_a_system_that_does_not_take_the_advice_is_no_error() -> None:
    nowhere = LayerMemory(2 * 1024 * 1024, BLOCK_BYTES, BLOCK_BYTES)
    assert advise_huge_pages(BlockLayout((nowhere,), 128)) == 0
