"""What gives way when a tier of this node is full: S3-FIFO over bytes, children before parents.

Two first-in-first-out queues: what is new waits in the small one, what was used again while it
waited goes on to the main one. Of what left either queue the name is remembered for a while: what
comes back goes into the main queue at once, and tells which of the two queues was too short. So the
share of the small queue follows the work: long where prompts are continued after many others came
between, as conversations are, short where much is never asked for again. In the published form the
small queue has a tenth of the room, always; on a trace of conversations that is worse than LRU.

A block is only worth something while all its ancestors are there: engines take a prefix from its
first block on. So a block is never chosen while a child of it stays.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

NameT = TypeVar("NameT", bound=Hashable)


class EvictionPolicy(Protocol[NameT]):
    """Decides what stays. It only knows names and sizes; whoever asks it frees the memory.

    Not safe for threads: one event loop owns it. Every call is O(1), amortized over the inserts.
    """

    capacity_bytes: int

    @property
    def used_bytes(self) -> int:
        """Bytes of all that was inserted and is neither evicted nor removed."""

    def __len__(self) -> int:
        """Number of blocks."""

    def __contains__(self, name: object) -> bool:
        """Whether the block was inserted and is neither evicted nor removed."""

    def insert(self, name: NameT, size_bytes: int, parent: NameT | None = None) -> list[NameT]:
        """Take a block of `size_bytes` (above 0) in and say who has to go for it.

        `parent` precedes it in its prefix, and stays as long as it does.

        The victims are forgotten here; the caller frees what they occupy. If the block itself does
        not fit, because it is too large or too much is pinned, it is the last of the victims and
        was not taken in. A block that is there already is touched.
        """

    def touch(self, name: NameT) -> None:
        """Note a use. Unknown names are ignored: they may have gone a moment ago."""

    def remove(self, name: NameT) -> None:
        """Forget a block that is gone for another reason; unknown names are ignored."""

    def pin(self, name: NameT) -> None:
        """Keep a block from being chosen until it was unpinned as often as pinned.

        Raises:
            KeyError: It is not here, so nothing can be promised.
        """

    def unpin(self, name: NameT) -> None:
        """Undo one `pin`; unknown names are ignored, as a removed block has lost its pins."""

    def evict(self, num_bytes: int) -> list[NameT]:
        """Choose victims of at least `num_bytes` together, of less only if all else is held."""


_FIRST_SMALL_SHARE = 0.7
_LEAST_SMALL_SHARE = 0.05
_MOST_SMALL_SHARE = 0.9
_MAX_USES = 3


@dataclass(slots=True)
class _Ghosts(Generic[NameT]):
    """Names of what has left a queue lately, oldest first."""

    max_bytes: int
    """Of the blocks that are remembered, none of which is kept."""
    num_bytes: int = 0
    _sizes: OrderedDict[NameT, int] = field(default_factory=OrderedDict)

    def add(self, name: NameT, size_bytes: int) -> None:
        """Remember a name, and forget the oldest ones beyond the bound."""
        self._sizes[name] = size_bytes
        self.num_bytes += size_bytes
        while self.num_bytes > self.max_bytes:
            _, oldest_bytes = self._sizes.popitem(last=False)
            self.num_bytes -= oldest_bytes

    def take(self, name: NameT) -> bool:
        """Forget a name; say whether it was remembered."""
        size_bytes = self._sizes.pop(name, 0)
        self.num_bytes -= size_bytes
        return size_bytes > 0


@dataclass(slots=True)
class _Entry(Generic[NameT]):
    size_bytes: int
    parent: NameT | None
    is_main: bool
    num_uses: int = 0
    num_pins: int = 0
    is_aside: bool = False
    """Taken out of its queue because it was its turn and a pin or a child held it."""


class S3Fifo(Generic[NameT]):
    """The `EvictionPolicy` of the arena and the SSD."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._entries: dict[NameT, _Entry[NameT]] = {}
        self._num_children: dict[NameT, int] = {}
        self._small: OrderedDict[NameT, None] = OrderedDict()
        self._main: OrderedDict[NameT, None] = OrderedDict()
        self._small_ghosts = _Ghosts[NameT](capacity_bytes)
        self._main_ghosts = _Ghosts[NameT](capacity_bytes)
        self._used_bytes = 0
        self._pinned_bytes = 0
        self._small_bytes = 0
        self._small_target_bytes = capacity_bytes * _FIRST_SMALL_SHARE

    @property
    def used_bytes(self) -> int:
        """Bytes of all that was inserted and is neither evicted nor removed."""
        return self._used_bytes

    def __len__(self) -> int:
        """Number of blocks."""
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        """Whether the block was inserted and is neither evicted nor removed."""
        return name in self._entries

    def insert(self, name: NameT, size_bytes: int, parent: NameT | None = None) -> list[NameT]:
        """Take a block in and say who has to go for it; see `EvictionPolicy.insert`."""
        if name in self._entries:
            self.touch(name)
            return []
        if size_bytes > self.capacity_bytes - self._pinned_bytes:
            return [name]
        is_main = self._has_come_back(name, size_bytes)
        # Before the victims are chosen: the parent must not be one of them.
        self._entries[name] = _Entry(size_bytes, parent, is_main)
        self._count_child(parent)
        victims = self.evict(self._used_bytes + size_bytes - self.capacity_bytes)
        self._used_bytes += size_bytes
        if self._used_bytes > self.capacity_bytes:
            self._drop(name)
            return [*victims, name]
        self._enqueue(name)
        return victims

    def touch(self, name: NameT) -> None:
        """Note a use; unknown names are ignored."""
        entry = self._entries.get(name)
        if entry is not None and entry.num_uses < _MAX_USES:
            entry.num_uses += 1

    def remove(self, name: NameT) -> None:
        """Forget a block that is gone for another reason; unknown names are ignored."""
        entry = self._entries.get(name)
        if entry is None:
            return
        if not entry.is_aside:
            self._unqueue(name, entry)
        self._drop(name)

    def pin(self, name: NameT) -> None:
        """Keep a block from being chosen; see `EvictionPolicy.pin`."""
        entry = self._entries[name]
        if entry.num_pins == 0:
            self._pinned_bytes += entry.size_bytes
        entry.num_pins += 1

    def unpin(self, name: NameT) -> None:
        """Undo one `pin`; unknown names are ignored."""
        entry = self._entries.get(name)
        if entry is None or entry.num_pins == 0:
            return
        entry.num_pins -= 1
        if entry.num_pins == 0:
            self._pinned_bytes -= entry.size_bytes
            self._put_back(name)

    def evict(self, num_bytes: int) -> list[NameT]:
        """Choose victims of at least `num_bytes` together, of less only if all else is held."""
        victims: list[NameT] = []
        target_bytes = self._used_bytes - num_bytes
        while self._used_bytes > target_bytes:
            name = self._next_victim()
            if name is None:
                break
            self._drop(name)
            victims.append(name)
        return victims

    def _next_victim(self) -> NameT | None:
        while self._small or self._main:
            is_from_small = bool(self._small) and (
                not self._main or self._small_bytes >= self._small_target_bytes
            )
            name, _ = (self._small if is_from_small else self._main).popitem(last=False)
            entry = self._entries[name]
            if is_from_small:
                self._small_bytes -= entry.size_bytes
            if entry.num_uses > 0:
                entry.num_uses = 0 if is_from_small else entry.num_uses - 1
                entry.is_main = True
                self._main[name] = None
            elif entry.num_pins or name in self._num_children:
                entry.is_aside = True
            else:
                ghosts = self._small_ghosts if is_from_small else self._main_ghosts
                ghosts.add(name, entry.size_bytes)
                return name
        return None

    def _enqueue(self, name: NameT) -> None:
        entry = self._entries[name]
        if entry.is_main:
            self._main[name] = None
        else:
            self._small[name] = None
            self._small_bytes += entry.size_bytes

    def _unqueue(self, name: NameT, entry: _Entry[NameT]) -> None:
        if entry.is_main:
            del self._main[name]
        else:
            del self._small[name]
            self._small_bytes -= entry.size_bytes

    def _put_back(self, name: NameT) -> None:
        """Let a block that was set aside be next in its queue, once nothing holds it."""
        entry = self._entries.get(name)
        if entry is None or not entry.is_aside or entry.num_pins or name in self._num_children:
            return
        entry.is_aside = False
        self._enqueue(name)
        (self._main if entry.is_main else self._small).move_to_end(name, last=False)

    def _drop(self, name: NameT) -> None:
        entry = self._entries.pop(name)
        self._used_bytes -= entry.size_bytes
        if entry.num_pins:
            self._pinned_bytes -= entry.size_bytes
        parent = entry.parent
        if parent is None:
            return
        if self._num_children[parent] > 1:
            self._num_children[parent] -= 1
        else:
            del self._num_children[parent]
            self._put_back(parent)

    def _count_child(self, parent: NameT | None) -> None:
        if parent is not None:
            self._num_children[parent] = self._num_children.get(parent, 0) + 1

    def _has_come_back(self, name: NameT, size_bytes: int) -> bool:
        """Whether it was here lately; if so, the queue that it left too early gets more room."""
        small, main = self._small_ghosts, self._main_ghosts
        if small.take(name):
            step = size_bytes * max(1.0, main.num_bytes / max(small.num_bytes, size_bytes))
        elif main.take(name):
            step = -size_bytes * max(1.0, small.num_bytes / max(main.num_bytes, size_bytes))
        else:
            return False
        self._small_target_bytes = min(
            max(self._small_target_bytes + step, self.capacity_bytes * _LEAST_SMALL_SHARE),
            self.capacity_bytes * _MOST_SMALL_SHARE,
        )
        return True
