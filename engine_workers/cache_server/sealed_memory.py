"""Memory that another process gets by its descriptor, with rights that nobody can widen."""

from __future__ import annotations

import fcntl
import mmap
import os

import numpy as np
from numpy.typing import NDArray

_F_SEAL_FUTURE_WRITE = 0x0010
"""From linux/fcntl.h; Python's `fcntl` does not name it."""
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class SealedMemory:
    """A memfd of fixed size. It has no name, so nothing of it outlives its processes.

    Pages are only taken from the system when they are first written.

    Attributes:
        fd: The descriptor to pass on, or to take a copy of; closed by `close`.
        data: Its bytes as they are mapped here, shape (num_bytes,).
    """

    def __init__(self, fd: int, data: NDArray[np.uint8]) -> None:
        self.fd = fd
        self.data = data

    @classmethod
    def written_here(cls, name: str, num_bytes: int) -> SealedMemory:
        """Make memory that only this process can write and all others only read.

        Raises:
            OSError: The system does not give that much address space.
        """
        fd = _memfd(name, num_bytes)
        try:
            # The writable mapping has to come first: the seal lets existing ones be.
            mapped = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE | _F_SEAL_FUTURE_WRITE)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, np.frombuffer(mapped, np.uint8))

    @classmethod
    def written_elsewhere(cls, name: str, num_bytes: int) -> SealedMemory:
        """Make memory that is read here, and written by whoever gets the descriptor.

        Its size is fixed: reading behind the end of a file that was cut would kill this process.

        Raises:
            OSError: The system does not give that much address space.
        """
        fd = _memfd(name, num_bytes)
        try:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
            mapped = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, np.frombuffer(mapped, np.uint8))

    def close(self) -> None:
        """Close the descriptor; the mapping ends with the last array that looks into it."""
        os.close(self.fd)


def _memfd(name: str, num_bytes: int) -> int:
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
    except BaseException:
        os.close(fd)
        raise
    return fd
