from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_workers.cache_server.slots import Slot, SlotAllocator, slot_bytes_for

PAGE = 4096


@pytest.mark.parametrize(("payload_bytes", "expected"), [(1, PAGE), (PAGE, PAGE), (4097, 2 * PAGE)])
def test_a_slot_is_whole_pages(payload_bytes: int, expected: int) -> None:
    assert slot_bytes_for(payload_bytes) == expected


def test_a_slot_that_was_returned_is_taken_again_before_untouched_memory() -> None:
    slots = SlotAllocator(1, 4 * PAGE)
    first = slots.take(PAGE)
    assert first is not None
    slots.take(PAGE)
    slots.give_back(first)
    again = slots.take(PAGE)
    assert again is not None
    assert again.offset == first.offset
    assert again.generation != first.generation


def test_what_was_returned_and_taken_again_cannot_be_returned_by_its_old_owner() -> None:
    slots = SlotAllocator(1, 4 * PAGE)
    first = slots.take(PAGE)
    assert first is not None
    slots.give_back(first)
    slots.take(PAGE)
    with pytest.raises(AssertionError):
        slots.give_back(first)


def test_exhaustion_is_an_answer() -> None:
    slots = SlotAllocator(2, 3 * PAGE)
    taken = [slots.take(PAGE) for _ in range(7)]
    assert None not in taken[:6]
    assert taken[6] is None


def test_a_slot_larger_than_a_segment_is_never_there() -> None:
    assert SlotAllocator(4, PAGE).take(2 * PAGE) is None


def test_an_empty_segment_serves_another_size() -> None:
    slots = SlotAllocator(1, 4 * PAGE)
    small = [slots.take(PAGE) for _ in range(4)]
    assert slots.take(2 * PAGE) is None
    for slot in small:
        assert slot is not None
        slots.give_back(slot)
    assert slots.take(2 * PAGE) is not None


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 5]), st.integers(0, 30)), max_size=200))
def test_slots_never_overlap_and_all_memory_comes_back(steps: list[tuple[int, int]]) -> None:
    slots = SlotAllocator(4, 8 * PAGE)
    taken: list[Slot] = []
    for pages, choice in steps:
        if choice % 3 == 0 and taken:
            slots.give_back(taken.pop(choice % len(taken)))
        elif (slot := slots.take(pages * PAGE)) is not None:
            taken.append(slot)
        ends = sorted((slot.offset, slot.offset + slot.num_bytes) for slot in taken)
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert all(start >= 0 and end <= 32 * PAGE for start, end in ends)
        assert slots.used_bytes == sum(slot.num_bytes for slot in taken)
    for slot in taken:
        slots.give_back(slot)
    assert slots.used_bytes == 0
    assert [slots.take(8 * PAGE) is not None for _ in range(4)] == [True] * 4
