"""Which parts of the arena are taken: slots of equal size in segments, taken and returned in O(1).

Engines of several models have blocks of several sizes. The arena is cut into segments; a segment
holds slots of one size for as long as one of them is taken, and can then serve another size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Slot:
    """A piece of the arena, from when it is taken until it is returned."""

    offset: int
    num_bytes: int
    generation: int
    """Differs each time the same piece is taken, so that no stale owner can return it."""


@dataclass(slots=True)
class _Segment:
    slot_bytes: int = 0
    num_taken: int = 0
    num_touched: int = 0
    """Slots that were ever taken since the segment got its size; the rest costs no memory yet."""
    returned: list[int] = field(default_factory=list)


class SlotAllocator:
    """Slots of an arena of `num_segments` segments of `segment_bytes`.

    Not safe for threads.
    """

    def __init__(self, num_segments: int, segment_bytes: int) -> None:
        self.num_segments = num_segments
        self.segment_bytes = segment_bytes
        self._segments = [_Segment() for _ in range(num_segments)]
        self._free_segments = list(range(num_segments - 1, -1, -1))
        self._with_room: dict[int, dict[int, None]] = {}
        self._generations: dict[int, int] = {}
        self._next_generation = 1

    def slots_per_segment(self, slot_bytes: int) -> int:
        """How many slots of that size a segment has; 0 if they do not fit at all."""
        return self.segment_bytes // slot_bytes

    def share_bytes(self, slot_bytes: int) -> int:
        """What a slot costs with its part of what is left over at a segment's end.

        Raises:
            ZeroDivisionError: Slots of that size do not fit; see `slots_per_segment`.
        """
        return self.segment_bytes // self.slots_per_segment(slot_bytes)

    def take(self, slot_bytes: int) -> Slot | None:
        """Take a slot, or say that there is none."""
        with_room = self._with_room.setdefault(slot_bytes, {})
        index = next(iter(with_room), None)
        if index is None:
            if not self._free_segments or not self.slots_per_segment(slot_bytes):
                return None
            index = self._free_segments.pop()
            self._segments[index] = _Segment(slot_bytes)
            with_room[index] = None
        segment = self._segments[index]
        if segment.returned:
            position = segment.returned.pop()
        else:
            position = segment.num_touched
            segment.num_touched += 1
        segment.num_taken += 1
        if segment.num_taken == self.slots_per_segment(slot_bytes):
            del with_room[index]
        slot = Slot(
            index * self.segment_bytes + position * slot_bytes, slot_bytes, self._next_generation
        )
        self._next_generation += 1
        self._generations[slot.offset] = slot.generation
        return slot

    def give_back(self, slot: Slot) -> None:
        """Return a slot; its bytes may be overwritten from now on."""
        assert self._generations.pop(slot.offset, None) == slot.generation, "returned twice"
        index, within = divmod(slot.offset, self.segment_bytes)
        segment = self._segments[index]
        segment.num_taken -= 1
        with_room = self._with_room[slot.num_bytes]
        if segment.num_taken == 0:
            with_room.pop(index, None)
            self._free_segments.append(index)
            return
        segment.returned.append(within // slot.num_bytes)
        with_room[index] = None

    @property
    def used_bytes(self) -> int:
        """Bytes of all slots that are taken."""
        return sum(segment.num_taken * segment.slot_bytes for segment in self._segments)

    def segments_of_other_size(self, slot_bytes: int) -> Iterator[list[int]]:
        """Offsets of the taken slots, a list a segment, of segments that hold another size."""
        for index, segment in enumerate(self._segments):
            if segment.num_taken and segment.slot_bytes != slot_bytes:
                start = index * self.segment_bytes
                end = start + segment.num_touched * segment.slot_bytes
                yield [
                    offset
                    for offset in range(start, end, segment.slot_bytes)
                    if offset in self._generations
                ]


def slot_bytes_for(payload_bytes: int) -> int:
    """Return the distance of two payloads of that size: whole pages, so copies stay aligned."""
    return -(-payload_bytes // PAGE_BYTES) * PAGE_BYTES
