"""The S3 tier: one object a block, in any store that speaks S3, shared by all nodes.

Keys are `prefix/seal/namespace/first byte of the hash/hash`, so that one namespace, or a 256th of
it, is one listing. A block is written whole or not at all; two nodes that store the same one
overwrite each other with the same block.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from functools import partial

import obstore

from cache_router.errors import BlockCorruptError, BlockLostError, TierError
from cache_router.types import Medium
from engine_workers.blocks.block_header import BlockHeader
from engine_workers.blocks.block_name import BlockName
from engine_workers.blocks.sealing import MAX_HEAD_BYTES, Seal, open_record
from engine_workers.tiers.known_blocks import KnownBlocks
from engine_workers.tiers.s3_client import S3Options, connect, told_as_tier_error
from engine_workers.tiers.tier import TierUsage
from engine_workers.tiers.worker_threads import WorkerThreads

MULTIPART_BYTES = 16 * 1024 * 1024
"""Larger objects go in parts of this size, some at a time; smaller ones would gain nothing by it.
What an upload that was cut off leaves, only a rule of the bucket for stale uploads removes."""
_PARTS_AT_ONCE = 4


class S3Tier:
    """A `Tier` in S3. Whether the store is there shows when it is first asked.

    It needs permission to list the bucket: without, stores deny a block that is not there.
    """

    name = "s3"
    medium = Medium.STORAGE
    is_shared = True

    def __init__(self, options: S3Options, seal: Seal) -> None:
        self._store = connect(options)
        self._seal = seal
        self._threads = WorkerThreads(self.name, options.concurrency)
        # Its own, so that a question never waits behind megabytes.
        self._question_threads = WorkerThreads(self.name, options.concurrency)
        self._known = KnownBlocks()

    async def contains(self, names: Sequence[BlockName]) -> list[bool]:
        """Ask for each block, many at once."""
        return await self._question_threads.run_all(partial(self._is_there, name) for name in names)

    async def load_into(self, name: BlockName, payload: memoryview) -> BlockHeader:
        """Fetch and verify a block."""
        try:
            header = await self._threads.run(partial(self._load, name, payload))
        except FileNotFoundError as error:
            self._known.discard(name)
            raise BlockLostError from error
        except BlockCorruptError:
            await self.remove([name])
            raise
        self._known.add(header)
        return header

    async def store(self, header: BlockHeader, payload: memoryview) -> None:
        """Store a block, unless it is there."""
        if not (await self.contains([header.name]))[0]:
            await self._threads.run(partial(self._put, header, payload))
        self._known.add(header)

    async def remove(self, names: Sequence[BlockName]) -> None:
        """Delete blocks, one request each: not every store deletes many at once."""
        await self._question_threads.run_all(partial(self._delete, name) for name in names)
        for name in names:
            self._known.discard(name)

    async def headers(self) -> AsyncIterator[BlockHeader]:
        """Tell of what this node stored or loaded and is still there."""
        async for header in self._known.headers(self.contains):
            yield header

    def usage(self) -> TierUsage:
        """Count what this node knows of; the store may have expired some of it."""
        return self._known.usage()

    async def close(self) -> None:
        """Finish what has begun."""
        await self._threads.close()
        await self._question_threads.close()

    def _key(self, name: BlockName) -> str:
        label = self._seal.label(name)
        return f"{self._seal.scope}/{name.namespace.hex()}/{label[:2]}/{label}"

    def _is_there(self, name: BlockName) -> bool:
        try:
            with told_as_tier_error(self.name):
                obstore.head(self._store, self._key(name))
        except FileNotFoundError:
            return False
        return True

    def _load(self, name: BlockName, payload: memoryview) -> BlockHeader:
        with told_as_tier_error(self.name):
            answer = obstore.get(self._store, self._key(name))
            if answer.meta["size"] > MAX_HEAD_BYTES + len(payload) + self._seal.body_overhead:
                raise BlockCorruptError("too long")
            record = answer.bytes()
        return open_record(self._seal, name, memoryview(record), payload)

    def _put(self, header: BlockHeader, payload: memoryview) -> None:
        record = b"".join(self._seal.close(header, payload))
        try:
            with told_as_tier_error(self.name):
                obstore.put(
                    self._store,
                    self._key(header.name),
                    record,
                    use_multipart=len(record) > MULTIPART_BYTES,
                    chunk_size=MULTIPART_BYTES,
                    max_concurrency=_PARTS_AT_ONCE,
                )
        except FileNotFoundError as error:
            raise TierError(self.name, "the bucket does not exist") from error

    def _delete(self, name: BlockName) -> None:
        with suppress(FileNotFoundError), told_as_tier_error(self.name):
            obstore.delete(self._store, self._key(name))
