"""The SSD tier's folder: which segments there are, where the next record goes, what is given back.

It only does the bookkeeping, on the event loop; `SsdTier` decides what is stored and runs the I/O.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from engine_workers.blocks.block_header import BlockHeader
from engine_workers.blocks.block_name import BlockName
from engine_workers.tiers.segment_file import ALIGNMENT, Extent, aligned, punch, scan

MAX_SEGMENT_BYTES = 256 * 1024 * 1024
_MIN_SEGMENTS = 16
"""A tier of small capacity has that many all the same, so that files go away as it turns over."""
_SUFFIX = ".blocks"


@dataclass(frozen=True, slots=True)
class Found:
    """A block that an earlier process left, as its header says."""

    name: BlockName
    parent_hash: bytes | None
    extent: Extent


class SegmentFolder:
    """Segments of one folder, of one process at a time.

    Raises:
        OSError: The folder cannot be made, or not be written to, or its file system has no holes;
            `BlockingIOError` if another process has it.
    """

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder = folder
        self._segment_bytes = min(MAX_SEGMENT_BYTES, capacity_bytes // _MIN_SEGMENTS)
        self._lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Better said now than when the first block has to give way.
            punch(folder / "lock", 0, ALIGNMENT, durable=False)
            self._current = max(self._segments(), default=-1) + 1
        except OSError:
            os.close(self._lock)
            raise
        self._next_offset = 0
        self._num_records: dict[int, int] = {}
        """Of each segment; those that are being written count."""

    def path(self, segment: int) -> Path:
        """Return a segment's file."""
        return self._folder / f"{segment:016d}{_SUFFIX}"

    def recover(self) -> list[Found]:
        """Read what earlier processes left, oldest first; blocks. Called once, before all else.

        A block that is there twice counts where it was stored last. Space that belongs to no block
        is given back: a record that was cut off, or what follows a header that is spoilt.

        Raises:
            OSError: A segment cannot be read, or no space be given back.
        """
        found: dict[BlockName, Found] = {}
        for segment in self._segments():
            for extent, header in scan(self.path(segment), segment):
                found.pop(header.name, None)
                found[header.name] = Found(header.name, header.parent_hash, extent)
        extents: dict[int, list[Extent]] = {segment: [] for segment in self._segments()}
        for block in found.values():
            extents[block.extent.segment].append(block.extent)
        for segment, kept in extents.items():
            self._give_back_all_but(segment, kept)
        return list(found.values())

    def allocate(self, packed: bytes, header: BlockHeader) -> Extent:
        """Choose where a record will lie; it counts as there until it is released."""
        head_bytes = aligned(len(packed))
        num_bytes = head_bytes + aligned(header.payload_bytes)
        if self._next_offset and self._next_offset + num_bytes > self._segment_bytes:
            self._current += 1
            self._next_offset = 0
        extent = Extent(self._current, self._next_offset, head_bytes, header.payload_bytes)
        self._next_offset += num_bytes
        self._num_records[self._current] = self._num_records.get(self._current, 0) + 1
        return extent

    def release(self, extent: Extent) -> bool:
        """Take note that a record is gone; say whether its whole file is of no use any more."""
        self._num_records[extent.segment] -= 1
        if self._num_records[extent.segment] or extent.segment == self._current:
            return False
        del self._num_records[extent.segment]
        return True

    def give_back(self, extent: Extent, *, is_file_unused: bool, durable: bool) -> None:
        """Return a released record's space to the file system; blocks.

        Raises:
            OSError: It cannot be done; the record may be found again by the next process.
        """
        # The file may have gone as a whole by now, or nothing of the record could be written.
        with suppress(FileNotFoundError):
            if is_file_unused:
                self.path(extent.segment).unlink()
            else:
                punch(self.path(extent.segment), extent.offset, extent.end, durable=durable)

    def make_durable(self) -> None:
        """Have the folder's own entries reach the device; blocks.

        Raises:
            OSError: The folder cannot be opened, or the device failed.
        """
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._lock)

    def _segments(self) -> list[int]:
        return sorted(self._numbers())

    def _numbers(self) -> Iterator[int]:
        for file in self._folder.glob(f"*{_SUFFIX}"):
            if file.stem.isascii() and file.stem.isdigit():
                yield int(file.stem)

    def _give_back_all_but(self, segment: int, kept: list[Extent]) -> None:
        path = self.path(segment)
        if not kept:
            path.unlink()
            return
        self._num_records[segment] = len(kept)
        position = 0
        for extent in kept:
            if extent.offset > position:
                punch(path, position, extent.offset, durable=False)
            position = extent.end
        os.truncate(path, position)
