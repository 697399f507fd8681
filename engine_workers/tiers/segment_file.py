"""One file of the SSD tier: records one after the other, each aligned, never written twice.

A record is a packed header, zeros up to the next multiple of `ALIGNMENT`, the payload, and zeros
again. What is deleted is given back to the file system as a hole, which also takes the header away:
a deleted block is gone for good, without a log of deletions. These functions block.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cache_router.errors import BlockCorruptError
from engine_workers.blocks.block_header import BlockHeader, packed_length, unpack

ALIGNMENT = 4096

_FALLOC_FL_KEEP_SIZE = 1
_FALLOC_FL_PUNCH_HOLE = 2
_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a record lies."""

    segment: int
    offset: int
    head_bytes: int
    """Bytes from the record's begin to its payload."""
    payload_bytes: int

    @property
    def num_bytes(self) -> int:
        """Bytes that the record occupies."""
        return self.head_bytes + aligned(self.payload_bytes)

    @property
    def end(self) -> int:
        """Offset of the first byte behind it."""
        return self.offset + self.num_bytes


def aligned(num_bytes: int) -> int:
    """Return the next multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def write_record(
    path: Path, extent: Extent, packed: bytes, payload: memoryview, *, durable: bool
) -> None:
    """Write one record; the file is made if it is not there.

    The header comes last: what an error cuts off is no record. After a power cut the header may be
    there without the payload; its checksum tells.

    Raises:
        OSError: Full, not allowed, or broken; part of the payload may have been written.
    """
    assert len(payload) == extent.payload_bytes, "it would reach into the next record"
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        begin = extent.offset + extent.head_bytes
        _write_all(file, payload, begin)
        # Without its padding, the last record of a file would look cut off.
        _write_all(file, memoryview(bytes(extent.end - begin - len(payload))), begin + len(payload))
        _write_all(file, memoryview(packed.ljust(extent.head_bytes, b"\0")), extent.offset)
        if durable:
            os.fsync(file)
    finally:
        os.close(file)


def read_record(path: Path, extent: Extent, payload: memoryview) -> BlockHeader:
    """Read a record's payload into `payload`, and return its header; verifies only the header.

    Raises:
        OSError: Not there, not allowed, or broken.
        BlockCorruptError: It ends early, or has no valid header.
    """
    head = memoryview(bytearray(extent.head_bytes))
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # One question to the device for all of it, rather than one for each readahead window.
        os.posix_fadvise(file, extent.offset, extent.num_bytes, os.POSIX_FADV_WILLNEED)
        num_read = 0
        while num_read < len(head) + len(payload):
            rest = [head[num_read:], payload[max(0, num_read - len(head)) :]]
            num_bytes = os.preadv(file, rest, extent.offset + num_read)
            if num_bytes == 0:
                raise BlockCorruptError("cut short")
            num_read += num_bytes
    finally:
        os.close(file)
    return _header_in(head)


def read_header(path: Path, extent: Extent) -> BlockHeader:
    """Read only a record's header.

    Raises:
        OSError: Not there, not allowed, or broken.
        BlockCorruptError: There is no valid header.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _header_in(os.pread(file, extent.head_bytes, extent.offset))
    finally:
        os.close(file)


def scan(path: Path, segment: int) -> Iterator[tuple[Extent, BlockHeader]]:
    """Yield the records of a file, in order, from their headers alone.

    Behind a header that cannot be read the next one is searched for; a record that the file is too
    short for is left out.

    Raises:
        OSError: Not allowed, or broken.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(file).st_size
        offset = _next_data(file, 0, size)
        while offset < size:
            try:
                found = _record_at(file, segment, offset)
            except BlockCorruptError:
                offset = _next_data(file, offset + ALIGNMENT, size)
                continue
            extent, _ = found
            if extent.end <= size:
                yield found
                offset = _next_data(file, extent.end, size)
            else:
                offset = _next_data(file, offset + ALIGNMENT, size)
    finally:
        os.close(file)


def punch(path: Path, begin: int, end: int, *, durable: bool) -> None:
    """Make a hole: these bytes read as zeros from now on and occupy nothing.

    Raises:
        OSError: Not there, not allowed, or the file system cannot do it.
    """
    file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if _libc.fallocate(file, mode, begin, end - begin) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        if durable:
            os.fsync(file)
    finally:
        os.close(file)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        num_bytes = os.pwrite(file, data, offset)
        data = data[num_bytes:]
        offset += num_bytes


def _header_in(head: bytes | memoryview) -> BlockHeader:
    return unpack(head[: packed_length(head)])


def _record_at(file: int, segment: int, offset: int) -> tuple[Extent, BlockHeader]:
    head = os.pread(file, ALIGNMENT, offset)
    length = packed_length(head)
    if length > ALIGNMENT:
        head = os.pread(file, length, offset)
    header = unpack(head[:length])
    return Extent(segment, offset, aligned(length), header.payload_bytes), header


def _next_data(file: int, offset: int, size: int) -> int:
    """Skip holes: return the first aligned offset from `offset` on that has data, or `size`."""
    if offset >= size:
        return size
    try:
        data = os.lseek(file, offset, os.SEEK_DATA)
    except OSError as error:
        if error.errno == errno.ENXIO:  # only a hole is left
            return size
        raise
    return max(offset, data // ALIGNMENT * ALIGNMENT)
