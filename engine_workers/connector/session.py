"""What an engine gets from one life of the cache server: the arena to read, a ring to write."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_workers.cache_wire import Welcome


class SessionError(Exception):
    """The server's welcome does not fit what came with it: this connection is of no use."""


@dataclass(frozen=True, slots=True)
class Session:
    """Mapped memory of one connection. It stays valid after the connection, and the server, end."""

    boot_token: str
    arena: NDArray[np.uint8]
    """Shape (arena_bytes,), read-only."""
    ring: NDArray[np.uint8]
    """Shape (ring_slots, ring_slot_bytes); no slots for a scheduler."""

    @property
    def num_slots(self) -> int:
        """Blocks that fit the write ring."""
        return int(self.ring.shape[0])


def open_session(welcome: Welcome, descriptors: Sequence[int]) -> Session:
    """Map what the server passed; the descriptors stay the caller's to close.

    Args:
        welcome: The server's answer to Hello.
        descriptors: That of the arena, then for a worker that of its ring.

    Raises:
        SessionError: A descriptor is missing, or its memory is smaller than was said or could be
            made so later: reading behind its end would kill the engine.
        OSError: It cannot be mapped.
    """
    ring_bytes = welcome.ring_slots * welcome.ring_slot_bytes
    if len(descriptors) != (2 if ring_bytes else 1):
        raise SessionError(f"{len(descriptors)} descriptors came with the welcome")
    arena = _mapped(descriptors[0], welcome.arena_bytes, mmap.PROT_READ)
    ring = np.empty((0, 0), np.uint8)
    if ring_bytes:
        flat = _mapped(descriptors[1], ring_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        ring = flat.reshape(welcome.ring_slots, welcome.ring_slot_bytes)
    return Session(welcome.boot_token, arena, ring)


def _mapped(descriptor: int, num_bytes: int, protection: int) -> NDArray[np.uint8]:
    if num_bytes < 1 or os.fstat(descriptor).st_size < num_bytes:
        raise SessionError("the memory is smaller than the server says")
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise SessionError("the memory is not sealed against shrinking")
    return np.frombuffer(mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, protection), np.uint8)
