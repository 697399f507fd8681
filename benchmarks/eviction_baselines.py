"""What the eviction policy is measured against: FIFO, LRU, S3-FIFO as published, and a clairvoyant.

All blocks have one size here, so capacities are numbers of blocks.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Sequence

_NEVER = 1 << 60


class Fifo:
    """Evicts in the order of insertion."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, name: object) -> bool:
        """Whether the block is here."""
        return name in self._blocks

    def touch(self, name: int) -> None:
        """Uses change nothing."""

    def insert(self, name: int, parent: int | None) -> None:
        """Take a block in, evicting one if full."""
        self._blocks[name] = None
        if len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)


class Lru(Fifo):
    """Evicts what was not used for longest. Uses come children first, so parents outlive them."""

    def touch(self, name: int) -> None:
        """Make the block the youngest."""
        self._blocks.move_to_end(name)


class PublishedS3Fifo:
    """A small queue of a tenth, a main queue, names remembered of what left the small one."""

    _MAX_USES = 3

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, name: object) -> bool:
        """Whether the block is here."""
        return name in self._small or name in self._main

    def touch(self, name: int) -> None:
        """Count a use."""
        queue = self._small if name in self._small else self._main
        queue[name] = min(queue[name] + 1, self._MAX_USES)

    def insert(self, name: int, parent: int | None) -> None:
        """Take a block in, evicting one if full."""
        while len(self._small) + len(self._main) >= self.capacity:
            self._advance()
        if name in self._ghosts:
            del self._ghosts[name]
            self._main[name] = 0
        else:
            self._small[name] = 0

    def _advance(self) -> None:
        if self._small and (not self._main or len(self._small) >= self.capacity / 10):
            name, num_uses = self._small.popitem(last=False)
            if num_uses:
                self._main[name] = 0
                return
            self._ghosts[name] = None
            if len(self._ghosts) > self.capacity:
                self._ghosts.popitem(last=False)
        else:
            name, num_uses = self._main.popitem(last=False)
            if num_uses:
                self._main[name] = num_uses - 1


def clairvoyant_hits(prompts: Sequence[Sequence[int]], capacity: int) -> int:
    """Leading blocks found by a cache that knows the future and evicts what is used last.

    Of blocks that are used at the same time, the one deepest in its prefix goes first.
    """
    next_use = _next_uses(prompts)
    kept: dict[int, tuple[int, int]] = {}
    furthest: list[tuple[int, int, int]] = []
    num_hits = 0
    for number, prompt in enumerate(prompts):
        num_hits += leading_run(prompt, kept)
        for depth, name in enumerate(prompt):
            kept[name] = (-next_use[number][depth], -depth)
            heapq.heappush(furthest, (*kept[name], name))
        while len(kept) > capacity:
            use, depth, name = heapq.heappop(furthest)
            if kept.get(name) == (use, depth):
                del kept[name]
    return num_hits


def _next_uses(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each block of each prompt, the number of the next prompt that has it."""
    seen: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(prompts) - 1, -1, -1):
        uses.append([seen.get(name, _NEVER) for name in prompts[number]])
        seen.update(dict.fromkeys(prompts[number], number))
    return uses[::-1]


def leading_run(prompt: Sequence[int], kept: Container[int]) -> int:
    """Number of the prompt's blocks before the first that is not in `kept`."""
    missing = (depth for depth, name in enumerate(prompt) if name not in kept)
    return next(missing, len(prompt))
