"""The SSD tier: blocks in the segment files of a local folder.

Blocks are found by an index in memory, which a new process rebuilds from the headers in the files;
payloads are verified when they are loaded. Nothing is flushed for each block unless asked for: what
a power cut leaves half-written, its checksum gives away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cache_router.errors import BlockCorruptError, BlockLostError, TierError
from cache_router.types import Medium
from engine_workers.blocks.block_header import BlockHeader, pack, verify
from engine_workers.blocks.block_name import BlockName
from engine_workers.cache_server.eviction import EvictionPolicy
from engine_workers.tiers.segment_file import (
    Extent,
    aligned,
    read_header,
    read_record,
    write_record,
)
from engine_workers.tiers.segment_folder import Found, SegmentFolder
from engine_workers.tiers.tier import TierUsage
from engine_workers.tiers.worker_threads import WorkerThreads

_HEADERS_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class SsdOptions:
    """How an SSD tier works."""

    folder: Path
    num_threads: int = 4
    durable: bool = False
    """Whether `store` returns only when the block has reached the device."""


class SsdTier:
    """A `Tier` on a local disk. Made by `open`.

    What it takes for full is the policy's capacity. `evicted` is told which blocks gave way, when
    they are no longer there.
    """

    name = "ssd"
    medium = Medium.STORAGE
    is_shared = False

    def __init__(
        self,
        options: SsdOptions,
        folder: SegmentFolder,
        policy: EvictionPolicy[BlockName],
        evicted: Callable[[Sequence[BlockName]], None],
        threads: WorkerThreads,
    ) -> None:
        self._options = options
        self._folder = folder
        self._policy = policy
        self._evicted = evicted
        self._threads = threads
        self._extents: dict[BlockName, Extent] = {}
        self._storing: dict[BlockName, asyncio.Future[None]] = {}
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        options: SsdOptions,
        policy: EvictionPolicy[BlockName],
        evicted: Callable[[Sequence[BlockName]], None],
    ) -> SsdTier:
        """Take the folder, make it if need be, and find what is in it.

        Raises:
            TierError: It cannot be used, or another process uses it.
        """
        threads = WorkerThreads("ssd", options.num_threads)
        try:
            folder = await threads.run(
                partial(SegmentFolder, options.folder, policy.capacity_bytes)
            )
        except OSError as error:
            await threads.close()
            raise _tier_error(error) from error
        tier = cls(options, folder, policy, evicted, threads)
        try:
            await tier._take(await threads.run(folder.recover))
        except BaseException as error:
            await tier.close()
            if isinstance(error, OSError):
                raise _tier_error(error) from error
            raise
        return tier

    async def contains(self, names: Sequence[BlockName]) -> list[bool]:
        """Say which blocks are there, from memory."""
        self._require_open()
        return [name in self._extents for name in names]

    async def load_into(self, name: BlockName, payload: memoryview) -> BlockHeader:
        """Read and verify a block."""
        self._require_open()
        extent = self._extents.get(name)
        if extent is None:
            raise BlockLostError
        try:
            header = await self._threads.run(partial(self._read, name, extent, payload))
        except (BlockCorruptError, FileNotFoundError) as error:
            if self._extents.get(name) != extent:
                raise BlockLostError("gave way while it was read") from error
            await self._drop([name], durable=True)
            if isinstance(error, BlockCorruptError):
                raise
            raise BlockLostError("gone with its file") from error
        except OSError as error:
            raise _tier_error(error) from error
        self._policy.touch(name)
        return header

    async def store(self, header: BlockHeader, payload: memoryview) -> None:
        """Write a block, once however many store it at the same time."""
        self._require_open()
        name = header.name
        while (storing := self._storing.get(name)) is not None:
            await asyncio.wait([storing])
        if name in self._extents:
            self._policy.touch(name)
            return
        self._storing[name] = asyncio.get_running_loop().create_future()
        try:
            await self._store_new(header, payload)
        finally:
            self._storing.pop(name).set_result(None)

    async def remove(self, names: Sequence[BlockName]) -> None:
        """Delete blocks and give their space back."""
        self._require_open()
        await self._drop(names, durable=False)

    async def headers(self) -> AsyncIterator[BlockHeader]:
        """Read the headers of all blocks, in the order in which they were stored."""
        self._require_open()
        blocks = list(self._extents.items())
        for begin in range(0, len(blocks), _HEADERS_AT_ONCE):
            part = blocks[begin : begin + _HEADERS_AT_ONCE]
            try:
                headers = await self._threads.run(partial(self._read_headers, part))
            except OSError as error:
                raise _tier_error(error) from error
            lost = [
                name
                for (name, extent), header in zip(part, headers, strict=True)
                if header is None and self._extents.get(name) == extent
            ]
            await self._drop(lost, durable=True)
            for header in headers:
                if header is not None and header.name in self._extents:
                    yield header

    def usage(self) -> TierUsage:
        """Count blocks and bytes, padding and headers included."""
        return TierUsage(len(self._extents), self._policy.used_bytes, self._policy.capacity_bytes)

    async def close(self) -> None:
        """Finish what is being written and let another process have the folder."""
        if not self._is_closed:
            self._is_closed = True
            await self._threads.close()
            self._folder.close()

    async def _take(self, found: Sequence[Found]) -> None:
        for block in found:
            self._extents[block.name] = block.extent
        for block in found:
            victims = self._policy.insert(
                block.name, block.extent.num_bytes, _parent(block.name, block.parent_hash)
            )
            await self._give_back(victims, durable=False)

    async def _store_new(self, header: BlockHeader, payload: memoryview) -> None:
        name = header.name
        packed = pack(header)
        num_bytes = aligned(len(packed)) + aligned(len(payload))
        victims = self._policy.insert(name, num_bytes, _parent(name, header.parent_hash))
        if name in victims:
            await self._evict([victim for victim in victims if victim != name])
            raise TierError(self.name, f"no room for {num_bytes} bytes")
        # It is in the policy while it is not written yet, and must not be chosen meanwhile.
        self._policy.pin(name)
        extent: Extent | None = None
        is_stored = False
        try:
            await self._evict(victims)
            extent = self._folder.allocate(packed, header)
            await self._threads.run(partial(self._write, extent, packed, payload))
            self._extents[name] = extent
            is_stored = True
        except OSError as error:
            raise _tier_error(error) from error
        finally:
            self._policy.unpin(name)
            if not is_stored:
                self._policy.remove(name)
                if extent is not None:
                    await self._release([extent], durable=False)

    async def _evict(self, victims: Sequence[BlockName]) -> None:
        if victims:
            try:
                await self._give_back(victims, durable=False)
            finally:
                self._evicted(victims)

    async def _drop(self, names: Sequence[BlockName], *, durable: bool) -> None:
        for name in names:
            if name in self._extents:
                self._policy.remove(name)
        await self._give_back(names, durable=durable)

    async def _give_back(self, names: Sequence[BlockName], *, durable: bool) -> None:
        extents = [self._extents.pop(name) for name in names if name in self._extents]
        if extents:
            await self._release(extents, durable=durable)

    async def _release(self, extents: Sequence[Extent], *, durable: bool) -> None:
        released = [(extent, self._folder.release(extent)) for extent in extents]

        def give_back() -> None:
            for extent, is_file_unused in released:
                self._folder.give_back(extent, is_file_unused=is_file_unused, durable=durable)

        try:
            await self._threads.run(give_back)
        except OSError as error:
            raise _tier_error(error) from error

    def _read(self, name: BlockName, extent: Extent, payload: memoryview) -> BlockHeader:
        header = read_record(self._folder.path(extent.segment), extent, payload)
        verify(header, payload, name)
        return header

    def _read_headers(self, blocks: Sequence[tuple[BlockName, Extent]]) -> list[BlockHeader | None]:
        """Read headers; None for one that is not what it should be."""
        headers: list[BlockHeader | None] = []
        for name, extent in blocks:
            try:
                header = read_header(self._folder.path(extent.segment), extent)
            except (BlockCorruptError, FileNotFoundError):
                headers.append(None)
            else:
                headers.append(header if header.name == name else None)
        return headers

    def _write(self, extent: Extent, packed: bytes, payload: memoryview) -> None:
        path = self._folder.path(extent.segment)
        write_record(path, extent, packed, payload, durable=self._options.durable)
        if self._options.durable:
            self._folder.make_durable()

    def _require_open(self) -> None:
        if self._is_closed:
            raise TierError(self.name, "closed")


def _parent(name: BlockName, parent_hash: bytes | None) -> BlockName | None:
    return None if parent_hash is None else BlockName(name.namespace, parent_hash)


def _tier_error(error: OSError) -> TierError:
    if isinstance(error, BlockingIOError):
        return TierError(SsdTier.name, "another process uses its folder")
    return TierError(SsdTier.name, error.strerror or type(error).__name__)
